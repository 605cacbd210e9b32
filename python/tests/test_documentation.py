"""The examples of the docstrings."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

MODULES = [
    "ballast",
    "ballast.checkpoint",
    "ballast.contract",
    "ballast.errors",
    "ballast.lab",
    "ballast.trace",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_right(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert doctest.testmod(importlib.import_module(name)).failed == 0
