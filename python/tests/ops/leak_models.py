"""A small model with one layer of each kind that can leak, and switches for planted faults."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Numbers = torch.Tensor
"""Number of the sequence of every token."""


def parts_of(x: torch.Tensor, numbers: Numbers) -> tuple[torch.Tensor, ...]:
    """The sequences of a row."""
    return x.split(numbers[0].unique_consecutive(return_counts=True)[1].tolist(), dim=1)


class Conv(nn.Module):
    """A causal convolution of 4 tokens, as a call of torch on the whole row, or one per sequence."""

    def __init__(self, width: int, leaks: bool) -> None:
        super().__init__()
        self.kernel = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.leaks = leaks

    def forward(self, x: torch.Tensor, numbers: Numbers) -> torch.Tensor:
        if self.leaks:
            return self.call(x)
        return torch.cat([self.call(part) for part in parts_of(x, numbers)], dim=1)

    def call(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.kernel.weight, self.kernel.bias
        y = torch.nn.functional.conv1d(x.mT, weight, bias, padding=3, groups=x.shape[2])
        return y[..., : x.shape[1]].mT


class Shifts(nn.Module):
    """The same by shifts, which reach across sequences before they are masked."""

    def __init__(self, width: int, leaks: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, width))
        self.leaks = leaks

    def forward(self, x: torch.Tensor, numbers: Numbers) -> torch.Tensor:
        total = x * self.weight[0]
        for shift in range(1, 4):
            before = torch.nn.functional.pad(x, (0, 0, shift, 0))[:, : x.shape[1]]
            there = torch.nn.functional.pad(numbers, (shift, 0), value=-1)[:, : x.shape[1]]
            if not self.leaks:
                before = before * (there == numbers)[..., None]
            total = total + before * self.weight[shift]
        return total


class Memory(nn.Module):
    """s = a s + x, token by token."""

    def __init__(self, width: int, leaks: bool) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.zeros(width))
        self.leaks = leaks

    def forward(self, x: torch.Tensor, numbers: Numbers) -> torch.Tensor:
        state, outputs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            if t > 0 and not self.leaks:
                state = state * (numbers[:, t] == numbers[:, t - 1])[:, None]
            state = self.decay.sigmoid() * state + x[:, t]
            outputs.append(state)
        return torch.stack(outputs, dim=1)


class FusedScan(torch.autograd.Function):
    """The same as one opaque function, whose forward or backward may pass the boundaries."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, numbers: Numbers, leaks: bool, backward: bool) -> torch.Tensor:
        ctx.save_for_backward(numbers)
        ctx.leaks = backward
        return scan(x, numbers, leaks)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (numbers,) = ctx.saved_tensors
        return scan(dy.flip(1), numbers.flip(1), ctx.leaks).flip(1), None, None, None


def scan(x: torch.Tensor, numbers: Numbers, leaks: bool) -> torch.Tensor:
    y = x.clone()
    for t in range(1, x.shape[1]):
        same = (numbers[:, t] == numbers[:, t - 1])[:, None] | leaks
        y[:, t] += 0.5 * y[:, t - 1] * same
    return y


class Fused(nn.Module):
    """A layer with the opaque function."""

    def __init__(self, width: int, leaks: bool, backward: bool = False) -> None:
        super().__init__()
        self.mix, self.leaks, self.backward_leaks = nn.Linear(width, width), leaks, backward

    def forward(self, x: torch.Tensor, numbers: Numbers) -> torch.Tensor:
        return FusedScan.apply(self.mix(x), numbers, self.leaks, self.backward_leaks)


class Mixing(nn.Module):
    """Softmax attention."""

    def __init__(self, width: int, leaks: bool, causal: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.leaks, self.causal = leaks, causal

    def forward(self, x: torch.Tensor, numbers: Numbers) -> torch.Tensor:
        logits = self.q(x) @ self.k(x).mT
        seen = torch.ones_like(logits, dtype=torch.bool)
        seen = seen.tril() if self.causal else seen
        if not self.leaks:
            seen = seen & (numbers[:, :, None] == numbers[:, None, :])
        return logits.masked_fill(~seen, -torch.inf).softmax(-1) @ self.v(x)


class Centered(nn.Module):
    """Removes the mean over all tokens of the row."""

    def __init__(self, width: int, leaks: bool) -> None:
        super().__init__()
        self.leaks = leaks

    def forward(self, x: torch.Tensor, numbers: Numbers) -> torch.Tensor:
        return x - x.mean(1, keepdim=True) if self.leaks else x


class MixedWeightGradient(torch.autograd.Function):
    """x * w with the gradient of w from the wrong tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return dy * weight, (dy * (x + 0.1 * x.roll(1, 1))).sum((0, 1))


class Scaled(nn.Module):
    """A scale whose own gradient mixes neighbors."""

    def __init__(self, width: int, leaks: bool) -> None:
        super().__init__()
        self.gain, self.leaks = nn.Parameter(torch.rand(width) + 0.5), leaks

    def forward(self, x: torch.Tensor, numbers: Numbers) -> torch.Tensor:
        return MixedWeightGradient.apply(x, self.gain) if self.leaks else x * self.gain


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner

    def forward(self, x: torch.Tensor, numbers: Numbers) -> torch.Tensor:
        return x + self.inner(self.norm(x), numbers)


class Model(nn.Module):
    """Embeddings of tokens and positions, residual layers, and logits."""

    def __init__(self, *layers: Any, width: int = 12, restart: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(40, width), nn.Embedding(128, width)
        self.layers = nn.ModuleList(Layer(width, layer(width)) for layer in layers)
        self.head, self.restart = nn.Linear(width, 40), restart

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        count = torch.arange(input_ids.shape[1])[None].expand(input_ids.shape)
        positions = count if position_ids is None else position_ids
        numbers = (positions == 0).cumsum(1)
        x = self.tokens(input_ids) + self.positions(positions if self.restart else count)
        for layer in self.layers:
            x = layer(x, numbers)
        return self.head(x)
