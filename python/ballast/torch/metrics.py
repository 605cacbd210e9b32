"""Metrics of a run, one JSON line per entry, in the format of `ballast train`'s metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Step:
    """An optimizer step."""

    step: int
    """Step number, from 1."""
    loss: float
    """Mean loss per trained token."""
    learning_rate: float
    gradient_norm: float
    """Global gradient norm."""
    group_norms: dict[str, float] = field(default_factory=dict)
    """Gradient norm by group of parameters."""
    tokens: int = 0
    """Number of tokens in the step."""
    trained_tokens: int = 0
    """Number of tokens with a loss."""
    seconds: float = 0.0
    peak_memory: int = 0
    """Peak memory of the process in bytes."""


@dataclass
class Evaluation:
    """An evaluation on held-out data."""

    step: int
    """Number of steps before the evaluation."""
    loss: float
    accuracy: float
    """Fraction of trained tokens whose most likely prediction is right; NaN if it was not measured."""
    tokens: int


@dataclass
class Event:
    """An event of the run."""

    step: int
    what: str
    """Kind: `fault`, `skip`, `stop`."""
    text: str


@dataclass
class Checksums:
    """Protected tensors after a step, written to a separate file."""

    step: int
    tensors: dict[str, str]
    """dtype and checksum by name: `f32 9439371596256473`."""


class MetricsWriter:
    """Appends entries to a file."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file, and removes an incomplete last line left by a killed process."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        size = self._file.tell()
        if size:
            complete = path.read_bytes().rfind(b"\n") + 1
            if complete < size:
                os.truncate(path, complete)

    def write(self, entry: Step | Evaluation | Event | Checksums) -> None:
        """Appends one line."""
        kind = type(entry).__name__.lower()
        fields = {"kind": kind, **{name: _plain(value) for name, value in vars(entry).items()}}
        self._file.write(json.dumps(fields, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _plain(value: Any) -> Any:  # noqa: ANN401 (any field of an entry)
    """Returns a value as JSON has it: NaN and the infinities become strings.

    >>> _plain(float("-inf")), _plain({"mlp": float("nan")}), _plain(0.5)
    ('-Infinity', {'mlp': 'NaN'}, 0.5)
    """
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
