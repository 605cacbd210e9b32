"""Paths that the tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root() -> Path:
    """The folder of the project."""
    return ROOT


@pytest.fixture
def release(root: Path) -> Path:
    """A checkpoint in the form of the released ones: A_log and the output norm in F32, dt_bias in BF16."""
    return root / "fixtures/release/qwen3_5"
