"""The installed package: its stub, its marker for type checkers, and its metadata."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import ballast
from ballast import _native

PACKAGE = Path(ballast.__file__).parent


def test_the_stub_names_what_the_native_module_has() -> None:
    stub = ast.parse((PACKAGE / "_native/__init__.pyi").read_text(encoding="utf-8"))
    named = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    targets = [node.target for node in stub.body if isinstance(node, ast.AnnAssign)]
    named |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert named == {name for name in dir(_native) if not name.startswith("_")}
    [policy] = [node for node in stub.body if isinstance(node, ast.ClassDef)]
    methods = {node.name for node in policy.body if isinstance(node, ast.FunctionDef)}
    own = {name for name in vars(_native.Policy) if not name.startswith("__")}
    assert methods - {"__new__", "__getnewargs__"} == own


def test_every_module_is_listed_before_it_is_imported() -> None:
    code = "import ballast, sys; print(*dir(ballast)); assert 'torch' not in sys.modules"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    public = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("_")} - {"py"}
    # `errors` and `threads` are imported with the package; the names of `threads` stand beside it.
    assert public - {"threads"} <= set(listed.split())


@pytest.mark.parametrize(
    ("absent", "code", "extra"),
    [
        ("torch", "import ballast.ops", "torch"),
        ("torch", "import ballast; ballast.testing", "torch"),
        ("torch", "from ballast.torch import keep_fp32", "torch"),
        ("torch", "import ballast; ballast.patch_transformers()", "torch"),
        ("transformers", "import ballast; ballast.patch_transformers()", "hf"),
        ("transformers", "from ballast.torch import loading; loading().__enter__()", "hf"),
    ],
)
def test_the_error_of_a_missing_package_names_the_extra(absent: str, code: str, extra: str) -> None:
    if absent == "transformers":
        pytest.importorskip("torch")
    hide = "import sys, importlib.abc as a\n"
    hide += f"class Hide(a.MetaPathFinder):\n  def find_spec(self, name, *_):\n    if name == {absent!r}:\n"
    hide += f"      raise ModuleNotFoundError(f'No module named {absent}', name={absent!r})\n"
    hide += "sys.meta_path.insert(0, Hide())\n"
    ended = subprocess.run([sys.executable, "-c", hide + code], capture_output=True, text=True, check=False)
    line = ended.stderr.strip().splitlines()[-1]
    assert line.startswith("ModuleNotFoundError") and f"pip install '.[{extra}]'" in line, ended.stderr


def test_the_metadata_names_the_authors() -> None:
    assert importlib.metadata.metadata("ballast-ml")["Author"] == "The Ballast authors"


def test_the_package_is_typed_and_has_the_version_of_the_library() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert importlib.metadata.version("ballast-ml") == ballast.__version__ == _native.VERSION
    assert f"\nversion: {ballast.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"*Ballast*, version {ballast.__version__}." in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_base_package_has_no_dependencies() -> None:
    required = importlib.metadata.requires("ballast-ml") or []
    assert all("extra ==" in requirement for requirement in required)
    extras = importlib.metadata.metadata("ballast-ml").get_all("Provides-Extra")
    assert extras is not None and {"torch", "hf"} <= set(extras)
