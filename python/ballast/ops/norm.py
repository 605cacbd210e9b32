"""Gated RMSNorm over the last dimension: norm, then gate.

y = x / sqrt(mean x^2 + eps) weight silu(z)
"""

from __future__ import annotations

import torch

from ballast.ops._operation import operation
from ballast.ops._tensors import check_cpu, check_shape, native, storage

__all__ = ["gated_rms_norm"]


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Returns y with the shape and dtype of x; z has the shape of x, weight that of its last dimension.

    Only y is rounded. `weight` may be f32 for an x in bf16.

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


@operation("gated_rms_norm", native.gated_rms_norm_forward)
def _norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and 1 / RMS of each row for backward."""
    return torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


@_norm.backward(native.gated_rms_norm_backward)
def _norm_backward(
    dy: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dz, and dweight in f32."""
    return torch.empty_like(x), torch.empty_like(z), torch.zeros_like(weight, dtype=torch.float32)
