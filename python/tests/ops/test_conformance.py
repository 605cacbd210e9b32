"""`ballast.testing.conformance`: right kernels pass; each planted fault is named with its case and output."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from ballast import testing
from ballast.errors import CheckFailed, UsageError
from ballast.ops import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

torch_chunk = inspect.unwrap(qwen.torch_chunk_gated_delta_rule)
torch_steps = inspect.unwrap(qwen.torch_recurrent_gated_delta_rule)
kimi_chunk = inspect.unwrap(kimi.chunk_kimi_delta_attention)
kimi_steps = inspect.unwrap(kimi.recurrent_kimi_delta_attention)

UNPACKED = ("cu_seqlens", "scale")
"""Features that the rules of transformers do not have."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are too small for threads, which would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_the_chunked_operation_passes_every_case(dtype: torch.dtype) -> None:
    report = testing.conformance(chunk_gated_delta_rule, dtype=dtype)
    assert report.ok and report.skipped == () and len(report.cases) == 25, str(report)
    assert sum(len(case.results) for case in report.cases) == 177
    assert all(not case.skipped and case.results for case in report.cases)


def test_the_recurrent_operation_passes_token_by_token_and_with_gradients() -> None:
    assert testing.conformance(fused_recurrent_gated_delta_rule).ok
    steps = testing.conformance(fused_recurrent_gated_delta_rule, skip="gradients")
    assert steps.ok and {name for case in steps.cases for name in case.results} == {"o", "final_state"}


@pytest.mark.parametrize("rule", [torch_chunk, torch_steps])
def test_the_rules_of_transformers_pass_what_they_support(rule: Any) -> None:
    report = testing.conformance(rule, skip=UNPACKED)
    assert report.ok, str(report)
    left_out = {case.name: case.skipped for case in report.cases if case.skipped}
    assert left_out["scale"] == ("scale",) and left_out["packed"] == ("cu_seqlens",) and len(left_out) == 7
    # Undeclared, an ignored argument is an error and not a pass.
    assert not testing.conformance(rule, cases=["scale"]).ok


def test_the_rules_of_kimi_pass_what_they_support() -> None:
    skip = (*UNPACKED, "grouped_heads")
    report = testing.conformance(kimi_steps, "kda", skip=skip)
    assert report.ok and sum(len(case.results) for case in report.cases) == 120, str(report)
    some = ["one token", "states", "mixed decay"]
    assert testing.conformance(kimi_chunk, "kda", skip=skip, cases=some).ok


# Broken kernels


def clamped(q: Any, k: Any, v: Any, g: Any, **given: Any) -> Any:
    return chunk_gated_delta_rule(q, k, v, g=g.clamp(min=-5), **given)


def leaking(q: Any, k: Any, v: Any, g: Any, beta: Any, **given: Any) -> Any:
    offsets, state = given.pop("cu_seqlens", None), given.pop("initial_state", None)
    if offsets is None:
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=state, **given)
    outputs, states, last = [], [], 0.0
    for n, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        part = (x[:, start:end] for x in (q, k, v, g, beta))
        first = torch.zeros(1, v.shape[2], q.shape[3], v.shape[3]) if state is None else state[n : n + 1]
        o, last = chunk_gated_delta_rule(
            *part, **{**given, "output_final_state": True}, initial_state=first + last
        )
        outputs.append(o)
        states.append(last)
    return torch.cat(outputs, dim=1), torch.cat(states) if given["output_final_state"] else None


def wrong_groups(q: Any, k: Any, v: Any, **given: Any) -> Any:
    group = v.shape[2] // q.shape[2]
    return chunk_gated_delta_rule(q.repeat(1, 1, group, 1), k.repeat(1, 1, group, 1), v, **given)


def norm_without_eps(q: Any, k: Any, v: Any, use_qk_l2norm_in_kernel: bool, **given: Any) -> Any:
    if use_qk_l2norm_in_kernel:
        q, k = (x * x.square().sum(-1, keepdim=True).rsqrt() for x in (q, k))
    return chunk_gated_delta_rule(q, k, v, **given)


def frozen_state(q: Any, k: Any, v: Any, initial_state: Any, **given: Any) -> Any:
    state = None if initial_state is None else initial_state.detach()
    return chunk_gated_delta_rule(q, k, v, initial_state=state, **given)


class ZeroedState(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: torch.Tensor) -> torch.Tensor:
        return state.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient)


def zero_state_gradient(q: Any, k: Any, v: Any, initial_state: Any, **given: Any) -> Any:
    state = None if initial_state is None else ZeroedState.apply(initial_state)
    return chunk_gated_delta_rule(q, k, v, initial_state=state, **given)


def nan_in_heads(q: Any, k: Any, v: Any, **given: Any) -> Any:
    o, state = chunk_gated_delta_rule(q, k, v, **given)
    return o + 0 * o.sum(2, keepdim=True), state


def nan_in_sequences(q: Any, k: Any, v: Any, **given: Any) -> Any:
    o, state = chunk_gated_delta_rule(q, k, v, **given)
    return o + 0 * o.sum((0, 1), keepdim=True), state


class FastDecayForgotten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(g)
        return g.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (g,) = ctx.saved_tensors
        return torch.where(g < -5, 0.0, gradient)


def wrong_decay_gradient(q: Any, k: Any, v: Any, g: Any, **given: Any) -> Any:
    return chunk_gated_delta_rule(q, k, v, g=FastDecayForgotten.apply(g), **given)


def overwriting(q: Any, k: Any, v: Any, **given: Any) -> Any:
    results = chunk_gated_delta_rule(q, k, v, **given)
    v.data.mul_(2)
    return results


def raising(q: Any, k: Any, v: Any, **given: Any) -> Any:
    if q.shape[1] == 130:
        raise RuntimeError("T must be a multiple of 64")
    return chunk_gated_delta_rule(q, k, v, **given)


def stateless(q: Any, k: Any, v: Any, **given: Any) -> Any:
    return chunk_gated_delta_rule(q, k, v, **given)[0]


FAULTS: dict[Any, tuple[set[str], str]] = {
    clamped: (
        {"fast decay", "strong decay", "mixed decay"},
        "strong decay: o: relative RMS .* is above .*; worst of",
    ),
    leaking: (
        {"packed", "packed, no states", "empty sequence", *(f"NaN in {x}, packed" for x in "vkg")},
        r"packed: o: .*\(tests: a state that passes from one sequence to the next\)",
    ),
    wrong_groups: ({"grouped heads"}, "grouped heads: o: .*value head h uses key head"),
    norm_without_eps: ({"small norms"}, "small norms: o: .*got nan.*the eps of the l2norm"),
    frozen_state: ({"states", "packed", "empty sequence"}, "states: dinitial_state: no gradient"),
    zero_state_gradient: (
        {"states", "packed", "empty sequence"},
        "states: dinitial_state: relative RMS 1.00e[+]00 .* got 0, expected",
    ),
    nan_in_heads: (
        {f"NaN in {x}, {how}" for x in "vkg" for how in ("rows", "packed")},
        "NaN in v, packed: o: the NaN of v in head 0 of sequence 1 reaches head 1 of sequence 1; ",
    ),
    nan_in_sequences: (
        {f"NaN in {x}, {how}" for x in "vkg" for how in ("rows", "packed")},
        "NaN in k, rows: o: the NaN of k in head 0 of sequence 1 reaches head 0 of sequence 0; ",
    ),
    wrong_decay_gradient: ({"fast decay"}, "fast decay: dg: .*the gradient of g where the decay is fast"),
    raising: ({"ragged", "mixed decay"}, "ragged: RuntimeError: T must be a multiple of 64"),
}


@pytest.mark.parametrize("kernel", FAULTS, ids=lambda kernel: kernel.__name__)
def test_a_broken_kernel_is_named_with_its_case_and_output(kernel: Any) -> None:
    cases, message = FAULTS[kernel]
    report = testing.conformance(kernel)
    assert {case.name for case in report.cases if not case.ok} == cases, str(report)
    with pytest.raises(CheckFailed, match=f"(?s){kernel.__name__} fails .*FAIL {message}"):
        report.raise_if_failed()


def test_only_the_gradient_that_is_wrong_is_named() -> None:
    for kernel, name in ((zero_state_gradient, "dinitial_state"), (wrong_decay_gradient, "dg")):
        failed = {
            n for case in testing.conformance(kernel).cases for n, x in case.results.items() if not x.ok
        }
        assert failed == {name}


def test_a_missing_output_and_an_overwritten_input_fail() -> None:
    report = testing.conformance(stateless, cases=["one token"])
    assert report.failures[0].startswith("one token: final_state: the kernel returned none")
    assert testing.conformance(stateless, skip="final_state").ok
    report = testing.conformance(overwriting, cases=["one token"])
    assert report.failures[0].startswith("one token: the kernel overwrites its input v")


def mean_decay(q: Any, k: Any, v: Any, g: Any, **given: Any) -> Any:
    return chunk_gated_delta_rule(q, k, v, g=g.mean(-1), **given)


def overflowing(q: Any, k: Any, v: Any, g: Any, **given: Any) -> Any:
    """Divides by exp(G), which is 0 as soon as a channel has decayed by e^-104."""
    growth = g.cumsum(1)
    return kimi_steps(q, k, v * (growth.exp() / growth.exp()).mean(-1, keepdim=True), g=g, **given)


def test_faults_of_a_decay_per_channel_are_named() -> None:
    some = ["no decay", "short", "strong decay", "mixed decay"]
    report = testing.conformance(mean_decay, "kda", cases=some)
    wrong = {case.name: [n for n, x in case.results.items() if not x.ok] for case in report.cases}
    assert wrong["no decay"] == ["dg"] and wrong["strong decay"] == [] and "o" in wrong["mixed decay"]
    report = testing.conformance(overflowing, "kda", skip=UNPACKED, cases=some)
    assert [case.name for case in report.cases if not case.ok] == ["strong decay", "mixed decay"]
    assert "got nan" in report.failures[0]


def test_the_report_has_the_same_content_in_every_form() -> None:
    report = testing.conformance(clamped, cases=["one token", "strong decay", "scale"], skip="scale")
    document = json.loads(report.to_json())
    assert [case["ok"] for case in document["cases"]] == [True, False, True] and not document["ok"]
    assert document["cases"][2]["skipped"] == ["scale"] == document["skipped"]
    found = document["cases"][1]["results"]["o"]
    assert not found["ok"] and found["error"] > found["limit"] > 0
    markdown = report.to_markdown()
    assert "| case | o | final_state |" in markdown and f"| FAIL {found['error']:.1e} |" in markdown
    for text in (markdown, str(report)):
        assert "clamped, rule gated_delta, float32 on cpu" in text
        assert "skipped: scale (a scale other than K^-0.5); 1 of 3 cases left out" in text
        assert "FAILED: 1 of 2 cases failed, 14 comparisons" in text


def test_unknown_names_and_limits_of_the_caller() -> None:
    for given, message in (
        (dict(rule="delta"), "unknown rule 'delta'; use one of gated_delta, kda"),
        (dict(skip="states"), "unknown feature 'states'; use one of batch, "),
        (dict(cases=["states", "huge"]), "unknown case 'huge'; use one of one chunk, "),
    ):
        with pytest.raises(UsageError, match=message):
            testing.conformance(chunk_gated_delta_rule, **given)
    one = dict(cases=["one chunk"], key_dim=16, value_dim=8)
    assert testing.conformance(chunk_gated_delta_rule, **one).ok
    report = testing.conformance(chunk_gated_delta_rule, tolerance={"dq": 1e-9}, **one)
    assert [n for n, x in report.cases[0].results.items() if not x.ok] == ["dq"]
    assert not testing.conformance(chunk_gated_delta_rule, tolerance=1e-9, **one).ok


def test_a_kernel_without_l2norm_gets_normalized_keys() -> None:
    def plain(q: Any, k: Any, v: Any, use_qk_l2norm_in_kernel: bool, **given: Any) -> Any:
        assert not use_qk_l2norm_in_kernel
        return chunk_gated_delta_rule(q, k, v, **given)

    report = testing.conformance(plain, skip="l2norm")
    assert report.ok and [case.name for case in report.cases if case.skipped] == ["small norms"]
