"""The installed package: its stub, its marker for type checkers, and its metadata."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

import ballast
from ballast import _native

PACKAGE = Path(ballast.__file__).parent


def test_the_stub_names_what_the_native_module_has() -> None:
    stub = ast.parse((PACKAGE / "_native.pyi").read_text(encoding="utf-8"))
    named = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    targets = [node.target for node in stub.body if isinstance(node, ast.AnnAssign)]
    named |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert named == {name for name in dir(_native) if not name.startswith("_")}
    [policy] = [node for node in stub.body if isinstance(node, ast.ClassDef)]
    methods = {node.name for node in policy.body if isinstance(node, ast.FunctionDef)}
    own = {name for name in vars(_native.Policy) if not name.startswith("__")}
    assert methods - {"__new__", "__getnewargs__"} == own


def test_the_package_is_typed_and_has_the_version_of_the_library() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert importlib.metadata.version("ballast-ml") == ballast.__version__ == _native.VERSION


def test_the_base_package_has_no_dependencies() -> None:
    required = importlib.metadata.requires("ballast-ml") or []
    assert all("extra ==" in requirement for requirement in required)
    extras = importlib.metadata.metadata("ballast-ml").get_all("Provides-Extra")
    assert extras is not None and {"torch", "hf"} <= set(extras)
