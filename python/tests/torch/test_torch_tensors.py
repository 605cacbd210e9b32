"""Which tensors of a model are protected, whatever wraps it."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch_support import protected, tiny_model

from ballast.contract import Policy
from ballast.torch.tensors import plain_name, protected_tensors, rounded_to

NAMES = set(protected(tiny_model()))


def names_of(model: nn.Module) -> set[str]:
    return {t.name for t in protected_tensors(model) if not t.name.endswith("inv_freq")}


@pytest.mark.parametrize(
    "prefix",
    ["", "module.", "_orig_mod.", "_fsdp_wrapped_module.", "module._orig_mod.module.", "base_model.model."],
)
def test_names_lose_the_prefixes_of_wrappers(prefix: str) -> None:
    assert plain_name(f"{prefix}model.layers.0.linear_attn.A_log") == "model.layers.0.linear_attn.A_log"


def test_names_lose_the_segments_of_wrappers_inside() -> None:
    inside = "model.layers.0._checkpoint_wrapped_module.linear_attn.norm.base_layer.weight"
    assert plain_name(inside) == "model.layers.0.linear_attn.norm.weight"
    assert plain_name("linear_attn.norm.original_module.weight") == "linear_attn.norm.weight"


def test_the_protected_tensors_are_found_in_every_wrapper() -> None:
    model = tiny_model()
    assert names_of(model) == NAMES
    assert names_of(nn.DataParallel(model)) == NAMES
    assert names_of(torch.compile(model)) == NAMES
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["out_proj"], r=2))
    assert names_of(adapted) == NAMES
    config = LoraConfig(target_modules=["out_proj"], modules_to_save=["norm"], r=2)
    assert names_of(get_peft_model(copy.deepcopy(model), config)) == NAMES


def test_a_part_of_a_model_has_the_names_of_the_part() -> None:
    layer = tiny_model().model.layers[0]
    parts = {"linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"}
    assert names_of(layer) == parts
    assert names_of(layer.linear_attn) == {"A_log", "dt_bias", "norm.weight"}


def test_the_rules_are_those_of_the_models_architecture() -> None:
    model = tiny_model()
    model.model.layers[0].mlp.gate = nn.Linear(2, 2)
    assert Policy.named("strict").protects("model.layers.0.mlp.gate.weight") is not None, "a rule of Ernie"
    assert names_of(model) == NAMES


def test_the_policy_decides() -> None:
    model = tiny_model()
    kinds = {
        policy: {t.name.split("linear_attn.")[-1] for t in protected_tensors(model, policy)}
        for policy in ("megatron", "nemo", "none")
    }
    assert kinds == {"megatron": {"A_log", "norm.weight"}, "nemo": {"A_log", "dt_bias"}, "none": set()}


def test_a_tensor_is_found_by_name_after_it_was_replaced() -> None:
    model = tiny_model()
    found = protected_tensors(model)[0]
    before = found.tensor
    model.to("meta")
    assert found.tensor is not before
    assert found.tensor.is_meta


def test_rounded_means_bf16_values_and_no_constant() -> None:
    assert rounded_to(torch.tensor([1.0, 2.0])) == "bf16"
    assert rounded_to(torch.tensor([1.0, 1.0])) is None
    assert rounded_to(torch.tensor([1.0, 1.0 + 2**-20])) is None
    assert rounded_to(torch.empty(0)) is None


def test_values_of_fewer_bits_are_recognized() -> None:
    drawn = torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 8 - 4
    assert rounded_to(drawn) is None
    for dtype, kind in [
        (torch.bfloat16, "bf16"),
        (torch.float16, "f16"),
        (torch.float8_e4m3fn, "bf16"),
        (torch.float8_e5m2, "bf16"),
    ]:
        assert rounded_to(drawn.to(dtype).float()) == kind
    assert rounded_to(drawn.half().float() * 2**-40) == "tf32"
    with_nan = torch.cat([drawn.half().float(), torch.tensor([float("nan")])])
    assert rounded_to(with_nan) == "f16"
