"""The backward of a loss whose forward computes its gradients."""

from __future__ import annotations

import torch

from ballast.ops._function import function

__all__ = ["loss_gradients"]


@torch.library.custom_op("ballast::loss_backward", mutates_args=(), device_types="cpu")
def loss_backward(
    dloss: torch.Tensor, dx: torch.Tensor, dy: torch.Tensor, dz: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients times that of the loss. An op: a product would have a second derivative, of zero."""
    dx, dy, dz = ((dloss * grad).to(grad.dtype) for grad in (dx, dy, dz))
    return dx, dy, dz


@loss_backward.register_fake
def _(dloss, dx, dy, dz):  # noqa: ANN001, ANN202
    return torch.empty_like(dx), torch.empty_like(dy), torch.empty_like(dz)


_loss_backward = function(loss_backward)


def loss_gradients(
    dloss: torch.Tensor, dx: torch.Tensor, dy: torch.Tensor, dz: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of up to three inputs, in their storage type; an absent one is empty."""
    return _loss_backward(dloss, dx, dy, dx.new_empty(0) if dz is None else dz)
