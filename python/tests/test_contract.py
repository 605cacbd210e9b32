"""`ballast.contract`: policies, and the helpers of the `_fp32_params` convention."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ballast import BallastError
from ballast.contract import (
    FP32_GDN_PARAM_NAMES,
    GDN_FP32_CHECKPOINT_ARCHITECTURES,
    HOLDER_NAME,
    Policy,
    forced_gated_delta_net_fp32_dtype_mapping,
    has_gated_delta_net_fp32_checkpoint_contract,
    is_gated_delta_net_fp32_param_key,
    route_fp32_holder_key,
    strip_fp32_holder_key,
    upcast_gated_delta_net_fp32_state_tensor,
)
from ballast.errors import CheckFailed, InputError, UsageError

A_LOG = "model.layers.0.linear_attn.A_log"
DT_BIAS = "model.layers.0.linear_attn._fp32_params.dt_bias"
NORM = "model.layers.0.linear_attn.norm.weight"


@pytest.mark.parametrize(
    ("policy", "protected"),
    [
        ("strict", [True, True, True]),
        ("megatron", [True, False, True]),
        ("nemo", [True, True, False]),
        ("none", [False, False, False]),
    ],
)
def test_each_policy_protects_what_the_table_of_the_contract_says(policy: str, protected: list[bool]) -> None:
    rules = [Policy.named(policy).protects(name) for name in (A_LOG, DT_BIAS, NORM)]
    assert [rule is not None for rule in rules] == protected
    assert all(rule.dtype == "F32" and rule.reason for rule in rules if rule is not None)


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(UsageError, match="unknown policy `strictt`; use one of strict, megatron, nemo, none"):
        Policy.named("strictt")
    assert issubclass(UsageError, ValueError) and issubclass(UsageError, BallastError)


def test_a_policy_file_extends_a_policy(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_bytes(
        b"\xef\xbb\xbf"
        b'name = "ours"\nextends = "strict"\nremove = ["gdn-dt-bias"]\n'
        b'[[rule]]\nid = "gate-scale"\nreason = "multiplied by the position"\n'
        b'tensors = [{ module = "**.mlp", param = "gate_scale" }]\n'
    )
    policy = Policy.from_file(file)
    assert policy == Policy.load(file) == Policy.load(policy)
    rule = policy.protects("model.layers.3.mlp.gate_scale")
    assert rule is not None
    assert (rule.name, rule.reason) == ("gate-scale", "multiplied by the position")
    assert rule.tensors == ("**.mlp.gate_scale",)
    assert policy.protects(DT_BIAS) is None and policy.protects(A_LOG) is not None


def test_an_error_in_a_policy_file_has_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("name = 'x'\nrulez = []")
    with pytest.raises(UsageError, match="rulez") as caught:
        Policy.from_file(file)
    assert caught.value.file == file
    with pytest.raises(InputError, match="cannot read") as missing:
        Policy.from_file(tmp_path / "missing.toml")
    assert missing.value.file == tmp_path / "missing.toml"


def test_a_policy_is_reduced_to_an_architecture_by_config_or_names() -> None:
    policy, gate = Policy.named("strict"), "model.layers.1.mlp.gate.weight"
    assert policy.protects(gate) is not None
    config = SimpleNamespace(architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe")
    for reduced in (
        policy.for_architecture(config),
        policy.for_architecture({"text_config": {"model_type": "qwen3_5_moe_text"}}),
        policy.for_architecture(names=["model.layers.0.linear_attn.in_proj_qkv.weight"]),
    ):
        assert reduced.protects(gate) is None
        assert reduced.protects(A_LOG) is not None
    ernie = policy.for_architecture({"architectures": ["Ernie4_5_MoeForCausalLM"]})
    assert ernie.protects(gate) is not None and ernie.protects(A_LOG) is None


def test_a_policy_is_frozen_and_survives_copies_and_pickling() -> None:
    policy = Policy.named("nemo").for_architecture({"model_type": "qwen3_5"})
    for copied in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert copied == policy and hash(copied) == hash(policy)
        assert copied.protects(DT_BIAS) == policy.protects(DT_BIAS) is not None
        assert copied.protects(NORM) is None
    with pytest.raises(FrozenInstanceError):
        policy.name = "other"  # type: ignore[misc]


def test_an_exception_survives_pickling() -> None:
    error = CheckFailed("message", file="a.safetensors", tensor="t", byte=8)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.file) == ("message", Path("a.safetensors"))
    assert (copied.tensor, copied.byte) == ("t", 8)


def test_the_data_names_have_the_public_values() -> None:
    assert HOLDER_NAME == "_fp32_params"
    assert FP32_GDN_PARAM_NAMES == ("A_log", "dt_bias")
    assert GDN_FP32_CHECKPOINT_ARCHITECTURES == frozenset(
        {
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        }
    )


@pytest.mark.parametrize(
    ("key", "tracked", "routed", "stripped"),
    [
        ("m.linear_attn.A_log", True, "m.linear_attn._fp32_params.A_log", "m.linear_attn.A_log"),
        ("m.linear_attn._fp32_params.A_log", True, "m.linear_attn._fp32_params.A_log", "m.linear_attn.A_log"),
        (
            "a.linear_attn.b.linear_attn.dt_bias",
            True,
            "a.linear_attn.b.linear_attn._fp32_params.dt_bias",
            "a.linear_attn.b.linear_attn.dt_bias",
        ),
        ("m.linear_attn.A_log_extra", False, "m.linear_attn.A_log_extra", "m.linear_attn.A_log_extra"),
        ("m.linear_attn.conv1d.weight", False, "m.linear_attn.conv1d.weight", "m.linear_attn.conv1d.weight"),
        ("m.self_attn.A_log", False, "m.self_attn.A_log", "m.self_attn.A_log"),
        ("m.linear_attn.A_log.lora_A.weight", False, *2 * ("m.linear_attn.A_log.lora_A.weight",)),
        ("A_log", False, "A_log", "A_log"),
        # Different from the public helper, where any suffix counts.
        ("m.linear_attn.my_A_log", False, "m.linear_attn.my_A_log", "m.linear_attn.my_A_log"),
    ],
)
def test_keys_are_tracked_routed_and_stripped(key: str, tracked: bool, routed: str, stripped: str) -> None:
    assert is_gated_delta_net_fp32_param_key(key) is tracked
    assert route_fp32_holder_key(key) == routed
    assert strip_fp32_holder_key(key) == stripped
    assert strip_fp32_holder_key(route_fp32_holder_key(key)) == stripped


def test_other_parameter_names_can_be_given() -> None:
    key = "m.linear_attn.norm.weight"
    assert is_gated_delta_net_fp32_param_key(key, ("norm.weight",))
    routed = route_fp32_holder_key(key, param_names=("norm.weight",))
    assert routed == "m.linear_attn._fp32_params.norm.weight"
    assert not is_gated_delta_net_fp32_param_key("m.linear_attn.A_log", ("norm.weight",))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SimpleNamespace(architectures=["Qwen3NextForCausalLM"]), True),
        (SimpleNamespace(architectures=("LlamaForCausalLM", "Qwen3_5MoeForConditionalGeneration")), True),
        (SimpleNamespace(text_config=SimpleNamespace(architectures=["Qwen3_5ForCausalLM"])), True),
        ({"architectures": ["Qwen3_5ForCausalLM"]}, True),
        (SimpleNamespace(architectures=["LlamaForCausalLM"]), False),
        (SimpleNamespace(architectures=None), False),
        (SimpleNamespace(architectures=[]), False),
        (SimpleNamespace(architectures="Qwen3NextForCausalLM"), False),
        (SimpleNamespace(), False),
        (None, False),
    ],
)
def test_the_contract_is_recognized_by_architecture(config: object, expected: bool) -> None:
    assert has_gated_delta_net_fp32_checkpoint_contract(config) is expected


def test_a_tracked_tensor_is_upcast_with_its_bits_and_others_are_returned_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    values = torch.tensor([1.0, -3.140625, float("inf")])
    for dtype in (torch.bfloat16, torch.float16):
        up: Any = upcast_gated_delta_net_fp32_state_tensor(A_LOG, values.to(dtype))
        assert up.dtype == torch.float32
        assert torch.equal(up.view(torch.int32), values.to(dtype).float().view(torch.int32))
    other = values.bfloat16()
    for key, tensor in [(A_LOG, values), (A_LOG, torch.arange(3)), ("m.q_proj.weight", other), (A_LOG, 1.5)]:
        assert upcast_gated_delta_net_fp32_state_tensor(key, tensor) is tensor


def test_float64_and_float8_are_refused_not_cast() -> None:
    torch = pytest.importorskip("torch")
    wide = torch.tensor([0.1], dtype=torch.float64)
    with pytest.raises(CheckFailed, match="float64") as caught:
        upcast_gated_delta_net_fp32_state_tensor(A_LOG, wide)
    assert caught.value.tensor == A_LOG
    assert upcast_gated_delta_net_fp32_state_tensor(A_LOG, wide, narrow_f64=True).dtype == torch.float32
    with pytest.raises(CheckFailed, match="without its scale"):
        upcast_gated_delta_net_fp32_state_tensor(A_LOG, torch.ones(2).to(torch.float8_e4m3fn))


def test_export_is_forced_to_f32_for_tracked_floats_only() -> None:
    torch = pytest.importorskip("torch")
    state = {
        A_LOG: torch.ones(4),
        DT_BIAS: torch.ones(4, dtype=torch.bfloat16),
        "m.linear_attn.conv1d.weight": torch.ones(4),
        "m.self_attn.A_log": torch.ones(4),
        "m.linear_attn.dt_bias": torch.ones(4, dtype=torch.int64),
    }
    assert forced_gated_delta_net_fp32_dtype_mapping(state) == {A_LOG: "F32", DT_BIAS: "F32"}
