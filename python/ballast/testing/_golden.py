"""Golden inputs of the operations of `ballast.ops`, and their references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ballast._torch import torch
from ballast.errors import UsageError
from ballast.testing._attention import (
    attention_inputs,
    attention_reference,
    indexer_loss_inputs,
    indexer_loss_reference,
)
from ballast.testing._compare import assert_close
from ballast.testing._delta_rule import (
    gated_delta_rule_inputs,
    gated_delta_rule_reference,
    kda_inputs,
    kda_reference,
)
from ballast.testing._inputs import Maker, values
from ballast.testing._layers import (
    causal_conv1d_inputs,
    causal_conv1d_reference,
    gated_rms_norm_inputs,
    gated_rms_norm_reference,
    linear_cross_entropy_inputs,
    linear_cross_entropy_reference,
)


@dataclass(frozen=True)
class Golden:
    """Inputs of an operation and its reference."""

    operation: str
    arguments: dict[str, Any]
    """Keyword arguments of the kernel; tensors to differentiate require a gradient."""
    reference: Callable[..., Any] = field(repr=False)
    outputs: tuple[str, ...] = field(repr=False)
    """Names of the outputs."""

    def results(self, kernel: Callable[..., Any]) -> dict[str, torch.Tensor]:
        """Returns the outputs of a kernel and, as `d<name>`, the gradients for golden output gradients."""
        given = self.arguments
        found = kernel(**given)
        found = found if isinstance(found, tuple | list) else (found,)
        results = {name: x for name, x in zip(self.outputs, found, strict=False) if x is not None}
        leaves = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad}
        tops = {name: x for name, x in results.items() if x.requires_grad}
        cotangents = [values(x.shape, seed=101 + i).to(x) for i, x in enumerate(tops.values())]
        grads = torch.autograd.grad(list(tops.values()), list(leaves.values()), cotangents, allow_unused=True)
        for name, grad in zip(leaves, grads, strict=True):
            results["d" + name] = torch.zeros_like(leaves[name]) if grad is None else grad
        return results

    def expected(self) -> dict[str, torch.Tensor]:
        """Returns the outputs and gradients of the reference, in f64 on the CPU."""
        wide = {
            name: x.detach().cpu().double().requires_grad_(x.requires_grad)
            if isinstance(x, torch.Tensor) and x.is_floating_point()
            else (x.cpu() if isinstance(x, torch.Tensor) else x)
            for name, x in self.arguments.items()
        }
        case = Golden(self.operation, wide, self.reference, self.outputs)
        return {name: x.detach() for name, x in case.results(self.reference).items()}

    def check(self, kernel: Callable[..., Any], *, rms: float = 1e-5) -> dict[str, float]:
        """Compares every output and gradient of a kernel with the reference; returns their relative RMS."""
        expected, found = self.expected(), self.results(kernel)
        if found.keys() != expected.keys():
            raise AssertionError(f"{self.operation}: got {sorted(found)}, expected {sorted(expected)}")
        return {name: assert_close(found[name], expected[name], rms=rms, name=name) for name in expected}


def golden(
    operation: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    **shape: Any,  # noqa: ANN401
) -> Golden:
    """Returns golden inputs of an operation in `dtype`; gates and states stay f32.

    >>> import ballast.ops
    >>> from ballast import testing
    >>> case = testing.golden("gated_rms_norm", rows=3, width=8)
    >>> sorted(case.check(ballast.ops.gated_rms_norm))
    ['dweight', 'dx', 'dz', 'y']
    """
    if operation not in CASES:
        raise UsageError(f"unknown operation {operation!r}; use one of {', '.join(CASES)}")
    inputs, reference, outputs = CASES[operation]
    maker = Maker(dtype, device, seed)
    return Golden(operation, inputs(maker, **shape), reference, outputs)


CASES: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., Any], tuple[str, ...]]] = {
    "chunk_gated_delta_rule": (gated_delta_rule_inputs, gated_delta_rule_reference, ("o", "final_state")),
    "chunk_kda": (kda_inputs, kda_reference, ("o", "final_state")),
    "causal_conv1d_fn": (causal_conv1d_inputs, causal_conv1d_reference, ("y", "final_states")),
    "gated_rms_norm": (gated_rms_norm_inputs, gated_rms_norm_reference, ("y",)),
    "attention": (attention_inputs, attention_reference, ("o", "lse")),
    "indexer_loss": (indexer_loss_inputs, indexer_loss_reference, ("loss",)),
    "linear_cross_entropy": (linear_cross_entropy_inputs, linear_cross_entropy_reference, ("loss",)),
}
