"""What the side-by-side runs share: an environment with torch and transformers, and a clock."""

import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def own_environment():
    """The python of a virtual environment with the pinned requirements; made when it is not there."""
    folder = HERE / ".venv"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print("installing torch and transformers into bench/peers/.venv", file=sys.stderr)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", HERE / "requirements.txt"], check=True)
        (folder / "ready").touch()
    return python


def median(work, repetitions):
    work()
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
