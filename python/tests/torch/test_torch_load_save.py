"""loading and save_pretrained: bits from file to memory to file."""

import json
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch_support import (
    RELEASE,
    ROOT,
    assert_bits,
    assert_rounded,
    bits,
    is_protected,
    protected,
    release_tensors,
    saved_tensors,
    tiny_model,
)
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from ballast.errors import UsageError
from ballast.torch import RoundedWarning, keep_fp32, loading, save_pretrained

FILE = release_tensors()
PROTECTED = {name: tensor for name, tensor in FILE.items() if is_protected(name)}
F32 = {name for name, tensor in PROTECTED.items() if tensor.dtype == torch.float32}


def load(**arguments: object) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(RELEASE, **arguments)


DTYPES = [{}, {"dtype": "auto"}, {"dtype": torch.bfloat16}, {"dtype": "bfloat16"}, {"dtype": torch.float16}]


def test_the_released_form_has_a_log_and_norm_in_f32() -> None:
    assert {name.split("linear_attn.")[1] for name in F32} == {"A_log", "norm.weight"}
    assert len(PROTECTED) == 9


@pytest.mark.parametrize("arguments", DTYPES, ids=str)
def test_plain_from_pretrained_loses_the_bits(arguments: dict[str, object]) -> None:
    model = load(**arguments)
    for name in F32:
        parameter = dict(model.named_parameters())[name]
        assert parameter.dtype != torch.float32
        assert not torch.equal(parameter.float(), FILE[name])


def test_the_default_dtype_and_a_cast_lose_them_too(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = load()
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in saved_tensors(tmp_path).values()} == {torch.bfloat16}
    assert_rounded(
        load(dtype=torch.float32).to(torch.bfloat16),
        {n: FILE[n] for n in F32} | dict.fromkeys(PROTECTED.keys() - F32, torch.empty(0)),
    )


@pytest.mark.parametrize("arguments", [*DTYPES, {"dtype": torch.float32}], ids=str)
def test_loading_keeps_all_bits_and_the_rest_follows_dtype(arguments: dict[str, object]) -> None:
    with loading("strict"):
        model = load(**arguments)
    assert_bits(model, {name: tensor.float() for name, tensor in PROTECTED.items()})
    plain = load(**arguments)
    assert {n: p.dtype for n, p in model.named_parameters() if not is_protected(n)} == {
        n: p.dtype for n, p in plain.named_parameters() if not is_protected(n)
    }


def test_loading_under_a_default_dtype_of_bf16() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with loading():
            model = load()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_bits(model, {name: tensor.float() for name, tensor in PROTECTED.items()})


def test_loading_ends_with_the_block_also_after_an_error() -> None:
    before = PreTrainedModel._get_dtype_plan
    with pytest.raises(OSError), loading():
        AutoModelForCausalLM.from_pretrained(RELEASE / "nothing")
    assert PreTrainedModel._get_dtype_plan is before


def test_blocks_of_loading_may_end_in_any_order() -> None:
    before = PreTrainedModel._get_dtype_plan
    first, second = loading("none"), loading("strict")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert_bits(load(), {name: tensor.float() for name, tensor in PROTECTED.items()})
    second.__exit__(None, None, None)
    assert PreTrainedModel._get_dtype_plan is before


def test_the_policy_of_loading_decides() -> None:
    with loading("megatron"):
        model = load(dtype=torch.bfloat16)
    kinds = {name.split("linear_attn.")[1]: p.dtype for name, p in protected(model).items()}
    assert kinds == {"A_log": torch.float32, "norm.weight": torch.float32, "dt_bias": torch.bfloat16}


def test_a_tensor_that_is_missing_in_the_file_is_drawn_in_f32(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if "A_log" not in n}, file, {"format": "pt"})
    with loading():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    a_log = model.model.layers[0].linear_attn.A_log
    assert a_log.dtype == torch.float32
    assert not torch.equal(a_log, a_log.bfloat16().float())


def test_the_class_attribute_of_transformers_keeps_bits_until_a_cast(tmp_path: Path) -> None:
    kept = ["A_log", "linear_attn.norm"]
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5PreTrainedModel

    Qwen3_5PreTrainedModel._keep_in_fp32_modules_strict = kept
    try:
        model = load(dtype=torch.bfloat16)
    finally:
        Qwen3_5PreTrainedModel._keep_in_fp32_modules_strict = None
    found = dict(model.named_parameters())
    assert all(torch.equal(found[name], FILE[name]) for name in F32)
    model.save_pretrained(tmp_path)
    assert all(torch.equal(saved_tensors(tmp_path)[name], FILE[name]) for name in F32)
    found = dict(model.to(torch.bfloat16).named_parameters())
    assert all(not torch.equal(found[name].float(), FILE[name]) for name in F32)


def audited(folder: Path) -> None:
    """`ballast audit` passes."""
    try:
        from ballast.checkpoint import audit
    except ImportError:
        built = sorted(ROOT.glob("target/*/ballast"))
        program = shutil.which("ballast") or (str(built[0]) if built else None)
        if program is None:
            pytest.skip("neither ballast.checkpoint nor the program `ballast` is there")
        subprocess.run([program, "audit", str(folder)], check=True, timeout=60)
    else:
        audit(folder, policy="strict").raise_if_failed()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_what_is_saved_has_f32_and_bf16_and_passes_the_audit(tmp_path: Path, stored: torch.dtype) -> None:
    with loading():
        model = load(dtype=stored)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundedWarning)
        keep_fp32(model)
    save_pretrained(model, tmp_path)
    saved = saved_tensors(tmp_path)
    assert saved.keys() == {name for name in FILE if not name.startswith("mtp.")}, "the keys of the release"
    for name, tensor in saved.items():
        assert tensor.dtype == (torch.float32 if is_protected(name) else torch.bfloat16), name
        assert torch.equal(tensor.float(), FILE[name].float()), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"
    audited(tmp_path)


@pytest.mark.parametrize("name", sorted(folder.name for folder in (ROOT / "fixtures" / "models").iterdir()))
def test_every_family_keeps_its_bits_from_file_to_file(tmp_path: Path, name: str) -> None:
    folder = ROOT / "fixtures" / "models" / name
    file = load_file(folder / "model.safetensors")
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    with loading():
        model = kind.from_pretrained(folder, dtype=torch.bfloat16)
    kept = keep_fp32(model)
    model.half().bfloat16()
    kept.verify()
    save_pretrained(model, tmp_path)
    saved = saved_tensors(tmp_path)
    assert saved.keys() == file.keys()
    in_f32 = {key for key, tensor in saved.items() if tensor.dtype == torch.float32}
    assert in_f32 == set(kept.names) & file.keys()
    assert all(torch.equal(saved[key], file[key]) for key in in_f32)
    assert bool(in_f32) == name.startswith(("qwen", "deepseek", "gemma4_moe"))
    audited(tmp_path)


def test_it_is_loaded_again_with_all_bits(tmp_path: Path) -> None:
    model = tiny_model()
    save_pretrained(torch.compile(nn.DataParallel(model)), tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert "lm_head.weight" not in saved_tensors(tmp_path), "tied"
    with loading():
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert_bits(again, bits(model))


def test_a_model_that_was_rounded_is_saved_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(RoundedWarning, match="model.layers.1.linear_attn.A_log.*bits were lost before"):
        save_pretrained(tiny_model().bfloat16(), tmp_path)
    assert {t.dtype for n, t in saved_tensors(tmp_path).items() if is_protected(n)} == {torch.float32}


def test_adapters_and_other_modules_are_refused(tmp_path: Path) -> None:
    adapted = get_peft_model(tiny_model(), LoraConfig(target_modules=["out_proj"], r=2))
    with pytest.raises(UsageError, match=re.escape("merge_and_unload() before save_pretrained")):
        save_pretrained(adapted, tmp_path)
    with pytest.raises(UsageError, match="needs a transformers model, got Linear"):
        save_pretrained(nn.Linear(2, 2), tmp_path)
