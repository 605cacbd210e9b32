"""Paths that the tests share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BF16_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


def pytest_configure(config: pytest.Config) -> None:
    """Makes the tests independent of the shell and the machine.

    A process that a shell starts in the background ignores interrupts, which some tests send.
    torch crashes on AMX where a virtual machine hides the sizes of its tiles.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cpus = Path("/proc/cpuinfo")
    if find_spec("torch") and cpus.exists() and "amx_bf16" in cpus.read_text():
        product = subprocess.run([sys.executable, "-c", BF16_PRODUCT], capture_output=True, check=False)
        if product.returncode == -signal.SIGILL:
            os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"


@pytest.fixture
def root() -> Path:
    """The folder of the project."""
    return ROOT


@pytest.fixture
def release(root: Path) -> Path:
    """A checkpoint in the form of the released ones: A_log and the output norm in F32, dt_bias in BF16."""
    return root / "fixtures/release/qwen3_5"
