"""`patch_transformers`: the same logits and gradients, packed sequences apart, undone without a trace."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import ballast
from ballast.errors import UsageError
from ballast.testing import gated_delta_rule_reference, relative_rms

SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
)
EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
)
MODELS = {
    "Qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "Qwen3_5Moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", EXPERTS),
    "Qwen3Next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", EXPERTS),
}
NAMES = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    config, model, extra = MODELS[family]
    torch.manual_seed(3)
    made = getattr(transformers, model)(getattr(transformers, config)(**SMALL, **extra))
    made.config._experts_implementation = "eager"  # the others have no f64
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            # The initial weights are so small that half of the layers would not matter.
            parameter.add_(0.2 * torch.randn_like(parameter) if "proj" in name or "conv1d" in name else 0.0)
    return made.to(dtype).train()


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    ballast.patch_transformers().undo()


def run(model: Any, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(ids, use_cache=False, **options).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    return logits.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def run_exact(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The model in f64 with the f64 rule: that of transformers computes in f32."""

    def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, output_final_state: bool, **options: Any) -> Any:
        return gated_delta_rule_reference(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)

    module = importlib.import_module(type(model).__module__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch_chunk_gated_delta_rule", rule)
        return run(model.to(torch.float64), ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("family", MODELS)
def test_logits_and_every_gradient_are_those_of_the_unpatched_model(family: str, dtype: torch.dtype) -> None:
    """Within rounding: the patched model is about as far from the f64 model as the unpatched one is."""
    if dtype == torch.bfloat16 and family != "Qwen3_5":
        pytest.skip("in bf16 a router may choose other experts for a value that rounds the other way")
    model, ids = model_of(family, dtype), torch.arange(2 * 150).reshape(2, 150) * 7 % 64
    logits, gradients = run(model, ids)
    with ballast.patch_transformers():
        patched_logits, patched = run(model, ids)
    exact_logits, exact = run_exact(model, ids)
    assert not torch.equal(patched_logits, logits), "the patch changed nothing"
    assert relative_rms(patched_logits, exact_logits) < 1.5 * relative_rms(logits, exact_logits)
    assert patched.keys() == gradients.keys()
    assert sum("linear_attn" in name for name in gradients) == 3 * (7 if family == "Qwen3Next" else 9)
    for name, gradient in gradients.items():
        far, limit = relative_rms(patched[name], exact[name]), 2 * relative_rms(gradient, exact[name])
        assert far < limit + 2e-5, f"{name}: {far:.2e} against {limit:.2e}"


LENGTHS = [5, 70, 1, 40]


def packing(how: str) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    numbers = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])[None].int()
    return {
        "position_ids": {"position_ids": positions},
        "cu_seq_lens": {"position_ids": positions, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets},
        "seq_idx": {"position_ids": positions, "seq_idx": numbers},
    }[how]


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "seq_idx"])
@pytest.mark.parametrize("family", MODELS)
def test_packed_sequences_are_those_that_run_alone(family: str, how: str) -> None:
    model, ids = model_of(family), torch.arange(sum(LENGTHS))[None] * 7 % 64
    with ballast.patch_transformers(), torch.no_grad():
        packed = model(ids, use_cache=False, **packing(how)).logits
        alone = [model(part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)]
        leaky = model(ids, use_cache=False).logits
    assert relative_rms(packed, torch.cat(alone, dim=1)) < 1e-6
    assert (packed - leaky).abs().max() > 1e-2


def test_packed_rows_of_a_batch_are_those_that_run_alone() -> None:
    model, ids = model_of("Qwen3_5"), torch.arange(2 * 30).reshape(2, 30) * 7 % 64
    positions = torch.stack([torch.arange(30), torch.cat([torch.arange(12), torch.arange(18)])])
    with ballast.patch_transformers(), torch.no_grad():
        packed = model(ids, use_cache=False, position_ids=positions).logits
        rows = [model(ids[:1], use_cache=False).logits[0]]
        rows += [model(part, use_cache=False).logits[0] for part in ids[1:].split([12, 18], dim=1)]
    assert relative_rms(packed.flatten(0, 1), torch.cat(rows)) < 1e-6


def test_packed_gradients_are_the_sum_of_those_of_the_parts() -> None:
    model, ids = model_of("Qwen3_5"), torch.arange(sum(LENGTHS))[None] * 7 % 64

    def gradients(parts: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        for part, options in parts:
            model(part, use_cache=False, **options).logits.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    with ballast.patch_transformers():
        packed = gradients([(ids, packing("position_ids"))])
        alone = gradients([(part, {}) for part in ids.split(LENGTHS, dim=1)])
    for name, gradient in alone.items():
        assert relative_rms(packed[name], gradient) < 2e-5, name


@pytest.mark.parametrize("family", MODELS)
def test_generation_gives_the_same_tokens(family: str) -> None:
    model = model_of(family).eval()
    ids = torch.arange(2 * 9).reshape(2, 9) * 7 % 64

    def generate() -> Any:
        return model.generate(
            ids, max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True
        )

    plain = generate()
    with ballast.patch_transformers():
        patched = generate()
    assert torch.equal(patched.sequences, plain.sequences)
    for a, b in zip(patched.logits, plain.logits, strict=True):
        assert relative_rms(a, b) < 2e-5


def test_a_prompt_in_two_parts_continues_from_the_cache() -> None:
    model, ids = model_of("Qwen3_5").eval(), torch.arange(50)[None] * 7 % 64
    with ballast.patch_transformers(), torch.no_grad():
        whole = model(ids, use_cache=True).logits
        first = model(ids[:, :33], use_cache=True)
        rest = model(ids[:, 33:], use_cache=True, past_key_values=first.past_key_values)
    assert relative_rms(rest.logits, whole[:, 33:]) < 2e-5


def test_checkpointing_gives_the_same_gradients() -> None:
    model, ids = model_of("Qwen3_5"), torch.arange(100)[None] * 7 % 64
    with ballast.patch_transformers():
        _, plain = run(model, ids)
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
            _, again = run(model, ids)
            model.gradient_checkpointing_disable()
            assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())


@pytest.mark.parametrize("how", [None, "position_ids", "cu_seq_lens"])
def test_the_patched_model_compiles_without_a_graph_break(how: str | None) -> None:
    torch.compiler.reset()
    model, ids = model_of("Qwen3_5"), torch.arange(sum(LENGTHS))[None] * 7 % 64
    options = {} if how is None else packing(how)
    with ballast.patch_transformers():
        logits, gradients = run(model, ids, **options)
        # A wrapper module has other names of parameters; `compile` of the model itself has none.
        model.compile(fullgraph=True, backend="aot_eager")
        compiled_logits, compiled = run(model, ids, **options)
    assert relative_rms(compiled_logits, logits) < 1e-6
    for name, gradient in gradients.items():
        assert relative_rms(compiled[name], gradient) < 1e-5, name


def test_undo_restores_every_function_and_a_second_call_returns_the_same_patch() -> None:
    modules = [
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    ]
    models = [modules[0].Qwen3NextModel, modules[1].Qwen3_5TextModel, modules[2].Qwen3_5MoeTextModel]
    before = [getattr(module, name) for module in modules for name in NAMES] + [m.forward for m in models]
    patch = ballast.patch_transformers()
    during = [getattr(module, name) for module in modules for name in NAMES] + [m.forward for m in models]
    assert not any(a is b for a, b in zip(before, during, strict=True))
    assert ballast.patch_transformers() is patch
    patch.undo()
    after = [getattr(module, name) for module in modules for name in NAMES] + [m.forward for m in models]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert ballast.patch_transformers() is not patch


def test_what_another_library_replaced_since_then_stays() -> None:
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    patch = ballast.patch_transformers()
    ours = module.causal_conv1d_fn
    module.causal_conv1d_fn = other = lambda *a, **k: ours(*a, **k)  # noqa: E731
    patch.undo()
    assert module.causal_conv1d_fn is other
    module.causal_conv1d_fn = ours.__wrapped__


def test_an_unknown_version_is_refused_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    # The module that an import finds now: transformers replaces it while it loads.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(UsageError, match=r"supports transformers 5\.22, 5\.23, found 4\.57\.1"):
        ballast.patch_transformers()
    monkeypatch.undo()


def test_dtypes_that_the_kernels_do_not_take_go_the_way_of_transformers() -> None:
    model, ids = model_of("Qwen3_5", torch.float64), torch.arange(40)[None] * 7 % 64
    logits, _ = run(model, ids)
    with ballast.patch_transformers():
        assert torch.equal(run(model, ids)[0], logits)
