"""The examples of the docstrings and of docs/python.md."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
from conftest import ROOT

MODULES = [
    "ballast",
    "ballast.checkpoint",
    "ballast.contract",
    "ballast.errors",
    "ballast.lab",
    "ballast.trace",
]

PAGE = (ROOT / "docs/python.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_right(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("section", SECTIONS)
def test_the_snippets_of_a_section_run_one_after_another(
    section: str,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "fixtures").symlink_to(root / "fixtures")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", SECTIONS[section], re.MULTILINE | re.DOTALL))
    for package in ("torch", "transformers"):
        if re.search(rf"^(import|from) {package}\b", code, re.MULTILINE):
            pytest.importorskip(package)
    exec(compile(code, f"docs/python.md, {section}", "exec"), {"__name__": "snippet"})
    output = capsys.readouterr().out
    for printed in re.findall(
        r"^prints\n\n```text [^\n]*\n(.*?)^```", SECTIONS[section], re.MULTILINE | re.DOTALL
    ):
        assert printed.strip() and printed in output
