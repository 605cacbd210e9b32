"""Tiny models, golden files, and processes for the tests of ballast.torch."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

ROOT = Path(__file__).resolve().parents[3]
RELEASE = ROOT / "fixtures" / "release" / "qwen3_5"
HERE = Path(__file__).resolve().parent


def release_tensors() -> dict[str, torch.Tensor]:
    """The tensors of a file in the form of a release: A_log and norm F32, dt_bias and the rest BF16."""
    index = json.loads((RELEASE / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    return {name: tensor for file in files for name, tensor in load_file(RELEASE / file).items()}


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}


def tiny_model(seed: int = 0) -> Qwen3_5ForCausalLM:
    """A Qwen3.5 in f32 whose protected tensors all have f32 bits, 68 values in all."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        vocab_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_protected(name):
                parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
    return model


def is_protected(name: str) -> bool:
    """The names that the policy strict protects in Qwen3.5, written again."""
    return name.endswith(("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight"))


def protected(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if is_protected(name)}


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the protected tensors, to compare with later."""
    return {name: copy.deepcopy(p.detach()) for name, p in protected(model).items()}


def assert_bits(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Every protected tensor is f32 and has the bits of `expected`."""
    found = protected(model)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32, f"{name} is {tensor.dtype}"
        same = torch.equal(tensor.detach().view(torch.int32), expected[name].view(torch.int32))
        assert same, f"{name} has other bits"


def assert_rounded(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """No protected tensor has the bits of `expected`: what plain torch does."""
    for name, tensor in protected(model).items():
        assert not torch.equal(tensor.detach().float(), expected[name]), f"{name} was not rounded"


def batch(rows: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * length).reshape(rows, length) * 7 % 64
    return {"input_ids": ids, "labels": ids}


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(10) * (index + 3) % 64
        return {"input_ids": ids, "labels": ids}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_rank() -> None:
    """Ends the process of a rank that has printed its results, without the end of the interpreter.

    A rank was sometimes aborted at its end ("terminate called without an active exception"), after all
    results were printed: a thread of torch that needs Python while it ends is stopped in a C++ function.
    """
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(script: str, *arguments: object, ranks: int = 2, limit: float = 300) -> str:
    """Runs a script of this folder in processes of one group, and returns the first one's output."""
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "ignore", str(HERE / script), *map(str, arguments)]
    processes = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + limit
    try:
        outputs = [process.communicate(timeout=max(1, end - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{output[-6000:]}"
    return outputs[0]
