"""Forward pass of a model, optionally with backward, compared with another framework's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from os import fspath
from typing import Literal

from ballast._command import Path, Report
from ballast._command import run as _run

__all__ = ["Notes", "Result", "Trace", "run"]


@dataclass(frozen=True)
class Result:
    """One result and its error; the errors are None without an expected tensor.

    `ratio` is RMS(a-b) / (RMS(b) + 1e-8).
    """

    tensor: str
    shape: tuple[int, ...]
    ratio: float | None
    max_abs: float | None
    passed: bool | None


@dataclass(frozen=True)
class Notes:
    """Facts about the model and its input."""

    model_type: str
    precision: str
    tokens: int
    sequences: int
    parameter_bytes: int
    loss: float


@dataclass(frozen=True)
class Trace(Report):
    """Results of a trace; `passed` is true if every compared result is within the tolerance."""

    tolerance: float
    passed: bool
    compared: int
    results: tuple[Result, ...]
    notes: Notes
    unknown_config_keys: tuple[str, ...] = ()


def run(
    model: Path,
    *,
    ids: Path,
    out: Path | None = None,
    grads: bool = False,
    sites: str | None = None,
    precision: str = "f32",
    experts: Literal["split", "fused"] | None = None,
    topk_ties: Literal["torch", "earliest"] = "torch",
    expect: Path | None = None,
    tolerance: float | None = None,
    force: bool = False,
) -> Trace:
    """Runs a model on the tokens of `ids` and compares the results with the tensors of `expect`.

    `out` receives logits, loss, gradients and the chosen sites as safetensors.

    >>> golden = "fixtures/models/qwen3_5/golden.safetensors"
    >>> trace = run("fixtures/models/qwen3_5", ids=golden, expect=golden, grads=True)
    >>> trace.passed, [result.tensor for result in trace.results][-2:]
    (True, ['logits', 'loss'])
    """
    return _run(
        Trace,
        "trace",
        model,
        may_leave=True,
        ids=fspath(ids),
        out=out,
        grads=grads,
        sites=sites,
        precision=precision,
        experts=experts,
        topk_ties=topk_ties,
        expect=expect,
        tolerance=tolerance,
        force=force,
    )
