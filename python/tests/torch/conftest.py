"""Skips the tests of ballast.torch without the extra `hf`; BALLAST_REQUIRE_TORCH=1 makes that an error."""

import os
from importlib.util import find_spec

import pytest


def _is_missing(name: str) -> bool:
    # This folder itself can be found as a namespace package `torch`, which has no origin.
    spec = find_spec(name)
    return spec is None or spec.origin is None


MISSING = [name for name in ("torch", "transformers", "accelerate", "peft") if _is_missing(name)]
if MISSING and os.environ.get("BALLAST_REQUIRE_TORCH") == "1":
    raise ImportError(f"{', '.join(MISSING)} not found: pip install '.[hf]'")
collect_ignore_glob = ["*.py"] if MISSING else []


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
