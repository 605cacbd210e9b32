"""The kernels under FSDP2, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CASE = Path(__file__).parent / "fsdp2_case.py"


def test_gradients_of_two_ranks_are_those_of_the_unsharded_model(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(CASE), str(tmp_path / "store")], timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
