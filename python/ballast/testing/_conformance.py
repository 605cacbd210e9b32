"""Conformance of a delta-rule kernel: a table of errors against f64, per case, output and gradient."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ballast._torch import torch
from ballast.errors import CheckFailed, UsageError
from ballast.testing._conformance_cases import (
    FEATURES,
    PLANS,
    REFERENCES,
    Case,
    Plan,
    case_of,
    cotangent,
    leaves_of,
)

__all__ = ["CaseResult", "Conformance", "Measured", "conformance"]

NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")

WEIGHTS = {"o": 0.75, "final_state": 0.75, "dg": 3.0, "dbeta": 3.0}
"""Limits relative to each other; the other gradients have 1.25."""


@dataclass(frozen=True)
class Measured:
    """One output or gradient of one case."""

    error: float
    """Relative RMS against the f64 reference; NaN if it has a NaN or is missing."""
    limit: float
    message: str | None
    """The fault; None within the limit."""

    @property
    def ok(self) -> bool:
        """Returns true within the limit."""
        return self.message is None


@dataclass(frozen=True)
class CaseResult:
    """Errors of a case."""

    name: str
    purpose: str
    """What a failure usually means."""
    results: Mapping[str, Measured]
    skipped: tuple[str, ...] = ()
    """The features that the case needs and that the caller left out."""
    error: str | None = None
    """The exception of the kernel."""

    @property
    def ok(self) -> bool:
        """Returns true if nothing failed."""
        return self.error is None and all(x.ok for x in self.results.values())


@dataclass(frozen=True)
class Conformance:
    """Errors of a kernel in all cases. As a string, a table; see `to_markdown` and `to_json`."""

    kernel: str
    rule: str
    dtype: str
    device: str
    cases: tuple[CaseResult, ...]
    skipped: tuple[str, ...]
    """The features that were not tested."""

    @property
    def ok(self) -> bool:
        """Returns true if no case failed."""
        return all(case.ok for case in self.cases)

    @property
    def failures(self) -> tuple[str, ...]:
        """One line per failed output or gradient."""
        lines = []
        for case in self.cases:
            if case.error is not None:
                lines.append(f"{case.name}: {case.error} (tests: {case.purpose})")
            lines += [
                f"{case.name}: {name}: {x.message} (tests: {case.purpose})"
                for name, x in case.results.items()
                if not x.ok
            ]
        return tuple(lines)

    def raise_if_failed(self) -> None:
        """Raises `CheckFailed` with every failure."""
        if not self.ok:
            raise CheckFailed(f"{self.kernel} fails the conformance test of {self.rule}:\n{self._notes()}")

    def to_markdown(self) -> str:
        """Returns the table in Markdown, with the failures below it."""
        head, *rows = self._rows()
        lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"{self._title()}\n\n{table}\n\n" + "\n".join(f"- {x}" for x in self._notes().splitlines())

    def to_json(self) -> str:
        """Returns the report as JSON; an error that is NaN is null."""
        cases = [
            {
                "name": case.name,
                "purpose": case.purpose,
                "ok": case.ok,
                "skipped": list(case.skipped),
                "error": case.error,
                "results": {
                    name: {
                        "error": x.error if math.isfinite(x.error) else None,
                        "limit": x.limit,
                        "ok": x.ok,
                        "message": x.message,
                    }
                    for name, x in case.results.items()
                },
            }
            for case in self.cases
        ]
        document = {name: getattr(self, name) for name in ("kernel", "rule", "dtype", "device", "ok")}
        return json.dumps({**document, "skipped": list(self.skipped), "cases": cases}, indent=2)

    def __str__(self) -> str:
        """Returns the table, and the failures below it."""
        head, *rows = self._rows()
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = [self._title(), ""]
        for row in (head, *rows):
            cells = [row[0].ljust(widths[0])] + [x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, "", self._notes()])

    def _title(self) -> str:
        return f"{self.kernel}, rule {self.rule}, {self.dtype} on {self.device}: relative RMS against f64"

    def _rows(self) -> list[list[str]]:
        names = [name for name in NAMES if any(name in case.results for case in self.cases)]
        rows = [["case", *names]]
        for case in self.cases:
            cells = [_cell(case.results.get(name)) for name in names]
            if case.skipped:
                cells = ["skipped", *["-"] * (len(names) - 1)]
            elif case.error is not None:
                cells = ["FAIL", *["-"] * (len(names) - 1)]
            rows.append([case.name, *cells[: len(names)]])
        return rows

    def _notes(self) -> str:
        lines = [f"FAIL {line}" for line in self.failures]
        for name in self.skipped:
            count = sum(name in case.skipped for case in self.cases)
            lines.append(f"skipped: {name} ({FEATURES[name]}); {count} of {len(self.cases)} cases left out")
        ran = [case for case in self.cases if not case.skipped]
        count = sum(len(case.results) for case in ran)
        failed = sum(not case.ok for case in ran)
        verdict = "PASSED" if self.ok else "FAILED"
        return "\n".join([*lines, f"{verdict}: {failed} of {len(ran)} cases failed, {count} comparisons"])


def _cell(found: Measured | None) -> str:
    if found is None:
        return "-"
    return f"{found.error:.1e}" if found.ok else f"FAIL {found.error:.1e}"


def conformance(
    fn: Callable[..., Any],
    rule: str = "gated_delta",
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    skip: Iterable[str] = (),
    tolerance: float | Mapping[str, float] | None = None,
    key_dim: int = 32,
    value_dim: int = 32,
    cases: Iterable[str] | None = None,
) -> Conformance:
    """Runs a kernel through the cases of a rule and compares outputs and gradients with f64.

    The kernel is called as flash-linear-attention's `chunk_gated_delta_rule` (rule "gated_delta") or
    `chunk_kda` ("kda"): q, k and v by position; g, beta, initial_state, output_final_state and
    use_qk_l2norm_in_kernel by keyword; cu_seqlens and scale by keyword in the cases that have them. q, k and
    v are in `dtype`; g, beta and states are f32.

    `skip` names what the kernel does not support: batch, beta_above_1, cu_seqlens, empty_sequences,
    final_state, gradients, grouped_heads, initial_state, l2norm, nan, raw_qk, scale, value_dim. The table
    lists what was skipped. `cases` names the cases to run; without it, all run.

    An error is RMS(found - expected) / RMS(expected). Its limit follows from the dtype:
    w (eps + (128 + G) eps32), where eps belongs to the storage, eps32 to the f32 sums inside, and G is the
    largest sum of |g| over 64 tokens, which is rounded before its exponential. w is 0.75 for outputs, 1.25
    for gradients, and 3 for dg and dbeta, which are sums over a row. In bf16 these are 0.006, 0.010 and
    0.023, in f32 from 1.2e-5 to 4.6e-5, before G. A number as `tolerance` replaces eps + (128 + G) eps32 (for
    TF32 products 1e-3); a mapping of names to numbers sets limits.

    >>> from ballast import ops, testing
    >>> testing.conformance(ops.chunk_gated_delta_rule, cases=["one token", "packed"]).ok
    True
    """
    if rule not in REFERENCES:
        raise UsageError(f"unknown rule {rule!r}; use one of {', '.join(REFERENCES)}")
    left_out = _known(skip, FEATURES, "feature")
    chosen = (
        [plan.name for plan in PLANS] if cases is None else _known(cases, [p.name for p in PLANS], "case")
    )
    results = []
    for plan in (plan for plan in PLANS if plan.name in chosen):
        missing = tuple(sorted(plan.features.intersection(left_out)))
        if missing:
            results.append(CaseResult(plan.name, plan.purpose, {}, missing))
            continue
        if "final_state" in left_out:
            plan = replace(plan, shape=replace(plan.shape, final_state=False))
        case = case_of(rule, plan, dtype, key_dim, value_dim, "l2norm" not in left_out)
        results.append(_measure(fn, case, dtype, torch.device(device), left_out, tolerance))
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return Conformance(
        name, rule, str(dtype).removeprefix("torch."), str(device), tuple(results), tuple(left_out)
    )


def _known(names: Iterable[str], known: Iterable[str], kind: str) -> list[str]:
    """Returns the names, all of them known."""
    found, known = list(dict.fromkeys([names] if isinstance(names, str) else names)), list(known)
    for name in found:
        if name not in known:
            raise UsageError(f"unknown {kind} {name!r}; use one of {', '.join(known)}")
    return found


def _measure(
    fn: Callable[..., Any],
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    left_out: Sequence[str],
    tolerance: float | Mapping[str, float] | None,
) -> CaseResult:
    plan = case.plan
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in case.poisoned().items()}
    leaves = leaves_of(given)
    before = {name: x.clone() for name, x in leaves.items()}
    for x in leaves.values():
        x.requires_grad_("gradients" not in left_out)
    try:
        found = _run(fn, given, leaves)
    except Exception as error:  # noqa: BLE001 - any failure of the kernel is a result
        return CaseResult(plan.name, plan.purpose, {}, error=f"{type(error).__name__}: {error}")
    wanted = [name for name in case.expected if "gradients" not in left_out or not name.startswith("d")]
    results = {
        name: _compare(name, found.get(name), case, _limit(name, case, dtype, tolerance)) for name in wanted
    }
    changed = [n for n, x in leaves.items() if not torch.equal(x.nan_to_num(), before[n].nan_to_num())]
    error = f"the kernel overwrites its input {changed[0]}" if changed else None
    return CaseResult(plan.name, plan.purpose, results, error=error)


def _run(
    fn: Callable[..., Any], given: dict[str, Any], leaves: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the outputs and gradients of a kernel; those that it does not make are absent."""
    keywords = {name: x for name, x in given.items() if name not in ("q", "k", "v")}
    results = fn(given["q"], given["k"], given["v"], **keywords)
    results = results if isinstance(results, tuple | list) else (results,)
    found = {n: x for n, x in zip(("o", "final_state"), results, strict=False) if x is not None}
    if not given["output_final_state"]:
        found.pop("final_state", None)
    tops = {name: x for name, x in found.items() if x.requires_grad}
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    if tops and wanted:
        cotangents = [cotangent(name, x) for name, x in tops.items()]
        gradients = torch.autograd.grad(
            list(tops.values()), list(wanted.values()), cotangents, allow_unused=True
        )
        found |= {f"d{n}": x for n, x in zip(wanted, gradients, strict=True) if x is not None}
    return found


def _limit(name: str, case: Case, dtype: torch.dtype, tolerance: float | Mapping[str, float] | None) -> float:
    if isinstance(tolerance, Mapping) and name in tolerance:
        return tolerance[name]
    inside = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    base = torch.finfo(dtype).eps + (128 + case.decay_sum) * inside
    return WEIGHTS.get(name, 1.25) * (tolerance if isinstance(tolerance, int | float) else base)


def _compare(name: str, found: torch.Tensor | None, case: Case, limit: float) -> Measured:
    expected = case.expected[name]
    if found is None:
        what = "no gradient" if name.startswith("d") else "the kernel returned none"
        return Measured(math.nan, limit, what)
    if found.shape != expected.shape:
        return Measured(
            math.nan, limit, f"got the shape {list(found.shape)}, expected {list(expected.shape)}"
        )
    actual = found.detach().double().cpu()
    mask = case.untouched(name)
    a, b = (actual, expected) if mask is None else (actual[mask], expected[mask])
    size = max(b.square().mean().sqrt().item(), case.units[name])
    error = (a - b).square().mean().sqrt().item() / size
    if error <= limit:
        return Measured(error, limit, None)
    return Measured(error, limit, _fault(name, actual, case, error, limit))


def _fault(name: str, actual: torch.Tensor, case: Case, error: float, limit: float) -> str:
    """Names the worst element."""
    expected, mask = case.expected[name], case.untouched(name)
    difference = (actual - expected).abs().nan_to_num(nan=math.inf)
    if mask is not None:
        difference = torch.where(mask, difference, -1.0)
    worst = int(difference.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape)]
    got = actual.flatten()[worst].item()
    where = ""
    if mask is not None and not math.isfinite(got):
        place = _place(name, index, case.plan)
        where = f"the NaN of {case.plan.poison} in head 0 of sequence 1 reaches {place}; "
    return (
        f"{where}relative RMS {error:.2e} is above {limit:.2e}; worst of {actual.numel()} elements {index}: "
        f"got {got:.9g}, expected {expected.flatten()[worst].item():.9g}"
    )


def _place(name: str, index: list[int], plan: Plan) -> str:
    """Names head and sequence of an element."""
    if "state" in name:
        sequence, head = index[0], index[1]
    else:
        sequence, head = index[0], index[2]
        if plan.shape.lengths is not None:
            first, second, _ = plan.shape.lengths
            sequence = 0 if index[1] < first else 1 if index[1] < first + second else 2
    return f"head {head} of sequence {sequence}"
