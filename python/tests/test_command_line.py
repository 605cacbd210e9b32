"""`python -m ballast`, the script `ballast`, `ballast.lab` and `ballast.trace`."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from test_checkpoint import assert_same, command_line

import ballast
from ballast import lab, trace
from ballast.errors import InputError, UsageError

MODULE = [sys.executable, "-m", "ballast"]
SCRIPT = [str(Path(sysconfig.get_path("scripts")) / "ballast")]


@pytest.mark.parametrize("program", [MODULE, SCRIPT])
def test_the_program_has_its_exit_codes(program: list[str], release: Path) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*program, *args], capture_output=True, text=True, check=False)

    version = run("--version")
    assert (version.returncode, version.stdout.strip()) == (0, f"ballast {ballast.__version__}")
    assert run("inspect", str(release)).returncode == 0
    failed = run("audit", str(release))
    assert failed.returncode == 1 and "FAILED: 3 violations" in failed.stdout
    usage = run("audit", "--polic")
    assert usage.returncode == 2 and "Usage: ballast audit" in usage.stderr
    missing = run("audit", "missing")
    assert missing.returncode == 3 and missing.stderr.startswith("ballast: missing")


def test_lab_returns_the_findings_of_the_command_line(tmp_path: Path) -> None:
    phases: set[str] = set()
    findings = lab.run(
        policies=["f32", "A_log"], tokens=64, out=tmp_path, progress=lambda phase, *_: phases.add(phase)
    )
    assert [run.name for run in findings.runs] == ["A_log", "f32"]
    assert findings.runs[0].kl.mean > findings.runs[1].kl.mean > 0
    assert findings.runs[0].gradients and phases
    assert_same(findings, json.loads(findings.to_json()))
    assert json.loads((tmp_path / "lab.json").read_text()) == json.loads(findings.to_json())
    document = command_line("lab", "--policies", "f32,A_log", "--tokens", "64")
    again = json.loads(findings.to_json())
    for measured in ("seconds", "peak_memory_bytes"):
        del document[measured], again[measured]
    assert again == document


def test_lab_finds_where_two_checkpoints_part(tmp_path: Path, root: Path) -> None:
    source = root / "fixtures/models/qwen3_5"
    ballast.checkpoint.convert(source, tmp_path / "rounded", dtype="bf16", policy="none")
    findings = lab.run(compare=(source, tmp_path / "rounded"), tokens=8, task=True, no_gradients=True)
    assert findings.runs[0].first_difference is not None
    with pytest.raises(UsageError, match="exists; use force=True"):
        (tmp_path / "lab.json").write_text("")
        lab.run(policies=["f32"], tokens=8, out=tmp_path)
    with pytest.raises(UsageError, match="no_such_policy"):
        lab.run(policies=["no_such_policy"], tokens=8)


def test_trace_compares_with_another_framework(root: Path, tmp_path: Path) -> None:
    model, golden = root / "fixtures/models/qwen3_5", root / "fixtures/models/qwen3_5/golden.safetensors"
    report = trace.run(model, ids=golden, expect=golden, grads=True, out=tmp_path / "out.safetensors")
    assert report.passed and report.compared > 10 and report.notes.precision == "f32"
    assert report.tolerance == 1e-4
    document = command_line("trace", model, "--ids", golden, "--expect", golden, "--grads")
    assert json.loads(report.to_json()) == document
    assert_same(report, document)
    assert not trace.run(model, ids=golden, expect=golden, tolerance=1e-12).passed
    assert (tmp_path / "out.safetensors").exists()
    with pytest.raises(InputError, match="input_ids") as caught:
        trace.run(model, ids=model / "model.safetensors")
    assert caught.value.tensor == "input_ids"
