"""The example program, and the names of the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_torch_load_save import audited
from torch_support import RELEASE, ROOT, is_protected, release_tensors, saved_tensors

import ballast.torch

EXAMPLE = ROOT / "examples" / "python" / "finetune.py"


def run(script: Path, *arguments: object, folder: Path, ranks: int = 1) -> None:
    """Runs a script, by torchrun if there are several ranks."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    )
    command = [sys.executable, *launcher, str(script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        command, cwd=folder, env=environment, timeout=300, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, (process.stdout + process.stderr)[-6000:]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_trains_and_what_it_saves_passes_the_audit(tmp_path: Path, ranks: int) -> None:
    run(EXAMPLE, RELEASE, "result", folder=tmp_path, ranks=ranks)
    saved = saved_tensors(tmp_path / "result")
    file = release_tensors()
    protected = {name: tensor for name, tensor in saved.items() if is_protected(name)}
    assert len(protected) == 9
    for name, tensor in protected.items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, file[name].float()), f"{name} was trained"
        assert not torch.equal(tensor, tensor.bfloat16().float()), f"{name} has f32 bits"
    assert {t.dtype for name, t in saved.items() if not is_protected(name)} == {torch.bfloat16}
    record = json.loads((tmp_path / "result-run" / "ledger.json").read_text())
    assert (record["steps"], record["clean_steps"]) == (3, 3)
    audited(tmp_path / "result")


def test_what_the_package_lists_is_there() -> None:
    assert all(hasattr(ballast.torch, name) for name in ballast.torch.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ballast.torch.nothing
