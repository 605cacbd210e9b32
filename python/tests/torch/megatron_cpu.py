"""Lets the GatedDeltaNet layer of the real megatron-core run on a CPU.

Real: megatron.core, its parallel linear layers, GatedDeltaNet and Float16Module. Stand-ins: the kernels of
flash-linear-attention (those of transformers), the norm of Transformer Engine, and three calls of torch.cuda.
Import it before megatron.
"""

# ruff: noqa: E402 (the stand-ins come first)

from __future__ import annotations

import contextlib
import os
import sys
import types
from importlib.machinery import ModuleSpec

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5


def _stand_in(name: str, **contents: object) -> None:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__path__ = []
    vars(module).update(contents)
    sys.modules[name] = module


for name in ("fla", "fla.modules", "fla.ops"):
    _stand_in(name)
_stand_in("fla.modules.l2norm", l2norm=lambda x: qwen3_5.l2norm(x.float(), dim=-1).to(x.dtype))
_stand_in("fla.ops.gated_delta_rule", chunk_gated_delta_rule=qwen3_5.torch_chunk_gated_delta_rule)
torch.cuda.current_device = lambda: torch.device("cpu")

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig

CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()


class Norm(nn.Module):
    """Transformer Engine's RMSNorm, zero-centered: computed in f32, returned in the weight's dtype."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1 + self.weight.float())).to(self.weight.dtype)


class Decoder(nn.Module):
    """Linear-attention layers with the names of a Megatron model: `decoder.layers.N.self_attention`."""

    def __init__(self, config: TransformerConfig, layers: int) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(nn.Module() for _ in range(layers))
        for number, layer in enumerate(self.decoder.layers, 1):
            layer.self_attention = gated_delta_net(config, number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.decoder.layers:
            x = x + layer.self_attention(x, None)[0]
        return x


def initialize(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=url, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def configuration(hf: dict[str, object]) -> TransformerConfig:
    """The configuration of a Qwen3.5 text model, in bf16 as Megatron trains it."""
    return TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        linear_conv_kernel_dim=hf["linear_conv_kernel_dim"],
        linear_key_head_dim=hf["linear_key_head_dim"],
        linear_value_head_dim=hf["linear_value_head_dim"],
        linear_num_key_heads=hf["linear_num_key_heads"],
        linear_num_value_heads=hf["linear_num_value_heads"],
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
    )


def gated_delta_net(config: TransformerConfig, number: int = 1) -> GatedDeltaNet:
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return GatedDeltaNet(config, parts, layer_number=number, pg_collection=groups)
