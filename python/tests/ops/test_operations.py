"""One signature per operation: torch's schema, the native function and the public functions agree."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import test_behavior
import test_derivatives
import test_references
import torch

from ballast import ops, testing
from ballast._native import ops as native
from ballast.ops._operation import OPERATIONS, Operation, gradient

NATIVE = {name: getattr(native, name) for name in dir(native) if not name.startswith("_")}

# Inputs that the native function does not take, because an output has them as its size or its first value.
SHOWN_BY_OUTPUTS = {
    "causal_conv": {"final"},
    "gated_delta_rule": {"final", "save"},
    "gated_delta_rule_steps": {"h0"},
    "indexer_loss": {"save"},
    "indexer_topk": {"topk"},
    "linear_cross_entropy": {"save", "save_weight"},
}

REFERENCES = {
    "attention": testing.attention_reference,
    "causal_conv1d_fn": testing.causal_conv1d_reference,
    "chunk_gated_delta_rule": testing.gated_delta_rule_reference,
    "gated_rms_norm": testing.gated_rms_norm_reference,
    "indexer_loss": testing.indexer_loss_reference,
    "indexer_topk": testing.indexer_topk_reference,
    "linear_cross_entropy": testing.linear_cross_entropy_reference,
}


def native_name(name: str) -> str:
    name = name.replace("causal_conv", "conv")
    return name if name in NATIVE else f"{name}_forward"


@pytest.mark.parametrize(("name", "operation"), OPERATIONS.items(), ids=OPERATIONS)
def test_the_native_function_takes_the_outputs_and_then_the_inputs(name: str, operation: Operation) -> None:
    shown = SHOWN_BY_OUTPUTS.get(name, set())
    expected = [*operation.outputs, *(x for x in operation.inputs if x not in shown), "threads"]
    assert list(inspect.signature(NATIVE[native_name(name)]).parameters) == expected
    assert len(operation.outputs) == len(operation.schema.returns)


def test_every_native_function_is_an_operation() -> None:
    assert {native_name(name) for name in OPERATIONS} == NATIVE.keys()


def test_a_backward_takes_what_forward_has_and_gives_gradients_of_inputs() -> None:
    for name, operation in OPERATIONS.items():
        if backward := OPERATIONS.get(f"{name}_backward"):
            has = {*operation.inputs, *operation.outputs, *map(gradient, operation.outputs)}
            assert backward.inputs.keys() <= has, name
            assert set(backward.outputs) <= set(map(gradient, operation.inputs)), name


def test_only_a_backward_and_what_selects_or_decodes_has_no_derivative() -> None:
    backwards = {f"{name}_backward" for name in OPERATIONS} & OPERATIONS.keys()
    without = {name for name, operation in OPERATIONS.items() if operation.derivative is None}
    assert without == backwards | {"gated_delta_rule_steps", "indexer_topk"}


def test_every_operation_has_the_outputs_that_its_fake_kernel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def record(name: str) -> None:
        original = getattr(torch.ops.ballast, name)

        def recorded(*arguments: Any) -> Any:
            calls.append((name, arguments))
            return original(*arguments)

        monkeypatch.setattr(torch.ops.ballast, name, recorded)

    for name in OPERATIONS:
        record(name)
    for operation, shape in test_derivatives.CASES:
        scalar, given = test_derivatives.problem(operation, shape)
        scalar(given)
        test_derivatives.reverse(scalar, given)
    q, k, w = (testing.values(shape).float() for shape in ([1, 9, 2, 4], [1, 9, 4], [1, 9, 2]))
    ops.indexer_topk(q, k, w, 3)
    monkeypatch.undo()
    assert {name for name, _ in calls} == OPERATIONS.keys()
    for name, arguments in calls:
        detached = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(torch.ops.ballast, name).default, detached, test_utils=checks)


def test_every_public_operation_is_compared_with_a_reference() -> None:
    # The others have the reference and the derivative of the operation that they call.
    derived = {"causal_conv1d_update", "fused_recurrent_gated_delta_rule"}
    assert {name for name, _ in test_references.CASES} | derived | {"indexer_topk"} == set(ops.__all__)
    differentiable = {name for name, _ in test_derivatives.CASES}
    assert differentiable | {"causal_conv1d_update", "indexer_topk"} == set(ops.__all__)
    assert {name for name, _ in test_behavior.CASES} == {name for name, _ in test_references.CASES}
    for name, reference in REFERENCES.items():
        public = list(inspect.signature(getattr(ops, name)).parameters)
        found = list(inspect.signature(reference).parameters)
        assert found == [x for x in public if x in found], name


@pytest.mark.parametrize("function", [ops.attention, ops.causal_conv1d_fn])
def test_an_overload_has_the_signature_of_its_function(function: Any) -> None:
    module = ast.parse(Path(inspect.getfile(function)).read_text(encoding="utf-8"))
    written = [x for x in module.body if isinstance(x, ast.FunctionDef) and x.name == function.__name__]
    assert len(written) == 3
    stated = [
        [
            (x.arg, ast.unparse(x.annotation))
            for x in node.args.args + node.args.kwonlyargs
            if x.arg not in ("return_lse", "return_final_states")
        ]
        for node in written
    ]
    assert stated[0] == stated[1] == stated[2]
