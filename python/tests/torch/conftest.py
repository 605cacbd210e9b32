"""Skips the tests of ballast.torch where torch is not installed; BALLAST_REQUIRE_TORCH=1 fails instead."""

import os

import pytest

try:
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
except (ImportError, AttributeError):  # this folder itself can be imported as `torch`
    if os.environ.get("BALLAST_REQUIRE_TORCH") == "1":
        raise
    collect_ignore_glob = ["*.py"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
