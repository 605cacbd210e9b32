"""Follows a packed batch through the modules and operations of a model.

A model runs twice on a packed batch. In the second run the tokens of one sequence, the source, are others,
and those of the rest, the protected tokens, are the same. A module whose protected inputs agree in both
runs and whose protected outputs do not is a site of a leak. Its outputs are then replaced by those of the
first run ("healed"), so that everything behind it is judged by itself: one pass finds every site. The same is
done for every operation of torch inside chosen modules, so that a convolution is told from the recurrence
behind it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from ballast._torch import torch
from ballast.testing._packing import Runner

Key = tuple[str, int, int]
"""Path of a module, number of its call, and of the operation in the call; -1 for the module's output."""

STATE_WORDS = (
    "linear_attn delta mamba ssm ssd scan mixer recurren rnn lstm gru gla kda kimi rwkv retention".split()
)
ATTENTION_WORDS = ("attn", "attention", "softmax", "flash")


@dataclass(frozen=True)
class Layout:
    """Position of the tokens in the tensors of a packed batch."""

    rows: int
    width: int

    def axis(self, x: torch.Tensor, spare: int = 0) -> int | None:
        """The axis of the tokens; -1 if they are flattened into axis 0, None if there is no such axis.

        A tensor with two such axes holds attention weights, whose entries belong to two tokens.
        """
        first = 1 if self.rows > 1 else 0
        if self.rows > 1 and (x.ndim < 2 or x.shape[0] != self.rows):
            first = x.ndim
        found = [a for a in range(first, x.ndim) if self.width <= x.shape[a] <= self.width + spare]
        if len(found) == 1:
            return found[0]
        if not found and x.ndim >= 1 and x.shape[0] > 0 and x.shape[0] % (self.rows * self.width) == 0:
            return -1
        return None

    def take(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Returns a tensor as [tokens, features]."""
        count = self.rows * self.width
        if axis == -1:
            return x.reshape(count, -1)
        x = x.narrow(axis, 0, self.width)
        return x.movedim(axis, 1 if self.rows > 1 else 0).reshape(count, -1)

    def put(self, x: torch.Tensor, axis: int, tokens: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `x` with other values of some tokens."""
        changed = x.clone(memory_format=torch.contiguous_format)
        flat = self.take(changed, axis).clone()
        flat[tokens] = new.to(flat)
        if axis == -1:
            return flat.reshape(x.shape)
        view = changed.narrow(axis, 0, self.width).movedim(axis, 1 if self.rows > 1 else 0)
        view.copy_(flat.reshape(view.shape))
        return changed


@dataclass(frozen=True)
class Site:
    """A module or operation where protected tokens change."""

    path: str
    """Path of the module, or of the module whose weight the operation uses."""
    key: Key
    operation: str
    """Name of the operation; empty for a module."""
    kind: str | None
    """Kind of the leak as far as the operation tells."""
    change: torch.Tensor = field(compare=False, repr=False)
    """Largest change of every protected token, relative to the RMS of all."""


@dataclass
class Seen:
    """Values of one call in the first run."""

    name: str
    tensors: list[torch.Tensor | None]


class Tracer(TorchFunctionMode):
    """Records a run, or compares a run with a recorded one and heals it."""

    def __init__(
        self,
        runner: Runner,
        traced: set[str],
        first: Tracer | None = None,
        protected: torch.Tensor | None = None,
        threshold: float = 0.0,
        only: set[Key] | None = None,
    ) -> None:
        """Without `first` the run is recorded.

        `traced` are the modules whose operations are followed, and `only` the sites to heal; by default all.
        """
        super().__init__()
        self.layout = Layout(runner.rows, runner.width)
        self.runner, self.protected, self.traced = runner, protected, traced
        self.first, self.threshold, self.only = first, threshold, only
        self.seen: dict[Key, Seen] = {}
        self.inputs: dict[Key, list[torch.Tensor | None]] = {}
        self.sites: list[Site] = []
        self.before_healing: dict[Key, list[torch.Tensor | None]] = {}
        self.dirty: set[str] = set()
        """Modules whose output changed and was not healed."""
        self.pairs: set[str] = set()
        """Modules with a tensor that has two axes of tokens."""
        self.stack: list[list[Any]] = []
        self.calls: Counter[str] = Counter()
        self.inside = False
        self.owners = {
            p.untyped_storage().data_ptr(): name.rpartition(".")[0]
            for name, p in runner.model.named_parameters()
        }

    # Values of tokens

    def tokens(self, values: Any, spare: int = 0) -> list[torch.Tensor | None]:  # noqa: ANN401
        """The tokens of every floating-point tensor; None where there is no axis of tokens."""
        found: list[torch.Tensor | None] = []
        for x in tree_flatten(values)[0]:
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                continue
            axis = self.layout.axis(x, spare)
            taken = None if axis is None else self.layout.take(x.detach(), axis).clone()
            found.append(taken)
        return found

    def changes(self, new: list[torch.Tensor | None], old: list[torch.Tensor | None]) -> torch.Tensor | None:
        """Largest change per protected token; None if no change is above the threshold."""
        total = None
        for a, b in zip(new, old, strict=False):
            if a is None or b is None or a.shape != b.shape or torch.equal(a, b):
                continue
            a, b = a[self.protected].double(), b[self.protected].double()
            if a.numel() == 0:
                continue
            size = b.square().mean().sqrt().clamp(min=1e-30)
            change = ((a - b).abs().amax(-1) / size).nan_to_num(nan=torch.inf)
            total = change if total is None else torch.maximum(total, change)
        return total if total is not None and bool((total > self.threshold).any()) else None

    # Modules

    def before(self, path: str, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Runs before a module."""
        key = (path, self.calls[path], -1)
        self.calls[path] += 1
        clean = True
        with self._own_work():
            values = self.tokens((args, kwargs))
            if self.first is None:
                self.inputs[key] = values
            else:
                clean = any(x is not None for x in values) or not values
                clean = clean and self.changes(values, self.first.inputs.get(key, [])) is None
        self.stack.append([path, key, 0, clean])

    def after(self, path: str, output: Any) -> Any:  # noqa: ANN401
        """Runs after a module; returns its output, healed if it is a site."""
        _, key, _, clean = self.stack.pop()
        with self._own_work():
            kind = type(self.runner.model.get_submodule(path)).__name__
            return self.judge(key, "", (), output, clean, 16 if "conv" in kind.lower() else 0)

    @contextlib.contextmanager
    def _own_work(self) -> Iterator[None]:
        """Operations in here are not those of the model."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    # Operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Runs an operation of torch."""
        kwargs = kwargs or {}
        if self.inside or not self.stack or self.stack[-1][0] not in self.traced:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name.startswith("__get") and name != "__getitem__":
            return func(*args, **kwargs)
        return self.operation(name, lambda: func(*args, **kwargs), args, kwargs)

    def operation(self, name: str, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Runs an operation inside a traced module."""
        with self._own_work():
            output = run()
            in_place = name.startswith("__") and name != "__getitem__" or name.endswith("_")
            if in_place or not any(isinstance(x, torch.Tensor) for x in tree_flatten(output)[0]):
                return output  # a buffer is judged where it is read
            frame = self.stack[-1]
            path, call, number = frame[1][0], frame[1][1], frame[2]
            frame[2] += 1
            # A convolution may be cut to the tokens later.
            spare = 16 if "conv" in name else 0
            return self.judge((path, call, number), name, (args, kwargs), output, True, spare)

    def judge(self, key: Key, name: str, given: Any, output: Any, clean: bool, spare: int) -> Any:  # noqa: ANN401
        """Records or compares an output, and heals it."""
        values = self.tokens(output, spare)
        if self._has_pairs(output):
            self.pairs.add(key[0])
        if self.first is None:
            self.seen[key] = Seen(name, values)
            return output
        old = self.first.seen.get(key)
        if old is None or old.name != name or len(old.tensors) != len(values):
            return output
        change = self.changes(values, old.tensors)
        if change is None:
            return output
        site = Site(self._owner(given) or key[0], key, name, self._kind(name, given), change)
        healing = clean and (self.only is None or key in self.only)
        if not healing:
            if name == "":
                self.dirty.add(key[0])
            return output
        self.before_healing[key] = values
        self.sites.append(site)
        return self._healed(output, old.tensors, spare)

    def _healed(self, output: Any, old: list[torch.Tensor | None], spare: int) -> Any:  # noqa: ANN401
        remaining = iter(old)

        def heal(x: torch.Tensor) -> torch.Tensor:
            if not x.is_floating_point():
                return x
            values, axis = next(remaining), self.layout.axis(x, spare)
            if values is None or axis is None:
                return x
            return self.layout.put(x, axis, self.protected, values[self.protected])

        return tree_map_only(torch.Tensor, heal, output)

    def _has_pairs(self, values: Any) -> bool:  # noqa: ANN401
        return any(
            isinstance(x, torch.Tensor)
            and x.is_floating_point()
            and list(x.shape).count(self.layout.width) > 1
            for x in tree_flatten(values)[0]
        )

    def _owner(self, given: Any) -> str | None:  # noqa: ANN401
        """The module whose parameter an operation uses, if it has its own."""
        for x in tree_flatten(given)[0]:
            if isinstance(x, torch.Tensor):
                with contextlib.suppress(RuntimeError):
                    owner = self.owners.get(x.untyped_storage().data_ptr())
                    if owner is not None:
                        return owner
        return None

    def _kind(self, name: str, given: Any) -> str | None:  # noqa: ANN401
        """Kind of a leak by the name and the inputs of an operation."""
        name = name.lower()
        if "conv" in name:
            return "convolution"
        if self._has_pairs(given) or any(word in name for word in ATTENTION_WORDS):
            return "attention"
        return "state" if any(word in name for word in STATE_WORDS) else None


@contextlib.contextmanager
def following(model: torch.nn.Module, tracer: Tracer) -> Iterator[None]:
    """Runs a tracer in the forward passes of a model."""
    handles = []
    for path, module in model.named_modules():
        handles.append(
            module.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: tracer.before(path, args, kwargs), with_kwargs=True
            )
        )
        handles.append(
            module.register_forward_hook(lambda _, args, output, path=path: tracer.after(path, output))
        )
    apply = torch.autograd.Function.__dict__["apply"]

    def traced_apply(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        def run() -> Any:  # noqa: ANN401
            return apply.__get__(None, cls)(*args, **kwargs)

        if tracer.inside or not tracer.stack or tracer.stack[-1][0] not in tracer.traced:
            return run()
        return tracer.operation(cls.__name__, run, args, kwargs)

    torch.autograd.Function.apply = classmethod(traced_apply)  # type: ignore[method-assign]
    try:
        with torch.no_grad(), tracer:
            yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()
