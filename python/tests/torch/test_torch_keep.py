"""keep_fp32: protected tensors stay f32 with their bits, whatever is done to the model."""

import copy
import io
import pickle
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch_support import (
    HERE,
    Texts,
    assert_bits,
    assert_rounded,
    batch,
    bits,
    is_protected,
    protected,
    tiny_model,
)
from transformers import Trainer, TrainingArguments

from ballast.errors import CheckFailed
from ballast.torch import RoundedWarning, keep_fp32

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to(bf16)": lambda m: m.to(torch.bfloat16),
    "to(f16)": lambda m: m.to(torch.float16),
    "to(device, dtype)": lambda m: m.to("cpu", torch.bfloat16),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.bfloat16),
    "half then float": lambda m: m.half().float(),
    "a part alone": lambda m: m.apply(lambda part: part.bfloat16()),
}


@pytest.mark.parametrize("cast", CASTS)
def test_casts_leave_the_bits(cast: str) -> None:
    model = tiny_model()
    before = bits(model)
    keep_fp32(model)
    CASTS[cast](model)
    assert_bits(model, before)
    if "float" not in cast or "b" in cast:
        assert model.model.layers[0].mlp.up_proj.weight.dtype != torch.float32


def test_plain_torch_rounds_them() -> None:
    model = tiny_model()
    before = bits(model)
    model.to(torch.bfloat16).to(torch.float32)
    assert_rounded(model, before)


@pytest.mark.parametrize("flag", ["swap_module_params", "overwrite_module_params"])
@pytest.mark.parametrize("gradients", [False, True])
def test_the_flags_of_torch_leave_the_bits(flag: str, gradients: bool) -> None:
    model = tiny_model()
    before = bits(model)
    keep_fp32(model)
    if gradients:
        model(**batch()).loss.backward()
    getattr(torch.__future__, f"set_{flag}_on_conversion")(True)
    try:
        model.bfloat16()
        model.load_state_dict(tiny_model().state_dict())
    finally:
        getattr(torch.__future__, f"set_{flag}_on_conversion")(False)
    assert_bits(model, before)


def test_gradients_keep_the_dtype_of_their_tensor() -> None:
    model = tiny_model()
    keep_fp32(model)
    model(**batch()).loss.backward()
    grads = {name: p.grad.clone() for name, p in protected(model).items()}
    model.bfloat16()
    for name, parameter in protected(model).items():
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, grads[name])
    assert model.lm_head.weight.grad.dtype == torch.bfloat16


def test_a_function_that_casts_in_place_does_not_reach_them() -> None:
    model = tiny_model()
    before = bits(model)
    keep_fp32(model)

    def in_place(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            tensor.data = tensor.data.bfloat16()
        return tensor

    model._apply(in_place)
    assert_bits(model, before)
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_copies_and_pickles_are_protected_too(tmp_path: Path) -> None:
    model = tiny_model()
    before = bits(model)
    keep_fp32(model)
    assert_bits(copy.deepcopy(model).bfloat16(), before)
    assert_bits(pickle.loads(pickle.dumps(model)).bfloat16(), before)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert_bits(torch.load(file, weights_only=False).bfloat16(), before)
    # A process that never called keep_fp32, nor imported ballast.
    torch.save(model, tmp_path / "model.pt")
    torch.save(before, tmp_path / "bits.pt")
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]);"
        "from torch_support import assert_bits;"
        "model = torch.load(sys.argv[2] + '/model.pt', weights_only=False).bfloat16();"
        "assert_bits(model, torch.load(sys.argv[2] + '/bits.pt'))"
    )
    subprocess.run([sys.executable, "-c", code, str(HERE), str(tmp_path)], check=True, timeout=200)


def test_a_model_without_values_keeps_the_dtype() -> None:
    model = tiny_model()
    before = bits(model)
    kept = keep_fp32(model)
    state = model.state_dict()
    model.to("meta", torch.bfloat16)
    assert {p.dtype for p in protected(model).values()} == {torch.float32}
    model.to_empty(device="cpu")
    assert {p.dtype for p in protected(model).values()} == {torch.float32}
    model.load_state_dict(state, assign=True)
    assert_bits(model, before)
    kept.verify()


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_in_bf16_does_not_lower_them(assign: bool) -> None:
    lowered = {name: tensor.bfloat16() for name, tensor in tiny_model(1).state_dict().items()}
    model = tiny_model()
    keep_fp32(model)
    with pytest.warns(RoundedWarning, match=r"model.layers.0.linear_attn.A_log \(bf16\)"):
        model.load_state_dict(lowered, assign=assign)
    for name, tensor in protected(model).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, lowered[name].float())
    assert (model.lm_head.weight.dtype == torch.bfloat16) == assign


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_in_f32_gives_its_bits(assign: bool) -> None:
    source = tiny_model(1)
    model = tiny_model()
    keep_fp32(model)
    model.bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundedWarning)
        model.load_state_dict(source.state_dict(), assign=assign)
    assert_bits(model, bits(source))


def test_names_and_state_dicts_do_not_change_and_a_second_call_changes_nothing() -> None:
    model = tiny_model()
    names, state = [n for n, _ in model.named_modules()], list(model.state_dict())
    first = keep_fp32(model)
    hooks = {id(m): len(m._load_state_dict_pre_hooks) for m in model.modules()}
    second = keep_fp32(model)
    assert first.names == second.names
    assert hooks == {id(m): len(m._load_state_dict_pre_hooks) for m in model.modules()}
    assert [n for n, _ in model.named_modules()] == names
    assert list(model.state_dict()) == state


def test_two_policies_add_up() -> None:
    model = tiny_model()
    before = bits(model)
    keep_fp32(model, "nemo")
    keep_fp32(model, "megatron")
    assert_bits(model.bfloat16(), before)


def test_release_ends_the_protection() -> None:
    model = tiny_model()
    before = bits(model)
    keep_fp32(model).release()
    assert_rounded(model.bfloat16(), before)
    model.load_state_dict(tiny_model().state_dict(), assign=True)
    assert not any(m._load_state_dict_pre_hooks for m in model.modules())


def test_verify_names_what_no_hook_can_catch() -> None:
    model = tiny_model()
    kept = keep_fp32(model)
    kept.verify()
    a_log = model.model.layers[0].linear_attn.A_log
    exact = a_log.data.clone()
    a_log.data = exact.bfloat16()
    with pytest.raises(CheckFailed, match="model.layers.0.linear_attn.A_log is bf16, expected f32"):
        kept.verify()
    a_log.data = exact.bfloat16().float()
    with pytest.raises(CheckFailed, match="linear_attn.A_log is f32 but all its values were rounded"):
        kept.verify()
    a_log.data = exact
    kept.verify()


def test_bits_that_were_lost_before_are_reported() -> None:
    model = tiny_model().bfloat16()
    with pytest.warns(RoundedWarning, match="model.layers.0.linear_attn.dt_bias.*all values are bf16 values"):
        kept = keep_fp32(model)
    assert set(kept.rounded) >= set(protected(model))
    assert {p.dtype for p in protected(model).values()} == {torch.float32}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundedWarning)
        assert keep_fp32(tiny_model()).rounded == ()


def arguments(folder: Path, **more: object) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        bf16=True,
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **more,
    )


def test_trainer_in_bf16_keeps_f32_parameters_and_their_optimizer_state(tmp_path: Path) -> None:
    model = tiny_model()
    keep_fp32(model)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=Texts())
    trainer.train()
    for parameter in protected(model).values():
        state = trainer.optimizer.state[parameter]
        assert {parameter.dtype, state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.float32}


def test_evaluation_in_bf16_rounds_for_good_and_kept_tensors_stay(tmp_path: Path) -> None:
    for is_kept in (False, True):
        model = tiny_model()
        before = bits(model)
        if is_kept:
            keep_fp32(model)
        Trainer(model, arguments(tmp_path, bf16_full_eval=True), eval_dataset=Texts()).evaluate()
        (assert_bits if is_kept else assert_rounded)(model, before)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_merge_of_adapters_keeps_the_dtype_of_the_base(is_kept: bool) -> None:
    model = tiny_model()
    before = bits(model)
    if is_kept:
        keep_fp32(model)
        model.bfloat16()
    config = LoraConfig(target_modules=["out_proj", "in_proj_qkv"], r=2, init_lora_weights=False)
    merged = get_peft_model(model, config).merge_and_unload()
    assert_bits(merged, before)
    assert_bits(merged, bits(merged.float()))


def test_an_adapter_on_a_log_is_refused_by_peft() -> None:
    with pytest.raises(ValueError, match="not supported"):
        get_peft_model(tiny_model(), LoraConfig(target_modules=["linear_attn"], r=2))


@pytest.mark.parametrize("rate", [1e-5, 1e-4])
def test_adamw_moves_f32_values_and_no_bf16_value(rate: float) -> None:
    moved = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = tiny_model().to(dtype)
        parameters = list(protected(model).values())
        before = [p.detach().clone() for p in parameters]
        model(**batch()).loss.backward()
        # The gradients of so small a model are near the usual eps.
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, eps=1e-20)
        for _ in range(50):
            optimizer.step()
        moved[dtype] = sum(int((p != b).sum()) for p, b in zip(parameters, before, strict=True))
    # A head that forgets at once has no gradient.
    with_gradient = sum(int((p.grad != 0).sum()) for p in parameters)
    assert with_gradient >= 30
    assert moved == {torch.bfloat16: 0, torch.float32: with_gradient}


def test_the_helper_of_these_tests_names_what_the_policy_protects() -> None:
    model = tiny_model()
    kept = keep_fp32(model)
    buffers = {"model.rotary_emb.inv_freq"}
    assert set(kept.names) == {n for n, _ in model.named_parameters() if is_protected(n)} | buffers


def test_what_accelerate_sets_by_itself_is_seen_by_verify_and_kept_without_a_dtype(tmp_path: Path) -> None:
    from accelerate import load_checkpoint_and_dispatch
    from accelerate.utils import set_module_tensor_to_device

    model = tiny_model()
    before = bits(model)
    model.save_pretrained(tmp_path)
    kept = keep_fp32(model)
    model.bfloat16()
    everywhere = {"": "cpu"}
    load_checkpoint_and_dispatch(model, tmp_path, everywhere)
    assert_bits(model, before)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    kept.verify()
    name = "model.layers.0.linear_attn.A_log"
    set_module_tensor_to_device(model, name, "cpu", value=before[name].bfloat16())
    with pytest.raises(CheckFailed, match=f"{name} is f32 but all its values were rounded to bf16"):
        kept.verify()
    load_checkpoint_and_dispatch(model, tmp_path, everywhere, dtype=torch.bfloat16)
    with pytest.raises(CheckFailed, match=f"{name} is bf16, expected f32"):
        kept.verify()


def test_kept_tensors_have_the_mark_of_a_megatron_core_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("megatron.core.transformer.module")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = tiny_model()
    keep_fp32(model)
    assert not any(hasattr(p, "keep_in_fp32") for p in model.parameters())
    module.mark_keep_in_fp32 = lambda tensor: setattr(tensor, "keep_in_fp32", True)
    keep_fp32(model)
    for name, parameter in model.bfloat16().named_parameters():
        assert hasattr(parameter, "keep_in_fp32") == is_protected(name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_that_were_rounded_before_or_behind_the_guard_are_named(dtype: torch.dtype) -> None:
    word = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    with pytest.warns(RoundedWarning, match=f"linear_attn.A_log.*: all values are {word} values"):
        keep_fp32(tiny_model().to(dtype))
    model = tiny_model()
    kept = keep_fp32(model)
    for parameter in protected(model).values():
        parameter.data = parameter.data.to(dtype).float()
    with pytest.raises(CheckFailed, match=f"A_log is f32 but all its values were rounded to {word}"):
        kept.verify()
