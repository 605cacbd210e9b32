"""A test that packed sequences do not leak into each other, for any model of torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ballast._torch import torch
from ballast.errors import UsageError
from ballast.testing._compare import relative_rms
from ballast.testing._inputs import values
from ballast.testing._leak_sites import (
    ForwardSearch,
    Place,
    backward_places,
    differing_places,
    kind_of,
)
from ballast.testing._packing import Pack, Runner, changed, random_sequences

__all__ = ["Leak", "LeakReport", "assert_no_leak", "find_leaks"]

LENGTHS = (9, 70, 1, 17)
"""Together 97, which is no width of a model, so that the axis of the tokens is found in every tensor."""

KINDS = {
    "convolution": "convolution window",
    "state": "recurrent state",
    "attention": "attention",
    "positions": "positions that do not restart",
    "gradient": "backward",
    "unknown": "cause not recognized",
}


@dataclass(frozen=True)
class Leak:
    """A place where a sequence depends on its neighbors in the batch."""

    module: str
    """Path of the module; of a parameter for the kind "gradient"; empty if it was not found."""
    kind: str
    """convolution, state, attention, positions, gradient or unknown."""
    direction: str
    """forward, or backward if outputs are right and gradients are not."""
    source: int | None
    """The sequence that leaks; None if the other sequences' tokens have no influence."""
    target: int | None
    """The sequence that it leaks into."""
    tokens: tuple[int, int] | None
    """First and last token of the target."""
    detail: str = ""

    def __str__(self) -> str:
        """Returns a sentence."""
        where, kind = self.module or "model", KINDS[self.kind]
        if self.kind == "gradient":
            return f"{where}: {self.detail}"
        if self.source is None or self.tokens is None:
            kind = "a mask, positions, or rounding above the tolerance" if self.kind == "unknown" else kind
            return f"{where}: {self.detail} ({kind})"
        first, last = self.tokens
        tokens = f"token {first}" if first == last else f"tokens {first} to {last}"
        if self.direction == "backward":
            return (
                f"{where}: the gradient of {tokens} of sequence {self.target} depends on the loss of "
                f"sequence {self.source} ({kind}, backward only)"
            )
        verb = "depends" if first == last else "depend"
        return f"{where}: {tokens} of sequence {self.target} {verb} on sequence {self.source} ({kind})"


@dataclass(frozen=True)
class LeakReport:
    """Result of a leak test."""

    leaks: tuple[Leak, ...]
    outputs: tuple[float, ...]
    """Relative RMS of each sequence's output, packed against alone."""
    gradients: Mapping[str, float]
    """Relative RMS of each parameter's gradient, packed against the sum of the sequences alone."""
    limits: tuple[float, float]
    """Limits of outputs and gradients."""
    lengths: tuple[int, ...]
    notes: tuple[str, ...]
    """Tests that were not possible, and hints."""

    @property
    def ok(self) -> bool:
        """Returns true if nothing leaks."""
        return not self.leaks

    def raise_if_failed(self) -> None:
        """Raises an AssertionError that names every leak."""
        __tracebackhide__ = True  # in pytest
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        """Returns the leaks and the largest errors."""
        lengths = ", ".join(map(str, self.lengths))
        verdict = "packed sequences leak into each other" if self.leaks else "no leak"
        lines = [f"{verdict}; {len(self.lengths)} sequences of {lengths} tokens"]
        lines += [f"- {leak}" for leak in self.leaks]
        worst = max(range(len(self.outputs)), key=lambda n: _rank(self.outputs[n]))
        lines.append(
            f"outputs, packed against alone: largest relative RMS {self.outputs[worst]:.1e} in sequence "
            f"{worst}, limit {self.limits[0]:.1e}"
        )
        if self.gradients:
            name = max(self.gradients, key=lambda name: _rank(self.gradients[name]))
            above = sum(not x <= self.limits[1] for x in self.gradients.values())
            lines.append(
                f"gradients: {above} of {len(self.gradients)} parameters above {self.limits[1]:.1e}, largest "
                f"{self.gradients[name]:.1e} in {name}"
            )
        return "\n".join([*lines, *self.notes])


def _rank(error: float) -> float:
    """The error, with NaN as the largest."""
    return float("inf") if error != error else error


def assert_no_leak(
    model: torch.nn.Module,
    sequences: Sequence[torch.Tensor | Sequence[int]] | None = None,
    *,
    pack: str | Sequence[str] | Pack = "position_ids",
    lengths: Sequence[int] = LENGTHS,
    alone: Callable[[torch.Tensor], Mapping[str, Any]] | None = None,
    output: Callable[[Any], torch.Tensor] | None = None,
    gradients: bool = True,
    tolerance: float | None = None,
    seed: int = 0,
    **options: Any,  # noqa: ANN401
) -> LeakReport:
    """Raises an AssertionError if sequences packed into one row leak into each other.

    Outputs and the gradient of every parameter, packed, must be those of the sequences alone. Two more tests
    know no rounding: other tokens in one sequence must not change the outputs of the others, and the loss of
    one sequence must have no gradient at the tokens of the others. The error names each module that leaks,
    and whether a convolution, a recurrent state, attention or positions do.

    The model runs as it is, in training mode if it is in training mode, and with `options` as additional
    keywords. Dropout must be off. Gradients (`.grad`) and buffers stay as they are.

    - `sequences`: token ids, or tensors [tokens, features]; without them, random tokens in `lengths`.
    - `pack`: how the model is told: one or several of position_ids (they restart), cu_seqlens (offsets),
      cu_seq_lens (cu_seq_lens_q, cu_seq_lens_k and the maxima, as transformers has them), seq_idx, mask_2d
      (an attention_mask of sequence numbers), mask_4d (block-diagonal and causal), none; or a function, such
      as a trainer's collator, that takes the sequences and returns all keywords of the model. If they do not
      follow each other in row 0, it also returns [(row, first token), ...].
    - `alone`: returns the keywords for one sequence; by default its tokens, and of `pack` what the model
      requires.
    - `output`: finds [batch, tokens, ...] in what the model returns; by default logits or last_hidden_state.
    - `gradients`: false tests outputs only.
    - `tolerance`: relative RMS of outputs, and a quarter of that of gradients. By default
      4 eps + 128 eps32, where eps belongs to the model's dtype: 1.6e-5 in f32, 0.03 in bf16.

    >>> import torch
    >>> from ballast.testing import assert_no_leak
    >>> class Shifted(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.mix = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8)
    ...     def forward(self, input_ids, position_ids):
    ...         x = self.embed(input_ids)
    ...         before = torch.nn.functional.pad(x, (0, 0, 1, -1))
    ...         return self.mix(x + before * (position_ids > 0)[..., None])
    >>> assert_no_leak(Shifted()).ok
    True
    """
    report = find_leaks(
        model,
        sequences,
        pack=pack,
        lengths=lengths,
        alone=alone,
        output=output,
        gradients=gradients,
        tolerance=tolerance,
        seed=seed,
        **options,
    )
    report.raise_if_failed()
    return report


def find_leaks(
    model: torch.nn.Module,
    sequences: Sequence[torch.Tensor | Sequence[int]] | None = None,
    *,
    pack: str | Sequence[str] | Pack = "position_ids",
    lengths: Sequence[int] = LENGTHS,
    alone: Callable[[torch.Tensor], Mapping[str, Any]] | None = None,
    output: Callable[[Any], torch.Tensor] | None = None,
    gradients: bool = True,
    tolerance: float | None = None,
    seed: int = 0,
    **options: Any,  # noqa: ANN401
) -> LeakReport:
    """Returns the leaks that `assert_no_leak` raises, with the errors of every sequence and parameter."""
    if sequences is None:
        sequences = random_sequences(model, lengths, seed)
    tensors = [torch.as_tensor(x) for x in sequences]
    if len(tensors) < 2 or any(len(x) == 0 for x in tensors):
        raise UsageError("a leak test needs at least 2 sequences, each with a token")
    runner = Runner(model, tensors, pack, alone, output, options)
    buffers = [(x, x.detach().clone()) for x in model.buffers()]
    try:
        return _Test(runner, tolerance, gradients, seed).report()
    finally:
        with torch.no_grad():
            for buffer, before in buffers:  # running statistics, for example
                buffer.copy_(before)


class _Test:
    """One leak test."""

    def __init__(self, runner: Runner, tolerance: float | None, gradients: bool, seed: int) -> None:
        self.runner, self.seed, self.notes = runner, seed, list[str]()
        self.count = len(runner.sequences)
        types = {p.dtype for p in runner.model.parameters() if p.is_floating_point()} or {torch.float32}
        eps = max(torch.finfo(dtype).eps for dtype in types)
        inside = torch.finfo(torch.float64 if types == {torch.float64} else torch.float32).eps
        limit = 4 * eps + 128 * inside if tolerance is None else tolerance
        self.limits = (limit, 4 * limit)
        self.threshold = 16 * eps
        # Forward shows no smaller dependency, even if backward does.
        self.faint = max(eps, 1e-6)
        self.parameters = {n: p for n, p in runner.model.named_parameters() if p.requires_grad}
        self.with_gradients = gradients and bool(self.parameters)

    def report(self) -> LeakReport:
        """Runs the test."""
        runner = self.runner
        with torch.no_grad():
            packed, again = runner.run_packed(runner.sequences), runner.run_packed(runner.sequences)
            self._check_repeatable(packed, again)
            alone = [runner.run_alone(x) for x in runner.sequences]
            self.others = [
                [
                    changed(x, runner.model, self.seed + 1 + n) if n == j else x
                    for n, x in enumerate(runner.sequences)
                ]
                for j in range(self.count)
            ]
            forward = self._forward(packed)
        outputs = tuple(relative_rms(a, b) for a, b in zip(packed, alone, strict=True))
        gradients, backward = self._gradients(packed) if self.with_gradients else ({}, {})
        # A change that rounding explains counts if backward sees a dependency, which knows no rounding.
        forward = {
            pair: change
            for pair, change in forward.items()
            if bool((change > self.threshold).any()) or pair in backward
        }
        leaks, healed = self._forward_leaks(forward)
        if any(not x <= self.limits[0] for x in outputs):
            leaks += self._differences(outputs, healed, bool(forward))
        only = {pair for pair, size in backward.items() if size > self.faint and pair not in forward}
        leaks += self._backward_leaks(only, packed)
        if not leaks:
            leaks = [
                _gradient_leak(name, x, self.limits[1])
                for name, x in gradients.items()
                if not x <= self.limits[1]
            ]
        notes = (*self.notes, *_hints(runner, leaks))
        lengths = tuple(runner.lengths)
        return LeakReport(tuple(leaks), outputs, gradients, self.limits, lengths, notes)

    def _check_repeatable(self, packed: list[torch.Tensor], again: list[torch.Tensor]) -> None:
        for n, (a, b) in enumerate(zip(packed, again, strict=True)):
            if not torch.equal(a, b) and not relative_rms(a, b) <= self.threshold:
                raise UsageError(
                    f"two runs of the same batch differ by {relative_rms(a, b):.1e} in sequence {n}; turn "
                    "dropout off, with model.eval() or a rate of 0"
                )

    def _forward(self, packed: list[torch.Tensor]) -> dict[tuple[int, int], torch.Tensor]:
        """Relative change of every token of a target, for pairs (source, target) where anything changes."""
        found = {}
        for source, other in enumerate(self.others):
            for target, x in enumerate(self.runner.run_packed(other)):
                if source == target or torch.equal(x, packed[target]):
                    continue
                size = packed[target].double().square().mean().sqrt().clamp(min=1e-30)
                change = (x.double() - packed[target].double()).abs().amax(-1) / size
                found[source, target] = change.nan_to_num(nan=torch.inf)
        return found

    def _gradients(self, packed: list[torch.Tensor]) -> tuple[dict[str, float], dict[tuple[int, int], float]]:
        """Errors of the gradients of parameters, and pairs (source, target) connected in backward.

        A pair means that the loss of the target has a gradient at tokens of the source; its value is the size
        relative to the gradient at the target.
        """
        runner, names = self.runner, list(self.parameters)
        leaves = list(self.parameters.values())
        with torch.enable_grad(), _probes(runner) as probes:
            outputs = runner.run_packed(runner.sequences)
            if not probes:
                self.notes.append(
                    "note: no embedding of the tokens found; gradients of inputs were not tested"
                )
            sums: list[torch.Tensor | None] = [None] * len(names)
            pairs = {}
            for target, x in enumerate(outputs):
                top = (x * self._cotangent(target, x)).sum()
                found = torch.autograd.grad(top, leaves + probes, retain_graph=True, allow_unused=True)
                _add(sums, found[: len(leaves)])
                for gradient in found[len(leaves) :]:
                    if gradient is None:
                        continue
                    widest = gradient.detach().double().flatten(0, 1).flatten(1).abs().amax(-1)
                    sizes_of = [widest[runner.tokens_of(n)].max().item() for n in range(self.count)]
                    for source, size in enumerate(sizes_of):
                        if source != target and size != 0:
                            pairs[source, target] = size / max(sizes_of[target], 1e-30)
        del outputs
        alone: list[torch.Tensor | None] = [None] * len(names)
        sizes = [0.0] * len(names)
        with torch.enable_grad():
            for n, sequence in enumerate(runner.sequences):
                x = runner.run_alone(sequence)
                top = (x * self._cotangent(n, x)).sum()
                found = torch.autograd.grad(top, leaves, allow_unused=True)
                _add(alone, found)
                for i, gradient in enumerate(found):
                    sizes[i] += 0.0 if gradient is None else gradient.double().square().mean().item()
        floor = 1e-3 * max((size**0.5 for size in sizes), default=0.0)
        errors = {}
        for i, name in enumerate(names):
            a, b = sums[i], alone[i]
            if a is None and b is None:
                continue
            zero = torch.zeros_like(leaves[i], dtype=torch.float64)
            difference = (zero if a is None else a.double()) - (zero if b is None else b.double())
            # Sums over sequences may cancel: their terms are the scale.
            size = max(sizes[i] ** 0.5, floor, 1e-30)
            errors[name] = difference.square().mean().sqrt().item() / size
        return errors, pairs

    def _cotangent(self, n: int, x: torch.Tensor) -> torch.Tensor:
        """The gradient of the loss with respect to an output."""
        return values(x.shape, seed=300 + n).to(x)

    def _forward_leaks(self, forward: dict[tuple[int, int], torch.Tensor]) -> tuple[list[Leak], set[str]]:
        leaks: dict[tuple[str, str], Leak] = {}
        search: ForwardSearch | None = None
        # The longest sequence behind a source shows best what reaches it; other sources add other modules.
        lengths = [*self.runner.lengths[1:], 0]
        for source in sorted({source for source, _ in forward}, key=lambda n: -lengths[n]):
            places: list[Place] = []
            with self._noting():
                search = search or ForwardSearch(self.runner, self.threshold)
                places = search.places(source, self.others[source])
                if not places and not search.modules:
                    search = ForwardSearch(self.runner, 0.0)
                    places = search.places(source, self.others[source])
            if not places and not leaks:
                target = min((t for s, t in forward if s == source), key=lambda t: abs(t - source))
                change = forward[source, target]
                tokens = (change > min(self.threshold, change.max().item() / 2)).nonzero().flatten()
                kind = kind_of(self.runner.model, "", change, self.threshold, False)
                places = [Place("", kind, target, (int(tokens[0]), int(tokens[-1])))]
            for p in places:
                leak = Leak(p.module, p.kind, "forward", source, p.target, p.tokens)
                leaks.setdefault((p.module, p.kind), leak)
        return list(leaks.values()), search.modules if search else set()

    def _differences(self, outputs: Sequence[float], healed: set[str], explained: bool) -> list[Leak]:
        """Leaks that the tokens of other sequences have no part in."""
        places: list[tuple[str, str]] = []
        with self._noting():
            places = differing_places(self.runner, healed, self.limits[0])
        if not places and explained:
            return []
        worst = max(range(self.count), key=lambda n: _rank(outputs[n]))
        detail = (
            f"sequence {worst} differs from the same sequence alone by {outputs[worst]:.1e} (limit "
            f"{self.limits[0]:.1e}), whatever tokens the others have"
        )
        return [
            Leak(module, kind, "forward", None, worst, None, detail)
            for module, kind in places or [("", "unknown")]
        ]

    def _backward_leaks(self, pairs: set[tuple[int, int]], packed: list[torch.Tensor]) -> list[Leak]:
        leaks: dict[tuple[str, str], Leak] = {}
        lengths = [0, *self.runner.lengths]
        for target in sorted({target for _, target in pairs}, key=lambda n: -lengths[n]):
            places: list[Place] = []
            with self._noting():
                cotangent = self._cotangent(target, packed[target])
                places = backward_places(self.runner, target, cotangent)
            if not places:
                source = min((s for s, t in pairs if t == target), key=lambda s: abs(s - target))
                places = [Place("", "unknown", source, (0, self.runner.lengths[source] - 1))]
            known = {module for module, _ in leaks}
            for p in places:
                if p.module not in known:
                    # The gradient flows from the target of the forward pass to its source.
                    leak = Leak(p.module, p.kind, "backward", target, p.target, p.tokens)
                    leaks[p.module, p.kind] = leak
        return list(leaks.values())

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """A model that cannot be followed still has a verdict."""
        try:
            # Compiled code has no modules. Without dynamo, whose import is slow, there is none.
            compiled = "torch._dynamo" in sys.modules
            with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
                yield
        except Exception as error:  # noqa: BLE001
            self.notes.append(f"note: the module could not be found: {type(error).__name__}: {error}")


def _gradient_leak(name: str, error: float, limit: float) -> Leak:
    detail = (
        "the gradient is not the sum of those of the sequences alone: relative RMS "
        f"{error:.1e}, limit {limit:.1e}"
    )
    return Leak(name, "gradient", "backward", None, None, None, detail)


def _add(sums: list[torch.Tensor | None], found: Sequence[torch.Tensor | None]) -> None:
    for i, gradient in enumerate(found):
        if gradient is not None:
            old = sums[i]
            sums[i] = gradient.double() if old is None else old + gradient.double()


@contextlib.contextmanager
def _probes(runner: Runner) -> Iterator[list[torch.Tensor]]:
    """Adds zeros to the embeddings of the tokens, whose gradients are those of the inputs."""
    found: list[torch.Tensor] = []
    lengths = runner.lengths
    total = sum(lengths)

    def embed(module: torch.nn.Module, args: Any, output: Any) -> Any:  # noqa: ANN401
        ids = args[0] if args else None
        if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.numel() < total:
            return output
        rows, flat = (1, ids.numel()) if ids.ndim == 1 else (ids.shape[0], ids.flatten(1).shape[1])
        flat_ids = ids.reshape(rows, flat)
        places = runner.places or [(0, sum(lengths[:n])) for n in range(len(lengths))]
        for (row, start), sequence in zip(places, runner.sequences, strict=True):
            part = flat_ids[row, start : start + len(sequence)] if row < rows else flat_ids[0, :0]
            if part.shape != sequence.shape or not torch.equal(part, sequence.to(part)):
                return output
        probe = torch.zeros_like(output).reshape(rows, flat, -1).requires_grad_()
        found.append(probe)
        return output + probe.reshape(output.shape)

    handles = [
        m.register_forward_hook(embed) for m in runner.model.modules() if isinstance(m, torch.nn.Embedding)
    ]
    runner.probes = found
    try:
        yield found
    finally:
        runner.probes = None
        for handle in handles:
            handle.remove()


def _hints(runner: Runner, leaks: list[Leak]) -> list[str]:
    """What usually causes leaks in models of transformers."""
    if not any(type(m).__module__.startswith("transformers.models.") for m in runner.model.modules()):
        return []
    kinds, hints = {leak.kind for leak in leaks if leak.direction == "forward"}, []
    cached = getattr(getattr(runner.model, "config", None), "use_cache", False)
    if "attention" in kinds and cached and "use_cache" not in runner.options:
        hints.append(
            "hint: config.use_cache is true, and with a cache transformers does not separate packed "
            "sequences by position_ids; pass use_cache=False or set it in the config"
        )
    if kinds & {"convolution", "state"}:
        hints.append(
            "hint: without flash-linear-attention, causal-conv1d and mamba-ssm, transformers does not "
            "separate packed sequences in linear attention; install them and pass cu_seq_lens and seq_idx, "
            "or, for Qwen3-Next and Qwen3.5 on a CPU, call ballast.patch_transformers()"
        )
    return hints
