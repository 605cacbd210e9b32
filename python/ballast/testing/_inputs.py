"""Values and tensors of golden inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ballast._torch import torch


def values(shape: Sequence[int], seed: int = 0, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    """Returns f64 values in [low, high) that depend only on shape and seed.

    They are hashes of the index rather than random numbers, so every version of torch gives the same bits.

    >>> from ballast.testing import values
    >>> values([2]).tolist() == values([3]).tolist()[:2]
    True
    """
    mask = 0xFFFFFFFF
    x = (torch.arange(1, math.prod(shape) + 1, dtype=torch.int64) * 0x9E3779B1 + seed * 0x85EBCA77) & mask
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & mask
    x = x ^ (x >> 16)
    return (low + (high - low) * x.double() / 2.0**32).reshape(tuple(shape))


@dataclass
class Maker:
    """Makes the tensors of a case, each with its own seed."""

    dtype: torch.dtype
    device: str
    seed: int
    made: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self, *shape: int, low: float = -1.0, high: float = 1.0, f32: bool = False) -> torch.Tensor:
        made = values(shape, self.seed * 1000 + next(self.made), low, high)
        return made.to(device=self.device, dtype=torch.float32 if f32 else self.dtype).requires_grad_()

    def offsets(
        self, batch: int, tokens: int, lengths: Sequence[int] | None
    ) -> tuple[int, int, int, dict[str, Any]]:
        """Batch size, tokens, sequences and `cu_seqlens`."""
        if lengths is None:
            return batch, tokens, batch, {}
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], device=self.device)
        return 1, sum(lengths), len(lengths), {"cu_seqlens": offsets}


def spans(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[tuple[int, slice]]:
    """Row of the batch and tokens of every sequence."""
    if cu_seqlens is None:
        return [(b, slice(0, x.shape[1])) for b in range(x.shape[0])]
    return [(0, slice(*pair)) for pair in itertools.pairwise(cu_seqlens.tolist())]
