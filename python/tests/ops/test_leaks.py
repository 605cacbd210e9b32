"""`ballast.testing.assert_no_leak`: each planted leak is found and named, and right models pass."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import leak_models as small
import pytest
import torch
from torch import nn

from ballast import testing
from ballast.errors import UsageError

CONV, STATE, ATTENTION = "convolution window", "recurrent state", "attention"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are too small for threads, which would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(*layers: Any, **options: Any) -> small.Model:
    torch.manual_seed(1)
    return small.Model(*layers, **options)


def leaks_of(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    return [str(leak) for leak in testing.find_leaks(model, *args, **kwargs).leaks]


PARTS = (small.Conv, small.Shifts, small.Memory, small.Fused, small.Mixing, small.Scaled, small.Centered)


def test_a_model_without_leaks_passes() -> None:
    model = made(*(partial(part, leaks=False) for part in PARTS))
    assert all(p.grad is None for p in model.parameters())
    report = testing.assert_no_leak(model)
    assert report.ok and len(report.outputs) == 4 and max(report.outputs) < 1e-6
    assert report.gradients.keys() == dict(model.named_parameters()).keys()
    assert max(report.gradients.values()) < 1e-5
    assert all(p.grad is None for p in model.parameters()), "gradients were written to"
    assert str(report).startswith("no leak; 4 sequences of 9, 70, 1, 17 tokens\n")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (small.Conv, f"layers.1.inner.kernel: tokens 0 to 2 of sequence 1 depend on sequence 0 ({CONV})"),
        (small.Shifts, f"layers.1.inner: tokens 0 to 2 of sequence 1 depend on sequence 0 ({CONV})"),
        (small.Memory, rf"layers.1.inner: tokens 0 to \d+ of sequence 1 depend on sequence 0 ({STATE})"),
        (small.Fused, rf"layers.1.inner: tokens 0 to \d+ of sequence 1 depend on sequence 0 ({STATE})"),
        (small.Mixing, f"layers.1.inner: tokens 0 to 69 of sequence 1 depend on sequence 0 ({ATTENTION})"),
        (small.Centered, "layers.1.inner: tokens 0 to 69 of sequence 1 depend on sequence 0 (cause not rec"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_leak_is_named_with_its_module_tokens_and_kind(part: Any, expected: str) -> None:
    first, last = partial(small.Mixing, leaks=False), partial(small.Conv, leaks=False)
    model = made(first, partial(part, leaks=True), last)
    [leak] = leaks_of(model)
    assert re.match(expected.replace("(", r"\(").replace(")", r"\)"), leak), leak
    with pytest.raises(AssertionError, match=re.escape("leak into each other; 4 sequences of 9, 70, 1, 17")):
        testing.assert_no_leak(model)


def test_every_leak_is_named_not_only_the_first() -> None:
    parts = (small.Conv, small.Memory, small.Mixing, small.Shifts, small.Conv)
    found = leaks_of(made(*(partial(part, leaks=n != 2) for n, part in enumerate(parts)), restart=False))
    where = [(leak.split(":")[0], leak[leak.rindex("(") + 1 : -1]) for leak in found]
    assert where == [
        ("layers.0.inner.kernel", CONV),
        ("layers.1.inner", STATE),
        ("layers.3.inner", CONV),
        ("layers.4.inner.kernel", CONV),
        ("positions", "positions that do not restart"),
    ]


def test_positions_that_do_not_restart_are_named() -> None:
    model = made(partial(small.Mixing, leaks=False), restart=False)
    [leak] = testing.find_leaks(model).leaks
    assert (leak.module, leak.kind, leak.source) == ("positions", "positions", None)
    assert "differs from the same sequence alone by" in str(leak)


class Both(nn.Module):
    """A convolution and a recurrence in one module, as linear attention has them."""

    def __init__(self, width: int, conv: bool, state: bool) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(width, width, 4, groups=width)
        self.decay, self.leaks = nn.Parameter(torch.zeros(width)), (conv, state)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        parts = []
        for part in [x] if self.leaks[0] else small.parts_of(x, numbers):
            padded = nn.functional.pad(part.mT, (3, 0))
            weight = self.conv1d.weight
            parts.append(torch.conv1d(padded, weight, self.conv1d.bias, groups=x.shape[2]).mT)
        mixed = nn.functional.silu(torch.cat(parts, dim=1))
        return small.scan(mixed * self.decay.sigmoid(), numbers, self.leaks[1])


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_a_convolution_and_a_state_in_one_module_are_told_apart(conv: bool, state: bool) -> None:
    kinds = {
        (leak.module, leak.kind)
        for leak in testing.find_leaks(made(partial(Both, conv=conv, state=state))).leaks
    }
    expected = {("layers.0.inner.conv1d", "convolution")} if conv else set()
    assert kinds == expected | ({("layers.0.inner", "state")} if state else set())


def test_a_leak_that_is_only_in_backward_is_named() -> None:
    quiet = partial(small.Mixing, leaks=False)
    model = made(quiet, partial(small.Fused, leaks=False, backward=True), quiet)
    report = testing.find_leaks(model)
    [leak] = report.leaks
    assert re.match(
        r"layers.1.inner: the gradient of tokens \d+ to 69 of sequence 1 depends on the loss of sequence 2 "
        r"\(recurrent state, backward only\)",
        str(leak),
    ), leak
    assert (leak.module, leak.direction) == ("layers.1.inner", "backward")
    assert max(report.outputs) < 1e-6 and max(report.gradients.values()) > 1e-2
    assert testing.find_leaks(model, gradients=False).ok


def test_a_gradient_of_a_parameter_that_mixes_sequences_is_named() -> None:
    model = made(partial(small.Scaled, leaks=True))
    [leak] = leaks_of(model)
    assert leak.startswith("layers.0.inner.gain: the gradient is not the sum of those of the sequences alone")


def test_a_leak_against_the_order_of_the_tokens_is_found() -> None:
    # Attention that is not causal: the last sequence reaches the first.
    model = made(partial(small.Mixing, leaks=True, causal=False))
    report = testing.find_leaks(model, lengths=(20, 9))
    assert [leak.kind for leak in report.leaks] == ["attention"]
    assert testing.find_leaks(made(partial(small.Mixing, leaks=False, causal=False))).ok


def test_a_leak_below_rounding_is_found() -> None:
    class Faint(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            return x + 3e-7 * x.roll(1, 1)

    report = testing.find_leaks(made(Faint))
    assert [(leak.module, leak.kind) for leak in report.leaks] == [("layers.0.inner", "convolution")]
    assert max(report.outputs) < report.limits[0]


def test_sequences_of_the_caller_and_features_instead_of_tokens() -> None:
    model = made(partial(small.Memory, leaks=True))
    assert leaks_of(model, [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11], torch.tensor([3, 3])])[0].startswith(
        "layers.0.inner: tokens 0 to 6 of sequence 1 depend on sequence 0"
    )

    class Features(nn.Module):
        def __init__(self, leaks: bool) -> None:
            super().__init__()
            self.inner = small.Fused(5, leaks=False, backward=leaks)

        def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> dict[str, torch.Tensor]:
            numbers = torch.bucketize(torch.arange(x.shape[1]), cu_seqlens, right=True)[None]
            return {"last_hidden_state": self.inner(x, numbers)}

    features = [torch.randn(n, 5) for n in (6, 31, 4)]
    assert testing.assert_no_leak(Features(False), features, pack="cu_seqlens").ok
    report = testing.find_leaks(Features(True), features, pack="cu_seqlens")
    assert [(leak.module, leak.direction) for leak in report.leaks] == [("inner", "backward")]


def test_a_pack_function_may_use_several_rows() -> None:
    def pack(sequences: list[torch.Tensor]) -> Any:
        ids, positions = torch.zeros(2, 30, dtype=torch.long), torch.zeros(2, 30, dtype=torch.long)
        places = [(0, 0), (0, 9), (1, 0), (1, 20)]
        for (row, start), x in zip(places, sequences, strict=True):
            ids[row, start : start + len(x)] = x
            positions[row, start : start + len(x)] = torch.arange(len(x))
        return {"input_ids": ids, "position_ids": positions}, places

    lengths = (9, 21, 20, 10)
    right = made(partial(small.Mixing, leaks=False), partial(small.Memory, leaks=False))
    assert testing.assert_no_leak(right, lengths=lengths, pack=pack).ok
    [leak] = leaks_of(made(partial(small.Memory, leaks=True)), lengths=lengths, pack=pack)
    assert re.match(r"layers.0.inner: tokens 0 to 1\d of sequence 1 depend on sequence 0 \(rec", leak)
    with pytest.raises(UsageError, match=r"let pack return \(keywords, "):
        testing.find_leaks(right, lengths=(9, 30, 21), pack=lambda x: pack([*x[:1], x[0], x[0], x[0]])[0])


def test_the_type_of_the_model_sets_the_limits() -> None:
    model = made(partial(small.Conv, leaks=False), partial(small.Mixing, leaks=False))
    wide = testing.assert_no_leak(model.double()).limits
    assert wide[0] < 1e-13 and testing.assert_no_leak(model.bfloat16()).limits[0] == pytest.approx(
        0.03, rel=0.1
    )
    assert testing.find_leaks(model, tolerance=0.5).limits == (0.5, 2.0)
    leaking = made(partial(small.Fused, leaks=True)).bfloat16()
    assert [leak.kind for leak in testing.find_leaks(leaking).leaks] == ["state"]


def test_what_cannot_be_tested_is_an_error() -> None:
    model = made(partial(small.Mixing, leaks=False))
    for given, message in (
        (dict(pack="positions"), "unknown packing 'positions'; use one or several of none, position_ids, "),
        (dict(sequences=[[1, 2]]), "a leak test needs at least 2 sequences"),
        (dict(output=lambda logits: None), r"no output \[batch, tokens, ...\] found; pass output="),
    ):
        with pytest.raises(UsageError, match=message):
            testing.find_leaks(model, **given)
    with pytest.raises(UsageError, match="the model has no vocabulary: pass sequences"):
        testing.find_leaks(nn.Linear(2, 2))
    model.layers.append(nn.Dropout(0.5))
    model.layers[-1].forward = lambda x, numbers: nn.functional.dropout(x, 0.5)  # type: ignore[assignment]
    with pytest.raises(UsageError, match="two runs of the same batch differ by .*; turn dropout off"):
        testing.find_leaks(model)


def test_the_model_is_as_it_was() -> None:
    class Counted(small.Memory):
        def __init__(self, width: int) -> None:
            super().__init__(width, leaks=True)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x, numbers)

    model = made(Counted).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    apply = torch.autograd.Function.__dict__["apply"]
    testing.find_leaks(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items()) and model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.autograd.Function.__dict__["apply"] is apply


FIXTURES = """
import torch

class Model(torch.nn.Module):
    def __init__(self, leaks):
        super().__init__()
        self.embed, self.leaks = torch.nn.Embedding(20, 4), leaks

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)
        before = x.roll(1, 1) if self.leaks else x.roll(1, 1) * (position_ids > 0)[..., None]
        return x + before

def test_right(assert_no_leak):
    assert_no_leak(Model(False), lengths=(5, 12))

def test_wrong(assert_no_leak):
    assert_no_leak(Model(True), lengths=(5, 12))

def test_kernel(assert_conforms):
    from ballast.ops import chunk_gated_delta_rule
    assert_conforms(chunk_gated_delta_rule, cases=["one token"])
    assert_conforms(lambda q, k, v, **given: (v, None), cases=["one token"])
"""


def test_the_fixtures_fail_with_the_report(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["ballast.testing.plugin"]', encoding="utf-8")
    (tmp_path / "test_fixtures.py").write_text(FIXTURES, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", "."]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert "2 failed, 1 passed" in out, out
    assert "- model: token 0 of sequence 1 depends on sequence 0 (convolution window)" in out
    assert "fails the conformance test of gated_delta:" in out
    assert "FAIL one token: dq: no gradient" in out and "Captured conformance call" in out


def test_only_the_plugin_needs_pytest() -> None:
    for path in Path(testing.__file__).parent.glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        names = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
        assert ("pytest" in names) == (path.name == "plugin.py"), path
