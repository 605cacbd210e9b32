"""The table of the contract on the module trees of transformers."""

from __future__ import annotations

import importlib.util
import json
import re
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from ballast.contract import Policy
from ballast.errors import BallastWarning
from ballast.torch import Ledger, keep_fp32
from ballast.torch.tensors import protected_tensors

ROOT = Path(__file__).parents[3]
BUILT = [
    "kimi_linear",
    "bailing_hybrid",
    "olmo_hybrid",
    "qwen4_exp",
    "mamba",
    "mamba2",
    "lfm2_moe",
    "minimax",
    "flint",
]


@pytest.fixture(scope="module")
def make() -> ModuleType:
    """The script that writes the lists of the authors into the table."""
    spec = importlib.util.spec_from_file_location("make", ROOT / "fixtures/contract/make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_has_every_strict_list_of_the_installed_transformers(make: ModuleType) -> None:
    strict = Policy.named("strict")
    lists = make.lists()
    missing = []
    for folder, entries in lists.items():
        classes = make.classes(folder)
        heads = [c for c in classes if c.__name__.endswith(("ForCausalLM", "ForConditionalGeneration"))]
        for model_type in {c.config_class.model_type for c in heads or classes} - {""}:
            policy = strict.for_architecture({"model_type": model_type})
            lacks = [entry for entry in entries if policy.protects(f"m.{entry}.weight") is None]
            missing += [f"{model_type}: {entry}" for entry in lacks]
    assert len(lists) >= 35
    assert not missing, f"{missing}: run fixtures/contract/make.py with this transformers"


@pytest.mark.parametrize("folder", BUILT)
def test_a_cast_of_the_module_tree_leaves_the_tensors_of_the_table_in_f32(
    make: ModuleType, folder: str
) -> None:
    rows = json.loads((ROOT / "fixtures/contract/models.json").read_text())["models"]
    wanted = next(set(row["f32"]) for row in rows if row["folder"] == folder)
    model = make.built(folder)[0]
    kept = keep_fp32(model)
    model.bfloat16()
    kept.verify()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {
        re.sub(r"\.\d+(?=\.|$)", ".*", name)
        for name, tensor in tensors.items()
        if tensor.dtype == torch.float32 and not name.endswith("inv_freq")
    }
    assert found == wanted


def test_a_part_of_a_new_architecture_is_found_by_structure() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A_log = nn.Parameter(torch.tensor([0.1, 0.2]))
            self.dt_bias = nn.Parameter(torch.tensor([0.3, 0.7]))
            self.conv1d = nn.Conv1d(4, 4, 4, groups=4)

    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"ssm": Mixer()})])})
    rules = {tensor.name: tensor.rule.name for tensor in protected_tensors(model)}
    assert rules == {
        "layers.0.ssm.A_log": "structure-a-log",
        "layers.0.ssm.dt_bias": "structure-dt-bias",
    }
    keep_fp32(model)
    assert model.bfloat16()["layers"][0]["ssm"].A_log.dtype == torch.float32


def test_a_model_without_protected_tensors_is_a_warning_that_says_why() -> None:
    with pytest.warns(BallastWarning, match="no tensor is protected: the model has no config"):
        keep_fp32(nn.Linear(2, 2))
    llama = nn.Linear(2, 2)
    llama.config = type("Config", (), {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})()
    with pytest.warns(BallastWarning, match="LlamaForCausalLM is not in the table of architectures"):
        keep_fp32(llama)
    with pytest.warns(BallastWarning, match="no tensor is protected"):
        Ledger().attach(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keep_fp32(nn.Linear(2, 2), policy="none")
