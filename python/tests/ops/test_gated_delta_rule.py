"""The gated delta rule as flash-linear-attention has it, and against the implementation in transformers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from ballast.errors import UsageError
from ballast.ops import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from ballast.testing import Golden, assert_close, golden, values

INPUTS = ("q", "k", "v", "g", "beta")


def transformers_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
    """The rule of transformers, without the check for packages around it; it repeats no heads itself."""
    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)
    return inspect.unwrap(qwen.torch_chunk_gated_delta_rule)(q, k, v, g=g, beta=beta, **options)


@pytest.mark.parametrize(
    "shape",
    [
        dict(batch=2, tokens=130, value_heads=4, initial_state=True),
        dict(tokens=64, key_dim=32, value_dim=24, use_qk_l2norm_in_kernel=False),
        dict(tokens=1),
    ],
    ids=str,
)
def test_outputs_and_every_gradient_are_those_of_transformers(shape: dict[str, Any]) -> None:
    case = golden("chunk_gated_delta_rule", **shape)
    ours, theirs = case.results(chunk_gated_delta_rule), case.results(transformers_rule)
    exact = case.expected()
    assert ours.keys() == theirs.keys() == exact.keys()
    for name, x in ours.items():
        assert_close(x, theirs[name], rms=3e-5, name=name)
        assert x.dtype == theirs[name].dtype and x.shape == theirs[name].shape
        assert_close(x, exact[name], rms=2e-5, name=name)


def test_the_reference_passes_a_numeric_gradient_check() -> None:
    case = golden("chunk_gated_delta_rule", tokens=5, key_heads=1, key_dim=3, value_dim=2, initial_state=True)
    names = (*INPUTS, "initial_state")
    inputs = tuple(case.arguments[name].detach().double().requires_grad_() for name in names)

    def rule(*tensors: torch.Tensor) -> Any:
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return case.reference(**dict(zip(names, tensors, strict=True)), **options)

    assert torch.autograd.gradcheck(rule, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_token_by_token_is_the_same_rule(dtype: torch.dtype) -> None:
    case = golden(
        "chunk_gated_delta_rule", lengths=[3, 0, 40], value_heads=4, initial_state=True, dtype=dtype
    )
    given = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in case.arguments.items()}
    before = given["initial_state"].clone()
    o, state = fused_recurrent_gated_delta_rule(**given)
    expected = case.expected()
    assert o.dtype == dtype and state.dtype == torch.float32
    assert_close(o, expected["o"], rms=1e-5 if dtype == torch.float32 else 5e-3)
    assert_close(state, expected["final_state"], rms=1e-5)
    assert torch.equal(given["initial_state"], before), "the initial state was written to"
    for name, x in case.results(fused_recurrent_gated_delta_rule).items():
        assert_close(x, expected[name], rms=2e-5 if dtype == torch.float32 else 1e-2, name=name)
    torch.library.opcheck(
        torch.ops.ballast.gated_delta_rule_steps.default,
        (*(given[n].contiguous() for n in INPUTS), before, given["cu_seqlens"], 0.5, True),
    )


def test_decoding_continues_where_the_prompt_ended() -> None:
    case = golden("chunk_gated_delta_rule", tokens=50)
    given = {n: x.detach() for n, x in case.arguments.items() if n in INPUTS}
    whole, last = chunk_gated_delta_rule(**given, output_final_state=True)
    _, state = chunk_gated_delta_rule(**{n: x[:, :40] for n, x in given.items()}, output_final_state=True)
    for t in range(40, 50):
        token = {n: x[:, t : t + 1] for n, x in given.items()}
        o, state = fused_recurrent_gated_delta_rule(**token, initial_state=state, output_final_state=True)
        assert_close(o[:, 0], whole[:, t], rms=1e-5)
    assert_close(state, last, rms=1e-5)


# Signatures and settings, as flash-linear-attention 0.6.0 has them


def test_the_signatures_are_those_of_flash_linear_attention() -> None:
    assert list(inspect.signature(chunk_gated_delta_rule).parameters) == [
        *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"),
        *("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first"),
        *("cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "cp_context", "kwargs"),
    ]
    assert list(inspect.signature(fused_recurrent_gated_delta_rule).parameters) == [
        *("q", "k", "v", "g", "gk", "gv", "beta", "scale", "initial_state", "output_final_state"),
        *("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel"),
        *("allow_neg_eigval", "state_v_first", "cu_seqlens", "kwargs"),
    ]


@pytest.fixture
def given() -> dict[str, Any]:
    case = golden("chunk_gated_delta_rule", tokens=40, initial_state=True, key_dim=8)
    return {n: x for n, x in case.arguments.items() if n != "use_qk_l2norm_in_kernel"}


@pytest.mark.parametrize("rule", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_gates_are_computed_from_their_inputs_on_request(rule: Any, given: dict[str, Any]) -> None:
    a_log, dt_bias = (values([2], seed).float().requires_grad_() for seed in (8, 9))
    raw = {
        **given,
        "g": values([1, 40, 2], 1).float().requires_grad_(),
        "beta": values([1, 40, 2], 2, -3, 3).float(),
    }
    inside, _ = rule(
        **raw,
        use_gate_in_kernel=True,
        A_log=a_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )
    g = -a_log.exp() * F.softplus(raw["g"] + dt_bias)
    outside, _ = rule(**{**raw, "g": g, "beta": 2 * raw["beta"].sigmoid()})
    assert_close(inside, outside, rms=1e-6)
    for gradient in torch.autograd.grad(inside.sum(), (a_log, dt_bias, raw["g"])):
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("rule", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_states_may_have_v_first(rule: Any, given: dict[str, Any]) -> None:
    o, state = rule(**given)
    turned = {**given, "initial_state": given["initial_state"].transpose(-1, -2)}
    again, last = rule(**turned, state_v_first=True)
    assert torch.equal(again, o) and torch.equal(last.transpose(-1, -2), state)
    with pytest.warns(DeprecationWarning):
        assert torch.equal(rule(**turned, transpose_state_layout=True)[0], o)


def test_gates_and_states_in_bf16_are_widened_and_their_gradients_rounded(given: dict[str, Any]) -> None:
    low = {
        n: x.detach().bfloat16().requires_grad_() if isinstance(x, torch.Tensor) else x
        for n, x in given.items()
    }
    case = Golden(
        "chunk_gated_delta_rule", low, golden("chunk_gated_delta_rule").reference, ("o", "final_state")
    )
    results, expected = case.results(chunk_gated_delta_rule), case.expected()
    assert results["final_state"].dtype == torch.float32
    for name, x in results.items():
        assert name == "final_state" or x.dtype == torch.bfloat16, name
        assert_close(x, expected[name], rms=1e-2, name=name)


def test_mixed_storage_is_computed_in_f32_and_o_has_the_type_of_q(given: dict[str, Any]) -> None:
    mixed = {**given, "q": given["q"].detach().bfloat16()}
    o, _ = chunk_gated_delta_rule(**mixed)
    assert o.dtype == torch.bfloat16
    assert_close(o, chunk_gated_delta_rule(**{**mixed, "q": mixed["q"].float()})[0], rms=5e-3)


def test_what_flash_linear_attention_refuses_is_refused(given: dict[str, Any]) -> None:
    batch = {n: torch.cat([x, x]) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    with pytest.raises(DeprecationWarning, match="head_first was removed"):
        chunk_gated_delta_rule(**given, head_first=True)
    with pytest.raises(ValueError, match="chunk_size must be 16, 32 or 64, got 48"):
        chunk_gated_delta_rule(**given, chunk_size=48)
    with pytest.raises(ValueError, match="batch size must be 1 with cu_seqlens, got 2"):
        chunk_gated_delta_rule(**batch, cu_seqlens=torch.tensor([0, 80]))
    with pytest.raises(ValueError, match=r"initial_state must have the shape \[2, 2, 8, 16\], got \[1"):
        chunk_gated_delta_rule(**given, cu_seqlens=torch.tensor([0, 10, 40]))
    with pytest.raises(ValueError, match="allow_neg_eigval needs use_beta_sigmoid_in_kernel"):
        chunk_gated_delta_rule(**given, allow_neg_eigval=True)
    with pytest.raises(ValueError, match="HV must be a multiple of H, got 1 and 2"):
        chunk_gated_delta_rule(**{**given, "v": given["v"][:, :, :1]})
    with pytest.raises(ValueError, match="use_gate_in_kernel needs A_log"):
        chunk_gated_delta_rule(**given, use_gate_in_kernel=True)
    with pytest.raises(UsageError, match="cp_context must be None"):
        chunk_gated_delta_rule(**given, cp_context=object())
    with pytest.raises(UsageError, match="gk and gv must be None"):
        fused_recurrent_gated_delta_rule(**given, gk=torch.ones(1))
    with pytest.raises(UsageError, match=r"k must have the shape \[1, 40, 2, 8\], got \[1, 39, 2, 8\]"):
        chunk_gated_delta_rule(**{**given, "k": given["k"][:, :39]})


@pytest.mark.parametrize("rule", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("high", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("lengths", [None, [50, 0, 33]])
def test_gates_above_zero_let_the_state_grow(rule: Any, high: float, lengths: list[int] | None) -> None:
    shape = dict(batch=2, tokens=70) if lengths is None else dict(lengths=lengths)
    case = golden("chunk_gated_delta_rule", **shape, value_heads=4, initial_state=True)
    g = values(case.arguments["g"].shape, seed=7, low=-high / 2, high=high).float().requires_grad_()
    case = Golden(case.operation, {**case.arguments, "g": g}, case.reference, case.outputs)
    expected = case.expected()
    for name, x in case.results(rule).items():
        assert_close(x, expected[name], rms=1e-4 if name == "dg" else 2e-5, name=name)
    with torch.no_grad():
        for name, x in zip(case.outputs, rule(**case.arguments), strict=True):
            assert_close(x, expected[name], rms=2e-5, name=name)


def test_a_gate_that_overflows_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="g must be at most 88, so that e\\^g fits in f32, got 89"):
        chunk_gated_delta_rule(**{**given, "g": torch.full_like(given["g"], 89.0)})
