"""`ballast.checkpoint`: results, documents, errors, progress and interrupts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors_file

import ballast
from ballast import BallastError, BallastWarning, lab
from ballast._command import Report
from ballast.checkpoint import audit, convert, diff, inspect, repair
from ballast.contract import Policy
from ballast.errors import CheckFailed, InputError, UsageError

MANY = 1 << 27
"""Elements of a tensor that takes some time to read."""


def command_line(*args: str | Path) -> dict[str, Any]:
    """Returns the document that the command line prints."""
    command = [sys.executable, "-m", "ballast", "--json", *map(str, args)]
    document: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
    return document


def assert_same(data: Any, document: Any) -> None:  # noqa: ANN401
    """Asserts that dataclasses have every value of a document."""
    if dataclasses.is_dataclass(data):
        names = {f.name.rstrip("_"): f.name for f in dataclasses.fields(data)}
        for key in document.keys() - {"schema"}:
            assert_same(getattr(data, names[key]), document[key])
    elif isinstance(data, tuple):
        assert len(data) == len(document)
        for item, part in zip(data, document, strict=True):
            assert_same(item, part)
    elif isinstance(data, dict):
        assert data.keys() == document.keys()
        for key in data:
            assert_same(data[key], document[key])
    elif isinstance(data, float) and math.isnan(data):
        assert document is None
    else:
        assert data == document


def test_every_report_is_the_document_of_the_command_line(root: Path, release: Path, tmp_path: Path) -> None:
    torch_dist = root / "fixtures/torch/torch_dist_tp2"
    assert inspect(torch_dist).state["F32"].tensors > 50
    rounded, repaired = tmp_path / "rounded", tmp_path / "repaired"
    megatron = "--layout megatron --tp 2 --zero-centered-gamma false --dry-run".split()
    cases: list[tuple[Report, list[str | Path]]] = [
        (inspect(release, tensors=True), ["inspect", release, "--tensors"]),
        (inspect(torch_dist), ["inspect", torch_dist]),
        (inspect(release, policy="nemo"), ["inspect", release, "--policy", "nemo"]),
        (audit(release), ["audit", release]),
        (
            convert(release, rounded, dtype="bf16", policy="none"),
            ["convert", release, rounded, "--dtype", "bf16", "--policy", "none", "--force"],
        ),
        (
            convert(
                release, tmp_path / "m", layout="megatron", tp=2, zero_centered_gamma=False, dry_run=True
            ),
            ["convert", release, tmp_path / "m", *megatron],
        ),
        (diff(release, rounded), ["diff", release, rounded]),
        (diff(release, rounded, tolerance=1.0), ["diff", release, rounded, "--tolerance", "1"]),
        (
            repair(rounded, repaired, original=release),
            ["repair", rounded, repaired, "--original", release, "--force"],
        ),
    ]
    for report, args in cases:
        document = command_line(*args)
        assert document["schema"].startswith("ballast.")
        assert json.loads(report.to_json()) == document, args
        assert_same(report, document)


def test_an_audit_fails_with_its_violations_and_passes_after_a_conversion(
    release: Path, tmp_path: Path
) -> None:
    report = audit(release)
    assert not report.ok
    assert [(f.rule, f.stored, len(f.tensors)) for f in report.violations] == [("gdn-dt-bias", "BF16", 3)]
    with pytest.raises(CheckFailed, match="audit failed under policy strict\nnot-f32") as caught:
        report.raise_if_failed()
    assert caught.value.tensor == "model.language_model.layers.0.linear_attn.dt_bias"
    assert caught.value.exit_code == 1
    converted = convert(release, tmp_path / "converted")
    assert converted.verification is not None and converted.files == 1
    audit(tmp_path / "converted").raise_if_failed()


def test_a_report_is_frozen(release: Path) -> None:
    report = audit(release)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.passed = True  # type: ignore[misc]
    assert report == audit(release)


def test_repair_restores_the_bits_of_the_original(release: Path, tmp_path: Path) -> None:
    convert(release, tmp_path / "rounded", dtype="bf16", policy="none")
    assert not audit(tmp_path / "rounded", policy="megatron").ok
    report = repair(tmp_path / "rounded", tmp_path / "repaired", original=release, policy="megatron")
    assert {t.outcome for t in report.tensors} == {"restored"}
    compared = diff(tmp_path / "repaired", release)
    assert compared.equal and {t.verdict for t in compared.tensors} == {"same-bits"}


def test_a_policy_can_be_an_object_or_a_file(release: Path, tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text('name = "ours"\nextends = "strict"\nremove = ["gdn-dt-bias"]\n')
    policy = Policy.from_file(file)
    for given in (file, str(file), policy, policy.for_architecture({"model_type": "qwen3_5"})):
        report = audit(release, policy=given)
        assert report.ok and report.policy == "ours" and report.protected == 6


def test_an_error_in_a_file_has_file_tensor_and_byte(tmp_path: Path) -> None:
    file = safetensors_file.write(tmp_path / "model.safetensors", {"x": ("F32", (2,), bytes(8))})
    content = bytearray(file.read_bytes())
    file.write_bytes(content.replace(b'"F32"', b'"F33"'))
    with pytest.raises(InputError, match="F33") as caught:
        inspect(file)
    assert (caught.value.file, caught.value.tensor) == (file, "x")
    file.write_bytes(struct.pack("<Q", 1 << 40) + content[8:])
    with pytest.raises(InputError) as caught:
        inspect(file)
    assert (caught.value.file, caught.value.byte) == (file, 0)
    assert str(file) in str(caught.value)


def test_errors_are_exceptions_by_kind(release: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as missing:
        audit(tmp_path / "missing")
    assert missing.value.file == tmp_path / "missing"
    with pytest.raises(UsageError, match="unknown policy"):
        audit(release, policy="strictt")
    with pytest.raises(UsageError, match="invalid value 'bf15' for '--dtype <DTYPE>'"):
        convert(release, tmp_path / "out", dtype="bf15")  # type: ignore[arg-type]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="notes.txt|not empty|exists"):
        convert(release, tmp_path / "full")
    for kind in (CheckFailed, InputError, UsageError):
        assert issubclass(kind, BallastError)


def test_a_path_that_looks_like_an_option_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    safetensors_file.write(tmp_path / "--json", {"x": ("F32", (1,), bytes(4))})
    (tmp_path / "--json").rename(tmp_path / "--x.safetensors")
    assert inspect("--x.safetensors").total.tensors == 1


@pytest.mark.parametrize("path", [3, 2.5, True, ["x"]])
def test_a_path_that_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(UsageError, match=r"a path must be a str or an os.PathLike, got \w+ "):
        audit(path)


def test_errors_name_keywords_and_not_options(release: Path, tmp_path: Path) -> None:
    convert(release, tmp_path / "there")
    with pytest.raises(BallastError) as refused:
        convert(release, tmp_path / "there")
    assert "add force=True to replace it" in str(refused.value)
    with pytest.raises(BallastError) as refused:
        convert(release, tmp_path / "new", tp=2)
    assert "add layout megatron" in str(refused.value)


def test_a_warning_of_the_command_line_is_a_warning(release: Path, tmp_path: Path) -> None:
    for file in release.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((release / "config.json").read_text())
    config["text_config"]["attention_sink_bias"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(BallastWarning, match="attention_sink_bias") as caught:
        report = inspect(tmp_path)
    assert caught[0].filename == __file__
    assert report.unknown_config_keys == ("text_config.attention_sink_bias",)


def test_nothing_is_printed(release: Path, capfd: pytest.CaptureFixture[str]) -> None:
    audit(release)
    with pytest.raises(InputError):
        audit(release / "missing")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_progress_is_reported_in_the_calling_thread(tmp_path: Path) -> None:
    file = safetensors_file.write_zeros(tmp_path / "model.safetensors", "x", MANY)
    seen: list[tuple[str, int, int]] = []
    threads = set()

    def progress(phase: str, done: int, total: int) -> None:
        seen.append((phase, done, total))
        threads.add(threading.get_ident())

    audit(file, progress=progress)
    assert threads == {threading.get_ident()}
    assert all(total == 2 * MANY and 0 <= done <= total for _, done, total in seen)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == 2 * MANY


def test_the_gil_is_released(tmp_path: Path) -> None:
    file = safetensors_file.write_zeros(tmp_path / "model.safetensors", "x", MANY)
    ended = threading.Event()

    def work() -> None:
        audit(file)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    steps = 0
    while not ended.is_set():
        time.sleep(0.001)
        steps += 1
    thread.join()
    assert steps > 10


def test_an_interrupt_cancels_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = safetensors_file.write_zeros(tmp_path / "model.safetensors", "x", MANY)
    before = {path.name for path in tmp_path.iterdir()}

    def interrupt(phase: str, done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)  # Python raises the exception here

    with pytest.raises(KeyboardInterrupt):
        audit(file, progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(file, tmp_path / "out", dtype="f16", progress=interrupt)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_an_interrupt_without_a_callback_cancels(tmp_path: Path) -> None:
    file = safetensors_file.write_zeros(tmp_path / "model.safetensors", "x", 256 * MANY)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        audit(file)
    timer.join()


def test_an_exception_of_the_callback_cancels_and_is_raised(tmp_path: Path) -> None:
    file = safetensors_file.write_zeros(tmp_path / "model.safetensors", "x", MANY)

    def refuse(phase: str, done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        convert(file, tmp_path / "out", dtype="f16", progress=refuse)
    assert not (tmp_path / "out").exists()


def test_a_call_that_is_cancelled_after_its_work_is_complete_publishes_nothing(
    release: Path, tmp_path: Path
) -> None:
    def refuse(phase: str, done: int, total: int) -> None:
        time.sleep(1)  # the work, a few files, is complete after that
        raise RuntimeError("enough")

    calls: list[Callable[[], Report]] = [
        lambda: convert(release, tmp_path / "folder", dtype="f16", progress=refuse),
        lambda: convert(release, tmp_path / "file.safetensors", progress=refuse),
        lambda: repair(release, tmp_path / "folder", original=release, progress=refuse),
        lambda: lab.run(
            policies=["f32"], tokens=8, no_gradients=True, out=tmp_path / "folder", progress=refuse
        ),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="enough"):
            call()
        assert list(tmp_path.iterdir()) == []


def test_progress_is_reported_before_the_result_is_in_place(release: Path, tmp_path: Path) -> None:
    there = []
    convert(release, tmp_path / "out", progress=lambda *_: there.append((tmp_path / "out").exists()))
    assert there and not any(there)


def test_a_forked_process_is_refused_instead_of_waiting_forever(release: Path) -> None:
    code = (
        "import os, sys\n"
        "from ballast.checkpoint import audit\n"
        "first = os.fork()\n"  # before any use: allowed
        "if first == 0: audit(sys.argv[1]); os._exit(0)\n"
        "assert os.waitpid(first, 0)[1] == 0\n"
        "audit(sys.argv[1])\n"
        "second = os.fork()\n"
        "if second == 0:\n"
        "    try: audit(sys.argv[1])\n"
        "    except ValueError as error: os._exit(7 if 'spawn' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) == 7\n"
    )
    subprocess.run([sys.executable, "-c", code, str(release)], check=True, timeout=60)


def test_the_package_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, ballast\n"
        "from ballast import checkpoint, contract, errors, lab, trace\n"
        "assert ballast.lab is lab and 'lab' in dir(ballast)\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ballast.nothing  # noqa: B018
