"""Convolution, gated RMSNorm and linear cross entropy in f64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ballast._torch import torch
from ballast.testing._inputs import Maker, spans

F = torch.nn.functional


# Convolution


def causal_conv1d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = "silu",
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """silu of the causal depthwise convolution in f64; x [B, C, T], weight [C, W], states [N, C, W-1]."""
    x, weight = x.double(), weight.double()
    before = weight.shape[1] - 1
    outputs, finals = [], []
    for n, (b, tokens) in enumerate(spans(x.transpose(1, 2), cu_seqlens)):
        state = x.new_zeros(x.shape[1], before) if initial_states is None else initial_states[n].double()
        row = torch.cat([state, x[b, :, tokens]], dim=-1)
        count = row.shape[-1] - before
        outputs.append(sum(weight[:, j : j + 1] * row[:, j : j + count] for j in range(before + 1)))
        finals.append(row[:, row.shape[-1] - before :])
    y = torch.cat(outputs, dim=-1) if cu_seqlens is not None else torch.stack(outputs)
    y = y.reshape(x.shape)
    y = F.silu(y) if activation in ("silu", "swish") else y
    return (y, torch.stack(finals)) if return_final_states else y


def causal_conv1d_inputs(
    make: Maker,
    batch: int = 1,
    tokens: int = 64,
    channels: int = 24,
    width: int = 4,
    initial_states: bool = False,
    lengths: Sequence[int] | None = None,
    **options: Any,  # noqa: ANN401
) -> dict[str, Any]:
    batch, tokens, sequences, packing = make.offsets(batch, tokens, lengths)
    tensors = {"x": make(batch, channels, tokens), "weight": make(channels, width)}
    if initial_states:
        tensors["initial_states"] = make(sequences, channels, width - 1)
    return {**tensors, **packing, "activation": "silu", **options}


# Gated RMSNorm


def gated_rms_norm_reference(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """x / sqrt(mean x^2 + eps) weight silu(z) in f64."""
    x, z, weight = x.double(), z.double(), weight.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight * F.silu(z)


def gated_rms_norm_inputs(make: Maker, rows: int = 12, width: int = 32, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    x, z = make(rows, width, low=-2.0, high=2.0), make(rows, width, low=-3.0, high=3.0)
    return {"x": x, "z": z, "weight": make(width, low=0.5, high=1.5, f32=True), **options}


# Linear cross entropy


def linear_cross_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross entropy of the projection in f64, with all logits in memory."""
    logits = hidden.double() @ weight.double().T
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    counted = targets != ignore_index
    logits, targets = logits[counted], targets[counted]
    total = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="sum")
    total = total + z_loss * torch.logsumexp(logits, dim=-1).square().sum()
    return total if reduction == "sum" else total / max(int(counted.sum()), 1)


def linear_cross_entropy_inputs(
    make: Maker,
    tokens: int = 40,
    width: int = 16,
    vocabulary: int = 50,
    **options: Any,  # noqa: ANN401
) -> dict[str, Any]:
    hidden, weight = make(tokens, width), make(vocabulary, width)
    targets = torch.arange(tokens, device=make.device) * 7919 % vocabulary
    return {"hidden": hidden, "weight": weight, "targets": targets, **options}
