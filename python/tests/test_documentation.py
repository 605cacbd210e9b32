"""The Python examples of README, docs and the docstrings.

A section of a page is a script: its blocks run one after another in a folder that has `fixtures` and, as
`model`, a small checkpoint, and on two ranks if they shard a model. "prints" introduces the output of a
block. A block marked `python not run: REASON` needs a GPU, a network or a large model: it is compiled, and
its names of `ballast` are looked up.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT

import ballast

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python(?: not run: ([^\n]+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^prints\n\n(?:```text[^\n]*\n(.*?)^```|((?:    [^\n]*\n)+))", re.MULTILINE | re.DOTALL)
ABSENT = [name for name in ("torch", "transformers", "accelerate") if find_spec(name) is None]


def sections() -> dict[str, str]:
    """Returns the sections that have Python blocks, by page and title."""
    found = {}
    for page in PAGES:
        for text in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            if BLOCK.search(text):
                found[f"{page.name}: {text.splitlines()[0]}"] = text
    return found


SECTIONS = sections()


def unknown_names(code: str) -> list[str]:
    """Returns the names of `ballast` in the code that the package does not have."""
    nodes, imported = list(ast.walk(ast.parse(code))), {}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imported |= {name.asname or name.name: prefix + name.name for name in node.names}
    names = list(imported.values())
    for path in (ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)):
        root, *rest = path.split(".")
        if root in imported and all(part.isidentifier() for part in rest):
            names.append(".".join([imported[root], *rest]))
    return [name for name in names if name.split(".")[0] == "ballast" and not exists(name)]


def exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ModuleNotFoundError):
        return False
    return True


@pytest.mark.parametrize("section", SECTIONS)
def test_the_blocks_of_a_section_run_one_after_another(section: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall(SECTIONS[section])
    code = "\n".join(block for reason, block in blocks if not reason)
    for name in ABSENT:
        if re.search(rf"\b{name}\b", code):
            pytest.skip(f"{name} is not installed")
    for _, block in blocks:
        compile(block, section, "exec")
        assert unknown_names(block) == []
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    shutil.copytree(ROOT / "fixtures/release/qwen3_5", tmp_path / "model")
    (tmp_path / "section.py").write_text(code, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [sys.executable, *(launcher if "fully_shard" in code else []), "section.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    outputs = PRINTED.findall(SECTIONS[section])
    assert len(outputs) == len(re.findall(r"^prints$", SECTIONS[section], re.MULTILINE))
    for fenced, indented in outputs:
        assert fenced + textwrap.dedent(indented) in ended.stdout


def test_a_marked_block_is_not_run_but_its_names_are_looked_up() -> None:
    text = "```python not run: needs a GPU\nfrom ballast import lab\nlab.rum()\n```\n"
    [(reason, code)] = BLOCK.findall(text)
    assert (reason, unknown_names(code)) == ("needs a GPU", ["ballast.lab.rum"])
    code = "import ballast\nfrom ballast.lab import ran\nballast.checkpoint.inspect(ballast.no)"
    assert unknown_names(code) == ["ballast.lab.ran", "ballast.no"]


PACKAGE = Path(ballast.__file__).parent
FILES = [path.relative_to(PACKAGE).with_suffix("") for path in sorted(PACKAGE.rglob("*.py"))]
MODULES = [".".join(("ballast", *path.parts)).removesuffix(".__init__") for path in FILES]
PLAIN = {"ballast", "ballast.errors", "ballast.ops", "ballast.torch"}
"""Public modules without an example."""


@pytest.mark.parametrize("name", [name for name in MODULES if name != "ballast.__main__"])
def test_the_examples_of_a_module_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    threads = ballast.get_num_threads()
    result = doctest.testmod(module)
    ballast.set_num_threads(threads)
    assert result.failed == 0
    if not name.startswith("ballast.torch.") and "._" not in name and name not in PLAIN:
        assert result.attempted > 0
