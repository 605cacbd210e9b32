"""Where packed sequences meet: forward, in backward alone, or in what is the same for all tokens.

An operation counts as a site only if its change reaches the output of its module or another site: a shift of
tokens that a mask undoes is none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ballast._torch import torch
from ballast.testing._leak_trace import ATTENTION_WORDS, STATE_WORDS, Layout, Site, Tracer, following
from ballast.testing._packing import Runner

WINDOW = 16
"""Most tokens that a convolution reaches."""


@dataclass(frozen=True)
class Place:
    """A leak between two sequences, at a module."""

    module: str
    kind: str
    target: int
    tokens: tuple[int, int]
    """First and last token of the target."""


class ForwardSearch:
    """Finds where the tokens of one sequence reach others."""

    def __init__(self, runner: Runner, threshold: float) -> None:
        """`threshold` is the smallest change, relative to the RMS of a tensor, that is not rounding."""
        self.runner, self.threshold = runner, threshold
        self.modules: set[str] = set()
        """The modules with leaks that were found so far."""
        self.plain = self._run(runner.sequences, Tracer(runner, set()))

    def places(self, source: int, other: list[torch.Tensor]) -> list[Place]:
        """Returns the leaks of a source in other modules than before.

        `other` are the sequences with other tokens of the source.
        """
        runner = self.runner
        targets = [n for n in range(len(runner.sequences)) if n != source]
        given: dict[str, Any] = dict(protected=torch.cat([runner.tokens_of(n) for n in targets]))
        given["threshold"] = self.threshold
        modules = self._run(other, Tracer(runner, set(), self.plain, **given))
        traced = {site.key[0] for site in modules.sites} - self.modules
        if not traced:
            return []
        self.modules |= traced
        first = self._run(runner.sequences, Tracer(runner, traced))
        found = self._run(other, Tracer(runner, traced, first, **given))
        sites: list[Site] = []
        groups: dict[tuple[str, str], list[Site]] = {}
        for site in found.sites:
            groups.setdefault((site.key[0], site.operation), []).append(site)
        for (path, operation), group in groups.items():
            if path not in traced:
                continue
            if operation != "" and (path, "") not in groups:
                only = {site.key for site in found.sites} - {site.key for site in group}
                without = self._run(other, Tracer(runner, traced, first, **given, only=only))
                if not _matters(group, found, without):
                    continue
            sites += group
        sites = sites or [site for site in modules.sites if site.key[0] in traced]
        pairs = found.pairs | first.pairs
        return _merged([_place(site, runner, targets, self.threshold, pairs) for site in sites])

    def _run(self, sequences: list[torch.Tensor], tracer: Tracer) -> Tracer:
        with following(self.runner.model, tracer):
            self.runner.run_packed(sequences)
        return tracer


def _matters(group: list[Site], found: Tracer, without: Tracer) -> bool:
    """Returns true if the changes of an operation reach the output of its module or another site.

    `without` is a run in which only the other sites were healed.
    """
    if group[0].key[0] in without.dirty:
        return True
    keys = {site.key for site in group}
    behind = [s.key for s in found.sites if s.key not in keys and s.key in without.before_healing]
    return any(
        without.changes(without.before_healing[key], found.before_healing[key]) is not None for key in behind
    )


def _place(site: Site, runner: Runner, targets: list[int], threshold: float, pairs: set[str]) -> Place:
    changes = dict(zip(targets, site.change.split([runner.lengths[n] for n in targets]), strict=True))
    reached = [n for n in targets if bool((changes[n] > threshold).any())]
    # The sequence behind the source shows the pattern best, unless it is very short.
    long = [n for n in reached if runner.lengths[n] > WINDOW]
    source = next(n for n in range(len(runner.sequences)) if n not in targets)
    target = next((n for n in long if n > source), (long or reached)[0])
    tokens = (changes[target] > threshold).nonzero().flatten()
    path = site.key[0]
    kind = site.kind or kind_of(runner.model, path, changes[target], threshold, path in pairs)
    return Place(site.path, kind, target, (int(tokens[0]), int(tokens[-1])))


def _merged(places: list[Place]) -> list[Place]:
    merged: dict[tuple[str, str, int], Place] = {}
    for place in places:
        key = (place.module, place.kind, place.target)
        old = merged.get(key, place)
        tokens = (min(old.tokens[0], place.tokens[0]), max(old.tokens[1], place.tokens[1]))
        merged[key] = Place(place.module, place.kind, place.target, tokens)
    return list(merged.values())


def kind_of(model: torch.nn.Module, path: str, change: torch.Tensor, threshold: float, pairs: bool) -> str:
    """Kind of a leak by the change of every token of a sequence and by the names of the module."""
    names = f"{path.rpartition('.')[2]} {type(model.get_submodule(path)).__name__}".lower()
    changed = change.nonzero().flatten()
    if len(changed) > 0 and int(changed[-1]) < min(WINDOW, len(change) - 1):
        # A convolution ends at once; a state fades.
        ends_at_once = change[changed[-1]] > 0.02 * change.max() and change[changed[-1]] > threshold
        if ends_at_once or "conv" in names:
            return "convolution"
    if pairs:
        return "attention"
    if any(word in names for word in STATE_WORDS):
        return "state"
    if any(word in names for word in ATTENTION_WORDS):
        return "attention"
    third = max(len(change) // 3, 1)
    return "state" if change[-third:].mean() < 0.5 * change[:third].mean() else "unknown"


# Backward


def backward_places(runner: Runner, target: int, cotangent: torch.Tensor) -> list[Place]:
    """Returns the modules whose backward passes the gradient of one sequence to others."""
    others = [n for n in range(len(runner.sequences)) if n != target]
    protected = torch.cat([runner.tokens_of(n) for n in others])
    layout = Layout(runner.rows, runner.width)
    outputs: dict[str, bool] = {}
    inputs: dict[str, torch.Tensor] = {}

    def dirt(gradient: torch.Tensor) -> torch.Tensor | None:
        axis = layout.axis(gradient)
        if axis is None:
            return None
        change = layout.take(gradient, axis)[protected].abs().amax(-1)
        return change if bool((change != 0).any()) else None

    def watch_output(path: str, output: Any) -> None:  # noqa: ANN401
        for x in tree_flatten(output)[0]:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(
                    lambda g: outputs.__setitem__(path, outputs.get(path, False) or dirt(g) is not None)
                )

    def on_input(path: str, gradient: torch.Tensor) -> torch.Tensor:
        change = dirt(gradient)
        if change is None or outputs.get(path, False):
            return gradient
        inputs.setdefault(path, change)
        axis = layout.axis(gradient)
        zeros = torch.zeros_like(layout.take(gradient, axis)[protected])
        return layout.put(gradient, axis, protected, zeros)

    def watch_input(path: str, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        def view(x: torch.Tensor) -> torch.Tensor:
            if not x.requires_grad or not x.is_floating_point() or isinstance(x, torch.nn.Parameter):
                return x
            own = x.view_as(x)  # its gradient is that of this module alone
            own.register_hook(lambda gradient: on_input(path, gradient))
            return own

        leaves, spec = tree_flatten((args, kwargs))
        return tree_unflatten([view(x) if isinstance(x, torch.Tensor) else x for x in leaves], spec)

    handles = []
    for path, module in runner.model.named_modules():
        handles.append(
            module.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: watch_input(path, args, kwargs), with_kwargs=True
            )
        )
        handles.append(
            module.register_forward_hook(lambda _, args, output, path=path: watch_output(path, output))
        )
    try:
        with torch.enable_grad():
            runner.probes = []
            out = runner.run_packed(runner.sequences)[target]
            leaves = [p for p in runner.model.parameters() if p.requires_grad]
            torch.autograd.grad((out * cotangent).sum(), leaves + runner.probes, allow_unused=True)
    finally:
        runner.probes = None
        for handle in handles:
            handle.remove()
    places = []
    for path, change in inputs.items():
        changes = dict(zip(others, change.split([runner.lengths[n] for n in others]), strict=True))
        source = min((n for n in others if bool(changes[n].any())), key=lambda n: abs(n - target))
        tokens = changes[source].nonzero().flatten()
        # Gradients flow backward: what is at the end of a sequence is nearest to the next one.
        kind = kind_of(runner.model, path, changes[source].flip(0), 0.0, False)
        places.append(Place(path, kind, source, (int(tokens[0]), int(tokens[-1]))))
    return places


# Differences that do not depend on other sequences


def differing_places(runner: Runner, healed: set[str], limit: float) -> list[tuple[str, str]]:
    """Returns the modules that differ from the sequence alone without depending on other sequences, and why.

    `healed` are the modules with a leak: their outputs are those of the sequences alone.
    """
    alone = []
    for sequence in runner.sequences:
        record = _Recorder(runner.model)
        with torch.no_grad(), record:
            record.output = runner.run_alone(sequence)
        alone.append(record)
    found = _difference(runner, alone, healed, None, limit)
    places = []
    for path, kind in found.sites.items():
        # Rotations by other positions, for example, agree in their products.
        others = healed | (set(found.sites) - {path})
        if not _difference(runner, alone, healed, others, limit).agrees:
            places.append((path, kind))
    return places


class _Recorder:
    """Inputs and outputs of every call of every module."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.calls = model, Counter[str]()
        self.inputs: dict[tuple[str, int], list[Any]] = {}
        self.outputs: dict[tuple[str, int], list[Any]] = {}
        self.handles: list[Any] = []
        self.open: list[tuple[str, int]] = []
        self.output = torch.empty(0)

    def __enter__(self) -> None:
        for path, module in self.model.named_modules():
            self.handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, path=path: self._before(path, args, kwargs), with_kwargs=True
                )
            )
            self.handles.append(module.register_forward_hook(lambda _, args, output: self._after(output)))

    def _before(self, path: str, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        key = (path, self.calls[path])
        self.calls[path] += 1
        self.inputs[key] = _tensors((args, kwargs))
        self.open.append(key)

    def _after(self, output: Any) -> None:  # noqa: ANN401
        self.outputs[self.open.pop()] = _tensors(output)

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def _tensors(values: Any) -> list[torch.Tensor]:  # noqa: ANN401
    return [x.detach().clone() for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor)]


@dataclass
class _Difference:
    sites: dict[str, str]
    agrees: bool
    """The final output is that of the sequences alone."""


def _difference(
    runner: Runner, alone: list[_Recorder], healed: set[str], only: set[str] | None, limit: float
) -> _Difference:
    """Runs the packed batch with the outputs of sites, or of those in `only`, from the sequences alone."""
    layout, calls = Layout(runner.rows, runner.width), Counter[str]()
    sites: dict[str, str] = {}
    open_calls: list[tuple[tuple[str, int], bool, bool]] = []
    counts = runner.lengths
    tokens = [runner.tokens_of(n) for n in range(len(counts))]

    def own(n: int, x: torch.Tensor, axis: int, packed: torch.Tensor) -> torch.Tensor | None:
        """Values of a sequence alone, in the layout that the packed tensor has."""
        if x.ndim != packed.ndim:
            return None
        if axis == -1:
            return x.reshape(counts[n], -1) if x.shape[0] % counts[n] == 0 else None
        if x.shape[axis] < counts[n]:
            return None
        x = x.narrow(axis, 0, counts[n])
        return (
            x.movedim(axis, 0).reshape(counts[n], -1)
            if runner.rows == 1
            else x[0].movedim(axis - 1, 0).reshape(counts[n], -1)
        )

    def compare(packed: list[torch.Tensor], key: tuple[str, int], kind: str) -> tuple[bool, bool]:
        """Whether floating-point values, and integers that count tokens, agree with the sequences alone."""
        same, same_integers = True, True
        for i, x in enumerate(packed):
            axis = layout.axis(x)
            if axis is None:
                continue
            flat = layout.take(x, axis)
            for n, record in enumerate(alone):
                stored = getattr(record, kind).get(key, [])
                y = own(n, stored[i], axis, x) if len(stored) == len(packed) else None
                part = flat[tokens[n]]
                if y is None or y.shape != part.shape:
                    continue
                if not x.is_floating_point():
                    count = torch.arange(counts[n], device=y.device)
                    counted = bool((y == count[:, None] + y[:1]).all())
                    same_integers = same_integers and (not counted or torch.equal(part, y))
                elif not _near(part, y, limit):
                    same = False
        return same, same_integers

    def before(path: str, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        key = (path, calls[path])
        calls[path] += 1
        open_calls.append((key, *compare(_tensors((args, kwargs)), key, "inputs")))

    def after(path: str, output: Any) -> Any:  # noqa: ANN401
        key, clean, clean_integers = open_calls.pop()
        if (only is not None and path not in only) or any(key not in record.outputs for record in alone):
            return output
        same, _ = compare(_tensors(output), key, "outputs")
        if same or not (clean or path in healed):
            return output
        if path not in healed:
            sites.setdefault(path, "unknown" if clean_integers else "positions")
        index = iter(range(len(_tensors(output))))

        def heal(x: torch.Tensor) -> torch.Tensor:
            i, axis = next(index), layout.axis(x)
            if axis is None or not x.is_floating_point():
                return x
            for n, record in enumerate(alone):
                y = own(n, record.outputs[key][i], axis, x)
                if y is not None:
                    x = layout.put(x, axis, tokens[n], y)
            return x

        return tree_map_only(torch.Tensor, heal, output)

    handles = []
    for path, module in runner.model.named_modules():
        handles.append(
            module.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: before(path, args, kwargs), with_kwargs=True
            )
        )
        if path != "":  # its output is the result
            handles.append(
                module.register_forward_hook(lambda _, args, output, path=path: after(path, output))
            )
    try:
        with torch.no_grad():
            packed = runner.run_packed(runner.sequences)
    finally:
        for handle in handles:
            handle.remove()
    agrees = all(_near(a, b.output, limit) for a, b in zip(packed, alone, strict=True))
    return _Difference(sites, agrees)


def _near(a: torch.Tensor, b: torch.Tensor, limit: float) -> bool:
    a, b = a.double(), b.double()
    size = b.square().mean().sqrt().clamp(min=1e-30)
    return bool((a - b).square().mean().sqrt() <= limit * size)
