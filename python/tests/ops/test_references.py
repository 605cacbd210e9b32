"""Every operation against its f64 reference: outputs and every gradient, f32 and bf16, odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ballast import ops, testing

RMS = {torch.float32: 2e-5, torch.bfloat16: 1e-2}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("chunk_gated_delta_rule", dict(tokens=1)),
    ("chunk_gated_delta_rule", dict(tokens=33, use_qk_l2norm_in_kernel=False, scale=0.1, key_dim=8)),
    ("chunk_gated_delta_rule", dict(batch=2, tokens=70, value_heads=6, key_dim=24, value_dim=8)),
    ("chunk_gated_delta_rule", dict(batch=3, tokens=20, initial_state=True)),
    ("chunk_gated_delta_rule", dict(tokens=150, output_final_state=False)),
    ("chunk_gated_delta_rule", dict(lengths=[3, 0, 140, 1, 40], value_heads=4, initial_state=True)),
    ("chunk_gated_delta_rule", dict(lengths=[0, 5], chunk_size=16)),
    ("causal_conv1d_fn", dict(tokens=1)),
    ("causal_conv1d_fn", dict(batch=3, tokens=41, channels=130, width=3)),
    ("causal_conv1d_fn", dict(batch=2, tokens=2, initial_states=True, return_final_states=True)),
    ("causal_conv1d_fn", dict(lengths=[1, 0, 33, 2, 7], initial_states=True, return_final_states=True)),
    ("gated_rms_norm", dict(rows=1, width=8)),
    ("gated_rms_norm", dict(rows=130, width=33, eps=1e-5)),
    ("attention", dict(tokens=1)),
    ("attention", dict(batch=2, tokens=67, value_dim=24, sinks=True, soft_cap=3.0)),
    ("attention", dict(lengths=[3, 40, 1, 90], window=16, scale=0.3)),
    ("attention", dict(lengths=[30, 21], topk=5, heads=2, kv_heads=1)),
    ("indexer_loss", dict(tokens=2)),
    ("indexer_loss", dict(batch=2, tokens=40, heads=3, loss_scale=0.7)),
    ("indexer_loss", dict(lengths=[30, 21, 2], topk=6, soft_cap=4.0)),
    ("linear_cross_entropy", dict(tokens=1)),
    ("linear_cross_entropy", dict(tokens=300, vocabulary=77, ignore_index=5, reduction="sum")),
    ("linear_cross_entropy", dict(soft_cap=2.0, z_loss=1e-2, label_smoothing=0.1)),
]


def kernel(operation: str) -> Callable[..., Any]:
    return getattr(ops, operation)


def reference_arguments(case: testing.Golden) -> testing.Golden:
    """A chunk size is no argument of the reference."""
    arguments = {name: x for name, x in case.arguments.items() if name != "chunk_size"}
    return testing.Golden(case.operation, arguments, case.reference, case.outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("operation", "shape"), CASES, ids=lambda x: str(x))
def test_outputs_and_every_gradient_agree_with_the_reference(
    operation: str, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    case = testing.golden(operation, dtype=dtype, **shape)
    expected, found = reference_arguments(case).expected(), case.results(kernel(operation))
    assert found.keys() == expected.keys()
    for name, x in found.items():
        testing.assert_close(x, expected[name], rms=RMS[dtype], name=name)
        if name.startswith("d") and name[1:] in case.arguments:
            assert x.dtype == case.arguments[name[1:]].dtype, name
            assert bool(x.any()) == bool(expected[name].any()), name


@pytest.mark.parametrize(("operation", "shape"), CASES, ids=lambda x: str(x))
def test_operations_pass_opcheck(
    operation: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schema, the fake kernel, and autograd under AOT dispatch, with the arguments of a real call."""
    op = {"causal_conv1d_fn": "causal_conv", "chunk_gated_delta_rule": "gated_delta_rule"}.get(
        operation, operation
    )
    calls: list[tuple[Any, ...]] = []
    original = getattr(torch.ops.ballast, op)

    def record(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(torch.ops.ballast, op, record)
    case = testing.golden(operation, **shape)
    case.results(kernel(operation))
    monkeypatch.undo()
    detached = tuple(
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in calls[0]
    )
    torch.library.opcheck(original.default, detached)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_the_selection_of_the_indexer_is_that_of_the_reference(dtype: torch.dtype) -> None:
    make = lambda *shape, seed: testing.values(shape, seed).to(dtype)  # noqa: E731
    q, k, w = make(1, 90, 3, 8, seed=1), make(1, 90, 8, seed=2), make(1, 90, 3, seed=3).float()
    for cu_seqlens in (None, torch.tensor([0, 50, 50, 90])):
        expected = testing.indexer_topk_reference(q, k, w, 7, cu_seqlens=cu_seqlens)
        assert torch.equal(ops.indexer_topk(q, k, w, 7, cu_seqlens=cu_seqlens), expected)
    torch.library.opcheck(torch.ops.ballast.indexer_topk.default, (q, k, w, 7, None))
