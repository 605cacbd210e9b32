"""The GatedDeltaNet of the real megatron-core in Float16Module."""

import importlib.util
import json
import os
from typing import Any

import pytest
from torch_support import run_ranks

if importlib.util.find_spec("megatron") is None and os.environ.get("BALLAST_REQUIRE_TORCH") != "1":
    pytest.skip("megatron-core is not installed", allow_module_level=True)


Results = dict[str, Any]


@pytest.fixture(scope="module")
def results() -> Results:
    output = run_ranks("megatron_cases.py", ranks=1, limit=240)
    return json.loads(output.split("RESULT ")[1])


BF16, F32 = "bfloat16", "float32"


@pytest.mark.parametrize("when", ["after", "before"])
def test_plain_megatron_loses_the_bits_without_a_warning(results: Results, when: str) -> None:
    plain = results[f"plain, loaded {when}"]
    assert plain["constructed"] == [BF16] * 3
    assert plain["wrapped"] == [BF16] * 3
    assert plain["errors"]["A_log"] > 3e-3
    assert plain["errors"]["out_norm.weight"] > 1e-3
    assert plain["warnings"] == 0


def test_parameters_that_are_made_in_f32_are_lowered_by_the_wrapper(results: Results) -> None:
    assert results["published change"] == [F32, BF16, F32, BF16, BF16, BF16]


def test_a_dtype_that_is_restored_after_wrapping_has_lost_its_bits(results: Results) -> None:
    after, before = results["restored, loaded after"], results["restored, loaded before"]
    assert after["wrapped"] == before["wrapped"] == [F32, BF16, F32]
    assert set(after["errors"].values()) == {0.0}
    assert before["errors"]["A_log"] > 3e-3
    assert before["errors"]["out_norm.weight"] > 1e-3


@pytest.mark.parametrize(
    ("case", "dtypes"),
    [
        ("strict, loaded after", [F32, F32, F32]),
        ("strict, loaded before", [F32, F32, F32]),
        ("megatron, loaded after", [F32, BF16, F32]),
    ],
)
def test_kept_tensors_are_f32_with_all_bits_after_wrapping_loading_and_training(
    results: Results, case: str, dtypes: list[str]
) -> None:
    kept = results[case]
    assert kept["wrapped"] == dtypes
    assert set(kept["errors"].values()) == {0.0}, "every tensor has the bits of the converted file"
    assert kept["same keys"]
    assert kept["trained"] == dtypes
    assert kept["moved"] == {"A_log": True, "out_norm.weight": True}
    assert kept["beyond bf16"] == {"A_log": True, "out_norm.weight": True}
    assert kept["ledger"].endswith("protected tensors: f32 for 3/3 steps")


def test_the_layer_alone_is_recognized(results: Results) -> None:
    assert results["layer alone"] == [F32] * 3


def test_megatron_loads_a_distributed_checkpoint_of_ballast(results: Results) -> None:
    assert results["distributed"] == {"loaded": 18, "equal": 18}
