"""Fused output projection and cross entropy; only the logits of 512 tokens exist at a time.

l = W h;   l = cap tanh(l / cap) with a soft cap;   L = ln sum_j e^{l_j}
loss = L - (1 - smoothing) l_y - smoothing mean(l) + z_loss L^2
"""

from __future__ import annotations

import torch

from ballast.errors import UsageError
from ballast.ops._operation import operation
from ballast.ops._tensors import check_cpu, check_shape, native, needs_grad, storage

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Returns the mean or sum of the loss over tokens whose target is not `ignore_index`, or 0 without any.

    hidden [..., H]; weight [V, H]; targets [...] int64. Forward also computes the gradients.

    >>> import torch
    >>> from ballast.ops import linear_cross_entropy
    >>> loss = linear_cross_entropy(torch.ones(3, 1), torch.zeros(2, 1), torch.tensor([0, 1, -100]))
    >>> round(loss.item(), 4)
    0.6931
    """
    check_cpu("linear_cross_entropy", hidden=hidden, weight=weight, targets=targets)
    storage("linear_cross_entropy", hidden), storage("linear_cross_entropy", weight)
    check_shape("weight", weight, (weight.shape[0], hidden.shape[-1]))
    check_shape("targets", targets, tuple(hidden.shape[:-1]))
    if targets.dtype != torch.int64:
        raise UsageError(f"targets must be torch.int64, got {targets.dtype}")
    if reduction not in ("mean", "sum"):
        raise UsageError(f'reduction must be "mean" or "sum", got {reduction!r}')
    rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
    mean, count, *_ = _loss(
        *(rows, weight.contiguous(), targets.reshape(-1).contiguous()),
        *(ignore_index, soft_cap, z_loss, label_smoothing),
        *(needs_grad(hidden, weight), needs_grad(weight)),
    )
    return mean if reduction == "mean" else mean * count


@operation("linear_cross_entropy", native.linear_cross_entropy, loss=True)
def _loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    soft_cap: float | None,
    z_loss: float,
    label_smoothing: float,
    save: bool,
    save_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean loss, the number of counted tokens, dhidden, and dweight in f32."""
    mean, count = (torch.empty((), dtype=torch.float32, device=hidden.device) for _ in range(2))
    dhidden = torch.empty_like(hidden) if save else hidden.new_empty(0)
    dweight = torch.zeros(weight.shape if save_weight else (0,), dtype=torch.float32, device=hidden.device)
    return mean, count, dhidden, dweight
