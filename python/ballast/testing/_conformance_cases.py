"""Inputs of the conformance cases of the delta rules, with outputs and gradients of the f64 reference.

A case states what it needs from a kernel, so that it can be left out, and what a failure usually means.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ballast._torch import torch
from ballast.testing._delta_rule import gated_delta_rule_reference, kda_reference
from ballast.testing._inputs import values

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

REFERENCES: dict[str, Rule] = {"gated_delta": gated_delta_rule_reference, "kda": kda_reference}

FEATURES = {
    "batch": "more than one row",
    "beta_above_1": "beta up to 2",
    "cu_seqlens": "packed sequences",
    "empty_sequences": "packed sequences without tokens",
    "final_state": "output_final_state",
    "gradients": "backward",
    "grouped_heads": "more value heads than key heads",
    "initial_state": "initial_state",
    "l2norm": "use_qk_l2norm_in_kernel=True; without it, q and k are normalized before the call",
    "nan": "a NaN stays in its sequence and head",
    "raw_qk": "use_qk_l2norm_in_kernel=False",
    "scale": "a scale other than K^-0.5",
    "value_dim": "a value width other than that of the key",
}
"""Parts of the contract that a kernel may leave out."""


@dataclass(frozen=True)
class Shape:
    """The part of a case that every case has; tensors are made from it."""

    tokens: int = 64
    batch: int = 1
    lengths: tuple[int, ...] | None = None
    heads: int = 2
    value_heads: int = 2
    initial_state: bool = False
    final_state: bool = True

    @property
    def rows(self) -> tuple[int, int]:
        """Batch size and tokens of a row."""
        return (self.batch, self.tokens) if self.lengths is None else (1, sum(self.lengths))

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.batch if self.lengths is None else len(self.lengths)


@dataclass(frozen=True)
class Plan:
    """A case before its tensors are made."""

    name: str
    purpose: str
    shape: Shape = field(default_factory=Shape)
    needs: tuple[str, ...] = ()
    decay: str = "usual"
    beta: float = 1.0
    """Largest beta."""
    raw: bool = False
    """q and k are not normalized by the kernel."""
    norms: float = 1.0
    """Size of q and k."""
    half_width: bool = False
    scale: float | None = None
    poison: str | None = None
    """The input that has a NaN: at token 5 of the second sequence, in the first head."""

    @property
    def features(self) -> frozenset[str]:
        """Parts of the contract that a kernel needs for the case."""
        needed = set(self.needs)
        shape = self.shape
        used = {
            "batch": shape.batch > 1,
            "beta_above_1": self.beta > 1,
            "cu_seqlens": shape.lengths is not None,
            "empty_sequences": shape.lengths is not None and 0 in shape.lengths,
            "grouped_heads": shape.value_heads > shape.heads,
            "initial_state": shape.initial_state,
            "nan": self.poison is not None,
            "raw_qk": self.raw,
            "scale": self.scale is not None,
            "value_dim": self.half_width,
        }
        return frozenset(needed | {name for name, needs in used.items() if needs})


PACKED = Shape(lengths=(1, 64, 3, 70, 2), initial_state=True)
NAN_ROWS = Shape(batch=3, tokens=20)
NAN_PACKED = Shape(lengths=(9, 20, 30))

PLANS: tuple[Plan, ...] = (
    Plan("one chunk", "the rule itself", Shape(batch=2)),
    Plan("one token", "a sequence of one token", Shape(tokens=1)),
    Plan("ragged", "a last chunk that is not full", Shape(tokens=130)),
    Plan("short", "a sequence shorter than a chunk", Shape(tokens=17)),
    Plan("states", "an initial state of each row, and its gradient", Shape(70, 2, initial_state=True)),
    Plan("packed", "a state that passes from one sequence to the next", PACKED),
    Plan("packed, no states", "packed without states", Shape(lengths=(20, 1, 50), final_state=False)),
    Plan("empty sequence", "an offset that repeats", Shape(lengths=(0, 5, 0, 40), initial_state=True)),
    Plan("grouped heads", "value head h uses key head h // (HV / H)", Shape(40, value_heads=6)),
    Plan("value width", "a value width other than that of the key", Shape(70), half_width=True),
    Plan("no decay", "log decay 0", Shape(70), decay="none"),
    Plan("long memory", "a sum of many small log decays", Shape(300), decay="small"),
    Plan("fast decay", "the gradient of g where the decay is fast", Shape(70), decay="fast"),
    Plan("strong decay", "a factor exp(-G) that overflows, or a decay that is clamped", decay="strong"),
    Plan("mixed decay", "slow and extreme decays side by side", Shape(130), decay="mixed"),
    Plan("beta up to 2", "negative eigenvalues of the transition", Shape(70), beta=2.0),
    Plan("raw q and k", "q and k are normalized although the caller did not ask", Shape(70), raw=True),
    Plan("small norms", "the eps of the l2norm, inside the root", Shape(40), ("l2norm",), norms=1e-3),
    Plan("scale", "the scale is ignored", Shape(40), scale=0.3),
    *(Plan(f"NaN in {x}, rows", "a NaN spreads", NAN_ROWS, poison=x) for x in ("v", "k", "g")),
    *(Plan(f"NaN in {x}, packed", "a NaN spreads", NAN_PACKED, poison=x) for x in ("v", "k", "g")),
)


@dataclass(frozen=True)
class Case:
    """A case with its tensors; `arguments` are keywords of the rule, in the types of the kernel."""

    plan: Plan
    arguments: dict[str, Any]
    expected: dict[str, torch.Tensor]
    units: dict[str, float]
    """Sizes below which an error counts as absolute."""
    decay_sum: float
    """Largest sum of |g| over 64 tokens, whose rounding is an error of the exponents."""

    def poisoned(self) -> dict[str, Any]:
        """The arguments, with a NaN if the case has one."""
        given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in self.arguments.items()}
        if self.plan.poison is not None:
            row, token = (1, 5) if self.plan.shape.lengths is None else (0, self.plan.shape.lengths[0] + 5)
            given[self.plan.poison][row, token, 0] = float("nan")
        return given

    def untouched(self, name: str) -> torch.Tensor | None:
        """Mask of the elements of a result that the NaN must not reach: other sequences and other heads."""
        if self.plan.poison is None:
            return None
        expected, lengths = self.expected[name], self.plan.shape.lengths
        mask = torch.ones_like(expected, dtype=torch.bool)
        if "state" in name:
            mask[1, 0] = False
        elif lengths is None:
            mask[1, :, 0] = False
        else:
            mask[0, lengths[0] : lengths[0] + lengths[1], 0] = False
        return mask


def leaves_of(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that have a gradient."""
    return {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}


def cotangent(name: str, like: torch.Tensor) -> torch.Tensor:
    """The gradient of an output, which starts backward."""
    return values(like.shape, seed=101 + (name != "o")).to(like)


@functools.lru_cache(maxsize=64)
def case_of(rule: str, plan: Plan, dtype: torch.dtype, key_dim: int, value_dim: int, l2norm: bool) -> Case:
    """Makes a case; `l2norm` is false for a kernel that cannot normalize q and k itself."""
    arguments = _arguments(rule, plan, dtype, key_dim, value_dim, l2norm)
    wide = {n: x.double().requires_grad_() for n, x in leaves_of(arguments).items()}
    with _one_thread():
        o, state = REFERENCES[rule](**{**arguments, **wide})
        tops = {"o": o} | ({} if state is None else {"final_state": state})
        cotangents = [cotangent(name, x) for name, x in tops.items()]
        gradients = torch.autograd.grad(list(tops.values()), list(wide.values()), cotangents)
    expected = {name: x.detach() for name, x in tops.items()}
    expected |= {f"d{name}": x for name, x in zip(wide, gradients, strict=True)}
    return Case(plan, arguments, expected, _units(expected, rule, key_dim), _decay_sum(arguments["g"]))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Runs without threads: the tensors of one token are too small for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _arguments(
    rule: str, plan: Plan, dtype: torch.dtype, key_dim: int, value_dim: int, l2norm: bool
) -> dict[str, Any]:
    shape, seeds = plan.shape, itertools.count(1000)
    value_dim = value_dim // 2 if plan.half_width else value_dim
    gates = torch.float64 if dtype == torch.float64 else torch.float32

    def make(*sizes: int, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
        return values(sizes, next(seeds), low, high)

    (batch, tokens), heads = shape.rows, shape.value_heads
    q, k = (plan.norms * make(batch, tokens, shape.heads, key_dim) for _ in range(2))
    if plan.norms != 1.0:
        q[:, 3], k[:, 3] = 0.0, 0.0  # as the rows of padding
    if plan.raw:
        q, k = 0.2 * q, 0.2 * k
    elif not l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    made: dict[str, Any] = {
        "initial_state": None,
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": make(batch, tokens, heads, value_dim).to(dtype),
        "g": _decays(plan.decay, (batch, tokens, heads, *([key_dim] if rule == "kda" else []))).to(gates),
        "beta": make(batch, tokens, heads, low=0.0, high=plan.beta).to(gates),
    }
    if shape.initial_state:
        made["initial_state"] = make(shape.sequences, heads, key_dim, value_dim).to(gates)
    if shape.lengths is not None:
        offsets = [0, *itertools.accumulate(shape.lengths)]
        made["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
    if plan.scale is not None:
        made["scale"] = plan.scale
    inside = l2norm and not plan.raw
    return {**made, "output_final_state": shape.final_state, "use_qk_l2norm_in_kernel": inside}


def _decays(kind: str, sizes: Sequence[int]) -> torch.Tensor:
    """Log decays: per token, or per token and channel."""
    low, high = {
        "usual": (-1.0, 0.0),
        "none": (0.0, 0.0),
        "small": (-1e-3, 0.0),
        "fast": (-12.0, -2.0),
        "strong": (-60.0, -20.0),
        "mixed": (-1e-3, 0.0),
    }[kind]
    g = values(sizes, 77, low, high)
    return torch.where(values(sizes, 78) > 0.5, -100.0, g) if kind == "mixed" else g


def _units(expected: dict[str, torch.Tensor], rule: str, key_dim: int) -> dict[str, float]:
    """Sizes of results that are differences of larger numbers.

    dg is a suffix sum of <q, dq> - <k, dk>, and <q, dq> is <o, do>. Where the decay is extreme, the
    difference is much smaller than both, and rounding is relative to them. Others: relative down to 1e-3.
    """
    o = expected["o"]
    row = (o * cotangent("o", o)).sum(-1)
    unit = row.square().mean().sqrt().item() / (key_dim**0.5 if rule == "kda" else 1.0)
    return {name: max(unit, 1e-3) if name == "dg" else 1e-3 for name in expected}


def _decay_sum(g: torch.Tensor) -> float:
    sums = torch.cat([torch.zeros_like(g[:, :1]), -g], dim=1).double().cumsum(1)
    ends = torch.arange(1, sums.shape[1])
    return (sums[:, ends] - sums[:, (ends - 64).clamp(min=0)]).max().item()
