"""Calls of the custom ops under the transforms of torch.func and in forward mode.

`torch.library` gives an op reverse mode and `torch.compile`. Under the transforms of `torch.func` its
autograd raises, and in forward mode it drops the tangents. There an op runs in a `torch.autograd.Function`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["function", "transformed"]


def transformed() -> bool:
    """Returns true inside `torch.func.grad`, `vjp`, `jvp`, `vmap` and the like."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def function(
    op: Any,  # noqa: ANN401 - a CustomOpDef of torch
    setup: Callable[..., None] | None = None,
    backward: Callable[..., tuple[torch.Tensor | None, ...]] | None = None,
) -> Callable[..., Any]:
    """Registers the backward of an op, if it has one, and returns the function that calls the op.

    Derivatives that do not exist raise: the second one, forward mode, and any of an op without `backward`.
    """
    name, registered = op._qualname, op._qualname.removeprefix("ballast::")
    if backward is not None:
        op.register_autograd(backward, setup_context=setup)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:  # noqa: ANN401
            return getattr(torch.ops.ballast, registered)(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
            if setup is not None:
                setup(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
            if backward is None:
                raise RuntimeError(f"{name} has no derivative; a second derivative is not supported")
            return backward(ctx, *grads)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:  # noqa: ANN401
            raise RuntimeError(f"{name} has no forward-mode derivative; use reverse mode")

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:  # noqa: ANN401
            def row(i: int) -> Any:  # noqa: ANN401
                pairs = zip(args, in_dims, strict=True)
                return call(*(x if dim is None else x.select(dim, i).contiguous() for x, dim in pairs))

            if info.batch_size == 0:
                raise ValueError(f"{name} cannot be mapped over a dimension of size 0")
            rows = [row(i) for i in range(info.batch_size)]
            if isinstance(rows[0], torch.Tensor):
                return torch.stack(rows), 0
            return tuple(torch.stack(x) for x in zip(*rows, strict=True)), (0,) * len(rows[0])

    def call(*args: Any) -> Any:  # noqa: ANN401
        if transformed() or forward_ad._current_level >= 0:
            return Function.apply(*args)
        return getattr(torch.ops.ballast, registered)(*args)

    Function.__name__ = name
    return call
