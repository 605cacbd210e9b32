"""Derivatives beyond the first in reverse mode: torch.func gives the same, what does not exist raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from ballast import ops, testing

CASES: list[tuple[str, dict[str, Any]]] = [
    ("chunk_gated_delta_rule", dict(batch=2, tokens=40, value_heads=4, initial_state=True)),
    ("chunk_gated_delta_rule", dict(lengths=[30, 0, 12])),
    ("fused_recurrent_gated_delta_rule", dict(tokens=9)),
    ("causal_conv1d_fn", dict(batch=2, tokens=20, initial_states=True, return_final_states=True)),
    ("gated_rms_norm", dict(rows=9, width=8)),
    ("attention", dict(batch=2, tokens=20, sinks=True)),
    ("attention", dict(lengths=[20, 9], topk=5)),
    ("indexer_loss", dict(lengths=[20, 30], topk=5)),
    ("linear_cross_entropy", dict(tokens=9)),
]
EACH = pytest.mark.parametrize(("operation", "shape"), CASES, ids=lambda x: str(x))

Given = dict[str, torch.Tensor]


def problem(operation: str, shape: dict[str, Any]) -> tuple[Callable[[Given], torch.Tensor], Given]:
    """A scalar function of the tensors that can be differentiated, and these tensors."""
    case = testing.golden(operation.replace("fused_recurrent", "chunk"), **shape)
    leaves = {
        n: x.detach() for n, x in case.arguments.items() if isinstance(x, torch.Tensor) and x.requires_grad
    }
    rest = {n: x for n, x in case.arguments.items() if n not in leaves}

    def scalar(given: Given) -> torch.Tensor:
        found = getattr(ops, operation)(**given, **rest)
        found = found if isinstance(found, tuple) else (found,)
        tops = [x for x in found if x is not None and x.is_floating_point()]
        return sum((x.float() * testing.values(x.shape, seed=i).float()).sum() for i, x in enumerate(tops))

    return scalar, leaves


def reverse(scalar: Callable[[Given], torch.Tensor], given: Given) -> Given:
    leaves = {n: x.clone().requires_grad_() for n, x in given.items()}
    return dict(zip(leaves, torch.autograd.grad(scalar(leaves), list(leaves.values())), strict=True))


@EACH
def test_torch_func_gives_the_gradients_of_autograd(operation: str, shape: dict[str, Any]) -> None:
    scalar, given = problem(operation, shape)
    expected = reverse(scalar, given)
    value, pull = torch.func.vjp(scalar, given)
    for found in (torch.func.grad(scalar)(given), pull(torch.ones_like(value))[0]):
        assert found.keys() == expected.keys()
        for name, x in found.items():
            assert torch.equal(x, expected[name]) and x.any(), name


@EACH
def test_vmap_gives_each_result_and_gradient_by_itself(operation: str, shape: dict[str, Any]) -> None:
    scalar, given = problem(operation, shape)
    batch = {n: torch.stack([x, x * 0.5, x * 0.25], dim=-1) for n, x in given.items()}
    rows = [{n: x[..., i].contiguous() for n, x in batch.items()} for i in range(3)]
    found = torch.vmap(scalar, in_dims=-1)(batch)
    # Outside of a transform the recurrent form goes token by token.
    testing.assert_close(found, torch.stack([scalar(row) for row in rows]), rms=1e-5)
    expected = [reverse(scalar, row) for row in rows]
    leaves = {n: x.requires_grad_() for n, x in batch.items()}
    outside = torch.autograd.grad(torch.vmap(scalar, in_dims=-1)(leaves).sum(), list(leaves.values()))
    inside = torch.vmap(torch.func.grad(scalar), in_dims=-1)(batch)
    for (name, x), y in zip(inside.items(), outside, strict=True):
        for i in range(3):
            assert torch.equal(x[i], expected[i][name]), name
            assert torch.equal(y[..., i], expected[i][name]), name


@EACH
def test_a_second_derivative_raises(operation: str, shape: dict[str, Any]) -> None:
    scalar, given = problem(operation, shape)
    for name in given:
        leaves = {n: x.clone().requires_grad_() for n, x in given.items()}
        (first,) = torch.autograd.grad(scalar(leaves), leaves[name], create_graph=True)
        with pytest.raises(RuntimeError, match="ballast.*_backward"):
            torch.autograd.grad(first.sum(), list(leaves.values()), allow_unused=True)
    with pytest.raises(RuntimeError, match="ballast::.* has no derivative; a second derivative"):
        torch.func.grad(lambda x: sum(y.sum() for y in torch.func.grad(scalar)(x).values()))(given)


@EACH
def test_forward_mode_raises(operation: str, shape: dict[str, Any]) -> None:
    scalar, given = problem(operation, shape)
    message = "ballast::.* has no forward-mode derivative; use reverse mode"
    for name in given:
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
            scalar({**given, name: forward_ad.make_dual(given[name], torch.ones_like(given[name]))})
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(scalar, (given,), ({n: torch.ones_like(x) for n, x in given.items()},))
    with forward_ad.dual_level():
        assert torch.equal(scalar(given), scalar(given)), "without a tangent there is nothing to lose"


def test_the_selection_of_the_indexer_works_under_the_transforms() -> None:
    make = lambda *shape, seed: testing.values(shape, seed).float()  # noqa: E731
    q, k, w = make(2, 1, 20, 3, 8, seed=1), make(2, 1, 20, 8, seed=2), make(2, 1, 20, 3, seed=3)
    expected = torch.stack([ops.indexer_topk(q[i], k[i], w[i], 4) for i in range(2)])
    assert torch.equal(torch.vmap(lambda q, k, w: ops.indexer_topk(q, k, w, 4))(q, k, w), expected)
    chosen = torch.func.grad(lambda q: (ops.indexer_topk(q, k[0], w[0], 4).float().sum() * q).sum())(q[0])
    assert torch.equal(chosen, torch.full_like(q[0], expected[0].sum().item()))
