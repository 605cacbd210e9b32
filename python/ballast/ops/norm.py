"""Gated RMSNorm over the last dimension, norm first, gate after.

y = x / sqrt(mean x^2 + eps) weight silu(z)
"""

from __future__ import annotations

import torch

from ballast.ops._function import function
from ballast.ops._tensors import check_cpu, check_shape, native, storage

__all__ = ["gated_rms_norm"]


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Returns y with the shape and dtype of x; z has the shape of x, weight that of its last dimension.

    Nothing is rounded before y. `weight` may stay f32 beside an x in bf16.

    >>> import torch
    >>> from ballast.ops import gated_rms_norm
    >>> gated_rms_norm(torch.tensor([3.0, -3.0]), torch.tensor([50.0, 0.0]), torch.ones(2)).round().tolist()
    [50.0, -0.0]
    """
    check_cpu("gated_rms_norm", x=x, z=z, weight=weight)
    dtype = storage("gated_rms_norm", x, z)
    check_shape("z", z, tuple(x.shape))
    check_shape("weight", weight, (x.shape[-1],))
    y, _ = _norm(x.to(dtype).contiguous(), z.to(dtype).contiguous(), weight.contiguous(), eps)
    return y.to(x.dtype)


def _outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


@torch.library.custom_op("ballast::gated_rms_norm", mutates_args=(), device_types="cpu")
def gated_rms_norm_op(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and the factors of the rows for backward."""
    y, rstd = _outputs(x)
    native.gated_rms_norm_forward(y, rstd, x, z, weight, eps, torch.get_num_threads())
    return y, rstd


@gated_rms_norm_op.register_fake
def _(x, z, weight, eps):  # noqa: ANN001, ANN202
    return _outputs(x)


@torch.library.custom_op("ballast::gated_rms_norm_backward", mutates_args=(), device_types="cpu")
def gated_rms_norm_backward(
    dy: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dz, and dweight in f32."""
    dx, dz, dweight = torch.empty_like(x), torch.empty_like(z), torch.zeros_like(weight, dtype=torch.float32)
    threads = torch.get_num_threads()
    native.gated_rms_norm_backward(dx, dz, dweight, dy.contiguous(), rstd, x, z, weight, threads)
    return dx, dz, dweight


@gated_rms_norm_backward.register_fake
def _(dy, rstd, x, z, weight):  # noqa: ANN001, ANN202
    return torch.empty_like(x), torch.empty_like(z), torch.empty_like(weight, dtype=torch.float32)


def _setup(ctx, inputs, output) -> None:  # noqa: ANN001
    x, z, weight, _ = inputs
    ctx.save_for_backward(output[1], x, z, weight)


def _backward(ctx, dy, _) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN001
    rstd, x, z, weight = ctx.saved_tensors
    dx, dz, dweight = _norm_backward(dy, rstd, x, z, weight)
    return dx, dz, dweight.to(weight.dtype), None


_norm = function(gated_rms_norm_op, _setup, _backward)
_norm_backward = function(gated_rms_norm_backward)
