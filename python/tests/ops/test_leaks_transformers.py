"""`ballast.testing.assert_no_leak` on models of transformers, with right and wrong arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from test_transformers import model_of

import ballast
from ballast import testing

ATTENTION = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are too small for threads, which would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def patched() -> Iterator[None]:
    with ballast.patch_transformers():
        yield


def grown(model: Any) -> Any:
    """Larger weights: with the initial ones most layers would not matter."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter) if parameter.ndim > 1 else 0.0)
    return model.train()


def places(report: testing.LeakReport) -> dict[str, list[str]]:
    """Modules by the kind of their leak."""
    found: dict[str, list[str]] = {}
    for leak in report.leaks:
        found.setdefault(leak.kind, []).append(leak.module)
    return found


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3Next"])
def test_linear_attention_without_kernels_leaks_at_every_layer_in_both_ways(family: str) -> None:
    report = testing.find_leaks(model_of(family), use_cache=False)
    linear = [f"model.layers.{n}.linear_attn" for n in range(3)]
    assert places(report) == {"convolution": [f"{path}.conv1d" for path in linear], "state": linear}
    tokens = "tokens 0 to 2 of sequence 1 depend on sequence 0 (convolution window)"
    assert str(report.leaks[0]) == f"model.layers.0.linear_attn.conv1d: {tokens}"
    assert "hint: without flash-linear-attention" in str(report)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe", "Qwen3Next"])
def test_the_patched_models_pass(family: str) -> None:
    report = testing.assert_no_leak(model_of(family), use_cache=False)
    assert max(report.outputs) < 5e-6 and len(report.gradients) > 50


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("pack", [["position_ids", "cu_seq_lens"], ["position_ids", "seq_idx"]], ids=str)
def test_the_patched_model_passes_with_every_packing(pack: Any) -> None:
    assert testing.assert_no_leak(model_of("Qwen3_5"), pack=pack, use_cache=False).ok
    assert testing.assert_no_leak(model_of("Qwen3_5", torch.bfloat16), pack=pack, use_cache=False).ok


@pytest.mark.usefixtures("patched")
def test_the_argument_that_a_trainer_forgets_is_found() -> None:
    model = model_of("Qwen3_5")
    # With a cache, which is on by default, position_ids separate nothing.
    report = testing.find_leaks(model)
    assert len(report.leaks) == 7 and places(report)["attention"] == ["model.layers.3.self_attn"]
    assert "hint: config.use_cache is true" in str(report)
    report = testing.find_leaks(model, pack="seq_idx", use_cache=False)
    assert places(report) == {"attention": ["model.layers.3.self_attn"]} and report.notes == ()


@pytest.mark.usefixtures("patched")
def test_the_collator_of_transformers_is_a_pack_function() -> None:
    def packs(**options: bool) -> Any:
        collator = transformers.DataCollatorWithFlattening(**options)
        return lambda sequences: collator([{"input_ids": x.tolist()} for x in sequences])

    model = model_of("Qwen3_5")
    pack = packs(return_flash_attn_kwargs=True, return_seq_idx=True)
    assert testing.assert_no_leak(model, pack=pack, use_cache=False).ok
    report = testing.find_leaks(model, pack=packs(return_position_ids=False), use_cache=False)
    assert set(places(report)) == {"convolution", "state", "attention"}


@pytest.mark.usefixtures("patched")
def test_adapters_and_gradient_checkpointing() -> None:
    model = model_of("Qwen3_5")
    model.gradient_checkpointing_enable()
    assert testing.assert_no_leak(model, use_cache=False).ok
    adapter = LoraConfig(r=4, target_modules=["q_proj", "in_proj_qkv"], init_lora_weights=False)
    report = testing.assert_no_leak(get_peft_model(model_of("Qwen3_5"), adapter), use_cache=False)
    assert len(report.gradients) == 8 and all("lora" in name for name in report.gradients)


def test_softmax_attention_depends_on_the_arguments() -> None:
    model = grown(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**ATTENTION)))
    for pack in ("position_ids", "mask_4d", ["position_ids", "mask_4d"]):
        assert testing.assert_no_leak(model, pack=pack, use_cache=False).ok
    layers = [f"model.layers.{n}.self_attn" for n in range(2)]
    # transformers takes a mask of sequence numbers for one of padding.
    for pack in ("none", ["position_ids", "mask_2d"]):
        report = testing.find_leaks(model, pack=pack, use_cache=False)
        assert places(report) == {"attention": layers}


def test_learned_positions_that_do_not_restart_are_named() -> None:
    config = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = grown(transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))).eval()
    assert testing.assert_no_leak(model, use_cache=False).ok
    report = testing.find_leaks(model, pack="mask_4d", use_cache=False)
    assert places(report) == {"positions": ["transformer.wpe"]}


def test_mamba_without_kernels_leaks() -> None:
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=4, head_dim=16, n_groups=1
    )
    model = grown(transformers.Mamba2ForCausalLM(config))
    report = testing.find_leaks(model, pack="none", use_cache=False)
    mixers = [f"backbone.layers.{n}.mixer" for n in range(2)]
    assert places(report) == {"convolution": [f"{path}.conv1d" for path in mixers], "state": mixers}
