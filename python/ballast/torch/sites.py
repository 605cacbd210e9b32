"""Detection of non-finite values at the sites of a forward and backward pass.

Hooks record the largest absolute value of each module's output and of its gradient, in order of computation.
A NaN or infinity shows in it, and the device is not waited for until `first_fault` reads all values at once.
A linear-attention layer has two more sites:

    <layer>.g    decay -exp(A_log) softplus(a + dt_bias)
    <layer>.o    output of the delta rule, before the norm

Prefixes: `d.` for the gradient of a site, `param.` for a parameter, `grad.` for its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ballast.torch.tensors import Protected, dtype_word, local, plain_name


@dataclass(frozen=True)
class Seen:
    """Largest absolute value of a site."""

    site: str
    dtype: torch.dtype
    micro_batch: int
    largest: torch.Tensor


@dataclass(frozen=True, order=True)
class Fault:
    """A fault of a step. The fault of the lowest order is nearest to the cause."""

    order: int
    text: str


class Sites:
    """Watches a model in training mode."""

    def __init__(self, model: nn.Module, protected: Iterable[Protected]) -> None:
        """Adds the hooks."""
        self.micro_batches = 0
        self.read: dict[str, torch.dtype] = {}
        """Dtype in which forward last read each protected tensor."""
        self._forward: list[Seen] = []
        self._backward: list[Seen] = []
        self._handles: list[RemovableHandle] = []
        for tensor in protected:
            self._watch_parameter(tensor)
        modules = [(plain_name(path), module) for path, module in model.named_modules()]
        for path, module in modules:
            self._watch_module(path, module)
        # After the modules, because the decay is computed from the output of a projection.
        for path, module in modules:
            if hasattr(module, "A_log"):
                self._watch_linear_attention(path, module)

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def clear(self) -> None:
        """Clears the values of the step."""
        self._forward.clear()
        self._backward.clear()
        self.micro_batches = 0

    def first_fault(self) -> Fault | None:
        """Returns the first site with a non-finite value."""
        for order, (direction, seen) in enumerate((("forward", self._forward), ("backward", self._backward))):
            found = _first_non_finite(seen)
            if found is not None:
                text = (
                    f"micro-batch {found.micro_batch}: {found.site} is the first site with non-finite values "
                    f"({dtype_word(found.dtype)}, {direction})"
                )
                return Fault(order + 1, text)
        return None

    def _watch_parameter(self, tensor: Protected) -> None:
        def before(module: nn.Module, _: object) -> None:
            value = tensor.tensor
            if module.training and value is not None:
                self.read[tensor.name] = value.dtype
                self._see(f"param.{tensor.name}", value.detach())

        self._handles.append(tensor.module.register_forward_pre_hook(before))

    def _watch_module(self, path: str, module: nn.Module) -> None:
        if not path:
            self._handles.append(module.register_forward_pre_hook(self._begin))

        def after(module: nn.Module, _: object, output: object) -> None:
            if module.training:
                for key, value in _tensors(output):
                    self._see(path or key or "output", value)

        self._handles.append(module.register_forward_hook(after))

    def _watch_linear_attention(self, path: str, module: nn.Module) -> None:
        def decay(_: nn.Module, __: object, a: torch.Tensor) -> None:
            if module.training:
                with torch.no_grad():
                    softplus = nn.functional.softplus(a.detach().float() + module.dt_bias.float())
                    self._see(f"{path}.g", -module.A_log.float().exp() * softplus)

        def delta_rule(_: nn.Module, args: tuple[Any, ...]) -> None:
            if module.training and args:
                self._see(f"{path}.o", args[0])

        # `norm` in transformers, `out_norm` in Megatron; Qwen3-Next and Megatron fuse the projection of a.
        projection, norm = getattr(module, "in_proj_a", None), getattr(module, "norm", None)
        norm = getattr(module, "out_norm", norm)
        if isinstance(projection, nn.Module):
            self._handles.append(projection.register_forward_hook(decay))
        if isinstance(norm, nn.Module):
            self._handles.append(norm.register_forward_pre_hook(delta_rule))

    def _begin(self, module: nn.Module, _: object) -> None:
        if module.training:
            self.micro_batches += 1

    def _see(self, site: str, value: torch.Tensor) -> None:
        micro_batch = self.micro_batches
        self._note(self._forward, site, value, micro_batch)
        if value.requires_grad:
            value.register_hook(lambda grad: self._note(self._backward, f"d.{site}", grad, micro_batch))

    def _note(self, seen: list[Seen], site: str, value: torch.Tensor, micro_batch: int) -> None:
        part = local(value)
        if part.is_floating_point() and part.numel() > 0 and not part.is_meta and part.element_size() > 1:
            # NaN passes through both. `vector_norm(part, inf)` takes 25 times as long on a CPU.
            least, most = torch.aminmax(part)
            seen.append(Seen(site, value.dtype, micro_batch, torch.maximum(least.abs(), most.abs())))


def _first_non_finite(seen: list[Seen]) -> Seen | None:
    """Reads all values, with one wait per device."""
    bad: set[int] = set()
    for device in {entry.largest.device for entry in seen}:
        here = [(i, entry.largest.float()) for i, entry in enumerate(seen) if entry.largest.device == device]
        is_bad = torch.stack([value for _, value in here]).isfinite().logical_not()
        bad |= {here[i][0] for i in is_bad.nonzero().flatten().tolist()}
    return seen[min(bad)] if bad else None


def _tensors(output: object, key: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a module's output, each with its key."""
    if isinstance(output, torch.Tensor):
        yield key, output
    elif isinstance(output, Mapping):
        for inner, value in output.items():
            yield from _tensors(value, str(inner))
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value, key)
