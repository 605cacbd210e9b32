"""Checkpoints in torch's formats, written by Ballast and read by torch."""

import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch_support import ROOT

from ballast.checkpoint import convert

MODELS = ROOT / "fixtures" / "models"


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("model", ["qwen3_5", "gemma3", "deepseek_v32"])
def test_distributed_checkpoints_load_with_the_same_bits(model: str, tmp_path: Path) -> None:
    convert(MODELS / model, tmp_path / "dcp", format="dcp")
    expected = load_file(MODELS / model / "model.safetensors")
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=tmp_path / "dcp")
    assert_equal(found, expected)


def test_legacy_files_load_with_the_same_bits(tmp_path: Path) -> None:
    source = MODELS / "qwen3_5_moe"
    convert(source, tmp_path / "torch", layout="megatron", format="torch", tp=2)
    convert(source, tmp_path / "safetensors", layout="megatron", tp=2)
    for rank in ("mp_rank_00", "mp_rank_01"):
        file = tmp_path / "torch" / "release" / rank / "model_optim_rng.pt"
        assert zipfile.ZipFile(file).testzip() is None
        saved = torch.load(file, weights_only=False)
        assert saved["args"].tensor_model_parallel_size == 2
        assert saved["args"].expert_model_parallel_size == 1
        assert saved["checkpoint_version"] == 3.0
        expected = load_file(tmp_path / "safetensors" / rank / "model.safetensors")
        extra = [name for name in saved["model"] if name.endswith("._extra_state")]
        assert all(saved["model"].pop(name).numel() == 0 for name in extra)
        assert_equal(saved["model"], expected)
