"""FSDP2 on two gloo ranks: what plain torch does to protected tensors, and what ballast.torch does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_torch_load_save import audited
from torch_support import is_protected, run_ranks, saved_tensors, tiny_model

Results = dict[str, Any]
LOW, HIGH = "torch.bfloat16", "torch.float32"
COMPUTED = {
    "A_log": HIGH,
    "dt_bias": HIGH,
    "norm.weight": HIGH,
    "in_proj_a.weight": LOW,
    "conv1d.weight": LOW,
}
EQUAL = {"protected": 0.0, "rest": 0.0}
MIXED = "AssertionError: FSDP expects uniform original parameter dtype"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp2")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    output = run_ranks("fsdp2_cases.py", folder, limit=420)
    return json.loads(output.split("RESULT ")[1])


def test_plain_fsdp2_computes_protected_tensors_in_bf16_and_their_gradients_are_off(results: Results) -> None:
    plain = results["plain"]
    assert set(plain["computed"].values()) == {LOW}
    assert plain["worst"]["protected"] > 0.005


def test_plain_fsdp2_refuses_mixed_storage_in_a_unit(results: Results) -> None:
    assert results["plain mixed storage"].startswith(MIXED)


def test_ignored_parameters_are_never_reduced_and_cannot_be_clipped(results: Results) -> None:
    ignored = results["plain ignored"]
    assert ignored["computed"] == COMPUTED
    assert ignored["worst"]["protected"] > 1
    assert "mixed torch.Tensor and DTensor" in ignored["clip"]


def test_conv1d_as_a_unit_fails_because_it_is_never_called(results: Results) -> None:
    assert results["plain conv1d unit"].startswith("RuntimeError")


def test_list_units_are_equal_but_stay_gathered_until_the_end_of_forward(results: Results) -> None:
    units = results["plain list units"]
    assert units["computed"] == COMPUTED
    assert units["worst"] == EQUAL
    assert units["gathered"] == 2, "both layers: conv1d is never called, so its unit never ends"


def test_mp_policy_computes_in_f32_where_storage_is_f32(results: Results) -> None:
    assert results["override"]["computed"] == COMPUTED
    assert results["override"]["worst"] == EQUAL


def test_mp_policy_cannot_help_with_mixed_storage(results: Results) -> None:
    assert results["override mixed storage"].startswith(MIXED)


@pytest.mark.parametrize("case", ["ours f32", "ours cast first", "ours cast last"])
def test_fully_shard_computes_in_f32_with_the_gradients_of_the_unsharded_model(
    results: Results, case: str
) -> None:
    found = results[case]
    assert found["computed"] == COMPUTED
    assert found["worst"] == EQUAL
    rest = HIGH if case == "ours f32" else LOW
    assert found["stored"] == {"protected": [HIGH], "rest": [rest]}
    assert found["same bits"]
    assert found["norm"] > 0, "clip_grad_norm_ works"
    assert found["gathered"] == 0, "each layer is released after its forward"


def test_a_reduction_in_bf16_applies_to_the_rest_only(results: Results) -> None:
    worst = results["ours low reduction"]["worst"]
    assert worst["protected"] == 0.0
    assert worst["rest"] > 0.0


def test_layers_can_be_sharded_one_by_one(results: Results) -> None:
    assert results["ours by layer"]["computed"] == COMPUTED
    assert results["ours by layer"]["worst"] == EQUAL


def test_a_layer_that_holds_protected_tensors_itself(results: Results) -> None:
    worst, dtypes, refused = results["ours attention alone"]
    assert worst == str(EQUAL)
    assert dtypes == str([LOW, HIGH])
    assert "holds protected tensors beside bf16 ones: shard the layer around it" in refused


def test_a_model_that_was_lowered_is_refused(results: Results) -> None:
    assert "is bf16, expected f32: call keep_fp32 first" in results["ours unkept"]


def test_adapters_train_on_a_frozen_base_in_bf16(results: Results) -> None:
    expected = {"adapters": 10, "moved": 10, "stored": [HIGH], "same bits": True}
    assert results["adapted"] == expected


def test_a_model_made_without_values_gets_all_bits(results: Results) -> None:
    assert results["without values"] is True


def test_ddp_takes_mixed_dtypes(results: Results) -> None:
    assert results["replicated"] == {"stored": {"protected": [HIGH], "rest": [LOW]}, "worst": 0.0}


def test_every_family_trains_with_its_protected_tensors_in_f32(results: Results) -> None:
    families = results["families"]
    assert {error for error, *_ in families.values()} == {"none"}
    linear = ["linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"]
    for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        assert families[name][1:] == [linear, 9, 9]
    assert families["gemma4_moe"][1:] == [["router.proj.weight", "router.scale"], 12, 12]
    # The choice of keys has no gradient.
    assert families["deepseek_v32"][1:] == [["self_attn.indexer.weights_proj.weight"], 3, 0]


def test_training_gives_the_bits_of_the_unsharded_model(results: Results) -> None:
    assert results["trained"] == {
        "checkpointing False": {"other": [], "moved": True},
        "checkpointing True": {"other": [], "moved": True},
    }


@pytest.mark.parametrize("storage", ["f32", "bf16"])
def test_names_and_optimizer_keys_are_unchanged_and_a_reload_is_bit_equal(
    results: Results, storage: str
) -> None:
    assert results[f"dcp {storage}"] == {
        "same": True,
        "same optimizer state": True,
        "model keys": True,
        "optimizer keys": True,
        "stored": {"protected": [HIGH], "rest": [HIGH if storage == "f32" else LOW]},
        "optimizer state": [HIGH],
    }


def test_what_is_saved_has_the_bits_of_the_shards_and_passes_the_audit(
    results: Results, folder: Path
) -> None:
    saved = saved_tensors(folder)
    assert saved.keys() == tiny_model().state_dict().keys() - {"lm_head.weight"}
    for name, values in results["saved"].items():
        assert torch.equal(saved[name], torch.tensor(values))
    for name, tensor in saved.items():
        assert tensor.dtype == (torch.float32 if is_protected(name) else torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Qwen3_5ForCausalLM"], "bfloat16")
    audited(folder)


def test_the_ledger_sees_that_plain_fsdp2_computes_in_bf16(results: Results) -> None:
    lowered = results["ledger"]["lowered"]
    assert lowered.startswith("CheckFailed: step 1: rank 0")
    assert "forward read model.layers.0.linear_attn.A_log as bf16, expected f32" in lowered


def test_a_fault_on_one_rank_leaves_out_the_update_on_both(results: Results) -> None:
    found = results["ledger"]
    assert found["allowed"] == [True, False, True]
    site = "model.layers.1.mlp.down_proj is the first site with non-finite values (bf16, forward)"
    assert found["faults"][0] == f"step 2: rank 1: micro-batch 1: {site}"
    assert found["finite"]
    assert found["summary"] == "7 protected tensors: f32 for 2/2 steps"


def test_accelerate_computes_in_bf16_and_with_mp_policy_in_f32(results: Results) -> None:
    assert results["accelerated"]["kind"].endswith("MULTI_CPU"), "cpu=True ignores the FSDP plugin"
    plain, ours = results["accelerated"]["plain"], results["accelerated"]["ours"]
    assert plain["stored"] == ours["stored"] == {"protected": [HIGH], "rest": [HIGH]}
    assert set(plain["computed"].values()) == {LOW}
    assert ours["computed"] == COMPUTED
    assert ours["worst"] == EQUAL


def test_accelerate_raises_a_model_of_mixed_dtypes_to_f32_and_mp_policy_computes_it_rightly(
    results: Results,
) -> None:
    ours = results["accelerated"]["ours cast first"]
    assert ours["stored"] == {"protected": [HIGH], "rest": [HIGH]}
    assert ours["computed"] == COMPUTED
    assert ours["worst"] == EQUAL
    assert ours["same bits"]


def test_fsdp1_is_refused_before_and_after_it_wraps_a_model(results: Results) -> None:
    found = results["fsdp1"]
    for original in (False, True):
        kept = found[f"kept, {original}"]
        assert kept.startswith("UsageError: model.layers.0.linear_attn.")
        assert "would be sharded by FSDP1" in kept and "use FSDP2: ballast.torch.fully_shard" in kept
        assert found[f"wrapped, {original}"].startswith("UsageError: the model is sharded by FSDP1")
    for moment in ("released", "trained"):
        assert found[moment].startswith("CheckFailed: protected-tensor check failed: ")
        assert "A_log is a part of a tensor of FSDP1" in found[moment]
