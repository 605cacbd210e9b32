"""Defines an operation: its signature is written once in Python and once in Rust, and the rest is derived.

    @operation("gated_rms_norm", native.gated_rms_norm_forward)  # y, rstd, x, z, weight, eps, threads
    def _norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty(x.shape[:-1])

    @_norm.backward(native.gated_rms_norm_backward)  # dx, dz, dweight, dy, rstd, x, z, weight, threads
    def _norm_backward(dy: Tensor, rstd: Tensor, x: Tensor, z: Tensor, weight: Tensor) -> ...:
        return torch.empty_like(x), torch.empty_like(z), torch.zeros_like(weight)

The Python function allocates the outputs, and the native function fills them. torch infers the schema from
the annotations; the same function is the fake kernel. Everything else follows from the names:

- A native parameter that is not an input is an output.
- The gradient of `x` is `dx`. The inputs of a backward are thus the gradients it needs and the values that
  forward must save; its outputs are the gradients it returns.
- A loss returns the gradients of its inputs together with its value, and its backward scales them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["OPERATIONS", "Operation", "operation", "transformed"]


def transformed() -> bool:
    """Returns true inside `torch.func.grad`, `vjp`, `jvp`, `vmap` and the like."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def gradient(name: str) -> str:
    """Returns the name of a gradient. `do` is a keyword of Rust."""
    return "d_o" if name == "o" else f"d{name}"


class Operation:
    """A custom op of torch that also runs under the transforms of `torch.func`.

    Derivatives that do not exist raise: the second one, forward mode, and any of an op without a backward.
    """

    def __init__(self, op: torch.library.CustomOpDef, outputs: Sequence[str]) -> None:
        """Takes the names of the outputs, which the schema of the op does not have."""
        self.schema: torch.FunctionSchema = op._opoverload._schema
        self.name = op._name
        self.inputs = {x.name: isinstance(x.type, torch.OptionalType) for x in self.schema.arguments}
        """Names of the inputs, and whether each may be None."""
        self.outputs = tuple(outputs)
        self._op = op
        self.setup_context: Callable[..., None] | None = None
        self.derivative: Callable[..., tuple[torch.Tensor | None, ...]] | None = None
        self._function = _function(self)

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401
        """Calls the op, or its `Function` where the autograd of `torch.library` does not suffice.

        That autograd raises under the transforms of `torch.func` and drops the tangents of forward mode.
        """
        if transformed() or forward_ad._current_level >= 0:
            return self._function.apply(*args)
        return getattr(torch.ops.ballast, self.name)(*args)

    def backward(self, native: Callable[..., None]) -> Callable[[Callable[..., Any]], Operation]:
        """Defines the backward, an operation of its own."""

        def define(allocate: Callable[..., Any]) -> Operation:
            made = operation(f"{self.name}_backward", native)(allocate)
            self._differentiate(made, made.inputs, made.outputs)
            return made

        return define

    def _differentiate(
        self, call: Callable[..., Any], takes: Mapping[str, bool], returns: Sequence[str]
    ) -> None:
        """Registers the backward: `call` takes values and gradients by name, and returns gradients."""
        names, grads_of_outputs = [*self.inputs, *self.outputs], [gradient(x) for x in self.outputs]
        kept = [x for x in takes if x in names]
        places = [names.index(x) for x in kept]
        order = [[*grads_of_outputs, *kept].index(x) for x in takes]
        # Absent gradients stay absent, unless `call` must have them.
        must = [i for i, x in enumerate(grads_of_outputs) if takes.get(x) is False]
        found = [(i, returns.index(gradient(x))) for i, x in enumerate(self.inputs) if gradient(x) in returns]

        def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:  # noqa: ANN401
            values = (*inputs, *output)
            is_tensor = [isinstance(values[i], torch.Tensor) for i in places]
            ctx.save_for_backward(*(values[i] if x else None for i, x in zip(places, is_tensor, strict=True)))
            ctx.settings = [None if x else values[i] for i, x in zip(places, is_tensor, strict=True)]
            ctx.zeros = [(i, output[i].shape, output[i].dtype, output[i].device) for i in must]
            ctx.dtypes = [getattr(inputs[i], "dtype", None) for i, _ in found]
            ctx.set_materialize_grads(False)

        def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
            values = list(grads)
            for i, shape, dtype, device in ctx.zeros:
                if values[i] is None:
                    values[i] = torch.zeros(shape, dtype=dtype, device=device)
            tensors = zip(ctx.saved_tensors, ctx.settings, strict=True)
            values += [setting if tensor is None else tensor for tensor, setting in tensors]
            computed, needed = call(*(values[i] for i in order)), ctx.needs_input_grad
            result: list[torch.Tensor | None] = [None] * len(self.inputs)
            for (i, j), dtype in zip(found, ctx.dtypes, strict=True):
                if needed[i]:
                    result[i] = computed[j].to(dtype)
            return tuple(result)

        self.setup_context, self.derivative = setup, backward
        self._op.register_autograd(backward, setup_context=setup)


OPERATIONS: dict[str, Operation] = {}
"""Every operation with a native kernel, by name."""


def operation(
    name: str, native: Callable[..., None], *, loss: bool = False
) -> Callable[[Callable[..., Any]], Operation]:
    """Defines an operation by the function that allocates its outputs and the native one that fills them."""

    def define(allocate: Callable[..., Any]) -> Operation:
        *parameters, _threads = inspect.signature(native).parameters
        inputs = tuple(inspect.signature(allocate).parameters)
        outputs = tuple(x for x in parameters if x not in inputs)
        order = [(*outputs, *inputs).index(x) for x in parameters]

        def kernel(*given: Any) -> Any:  # noqa: ANN401
            allocated = allocate(*given)
            tensors = allocated if isinstance(allocated, tuple) else (allocated,)
            # Gradients come from torch in any layout.
            values = (*tensors, *(x.contiguous() if isinstance(x, torch.Tensor) else x for x in given))
            native(*(values[i] for i in order), torch.get_num_threads())
            return allocated

        schema = torch.library.infer_schema(allocate, mutates_args=())
        op = torch.library.custom_op(
            f"ballast::{name}", kernel, mutates_args=(), device_types="cpu", schema=schema
        )
        op.register_fake(allocate)
        made = OPERATIONS[name] = Operation(op, outputs)
        if loss:
            own = [gradient(x) for x in inputs if gradient(x) in outputs]
            made._differentiate(_scaled, dict.fromkeys([gradient(outputs[0]), *own], False), own)
        return made

    return define


def _function(op: Operation) -> type[torch.autograd.Function]:
    """Returns the op as a `torch.autograd.Function`."""
    name = f"ballast::{op.name}"

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:  # noqa: ANN401
            return getattr(torch.ops.ballast, op.name)(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
            if op.setup_context is not None:
                op.setup_context(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
            if op.derivative is None:
                raise RuntimeError(f"{name} has no derivative; a second derivative is not supported")
            return op.derivative(ctx, *grads)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:  # noqa: ANN401
            raise RuntimeError(f"{name} has no forward-mode derivative; use reverse mode")

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:  # noqa: ANN401
            def row(i: int) -> Any:  # noqa: ANN401
                pairs = zip(args, in_dims, strict=True)
                return op(*(x if dim is None else x.select(dim, i).contiguous() for x, dim in pairs))

            if info.batch_size == 0:
                raise ValueError(f"{name} cannot be mapped over a dimension of size 0")
            rows = [row(i) for i in range(info.batch_size)]
            if isinstance(rows[0], torch.Tensor):
                return torch.stack(rows), 0
            return tuple(torch.stack(x) for x in zip(*rows, strict=True)), (0,) * len(rows[0])

    Function.__name__ = name
    return Function


def _multiply(
    dloss: torch.Tensor, dx: torch.Tensor, dy: torch.Tensor, dz: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dy, dz = ((dloss * grad).to(grad.dtype) for grad in (dx, dy, dz))
    return dx, dy, dz


# An op, because a product would have a second derivative, of zero.
_loss_backward_op = torch.library.custom_op(
    "ballast::loss_backward", _multiply, mutates_args=(), device_types="cpu"
)
_loss_backward_op.register_fake(_multiply)
_loss_backward = Operation(_loss_backward_op, outputs=())


def _scaled(dloss: torch.Tensor, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns up to three gradients of a loss times that of the loss."""
    absent = [dloss.new_empty(0)] * (3 - len(grads))
    return _loss_backward(dloss, *grads, *absent)
