"""Offsets of packed sequences."""

from __future__ import annotations

import torch

__all__ = ["offsets_of_positions", "offsets_of_sequence_ids"]


@torch.library.custom_op("ballast::sequence_offsets", mutates_args=(), device_types="cpu")
def sequence_offsets(starts: torch.Tensor) -> torch.Tensor:
    """Offsets [N+1] of the sequences of a flattened batch, from the mask [B, T] of their first tokens."""
    first = starts.flatten().nonzero().flatten()
    return torch.cat([first, first.new_tensor([starts.numel()])])


@sequence_offsets.register_fake
def _(starts):  # noqa: ANN001, ANN202
    # The number of sequences is known only at run time.
    size = torch.library.get_ctx().new_dynamic_size(min=1)
    return torch.empty(size, dtype=torch.int64, device=starts.device)


def offsets_of_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns the offsets of sequences whose positions [B, T] are consecutive.

    >>> import torch
    >>> from ballast.ops.packing import offsets_of_positions
    >>> offsets_of_positions(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
    [0, 3, 5]
    """
    return sequence_offsets(_first(position_ids[:, 1:] - position_ids[:, :-1] != 1))


def offsets_of_sequence_ids(seq_idx: torch.Tensor) -> torch.Tensor:
    """Returns the offsets of sequences whose tokens have the same number in `seq_idx` [B, T].

    >>> import torch
    >>> from ballast.ops.packing import offsets_of_sequence_ids
    >>> offsets_of_sequence_ids(torch.tensor([[0, 0, 0, 1, 1]])).tolist()
    [0, 3, 5]
    """
    return sequence_offsets(_first(seq_idx[:, 1:] != seq_idx[:, :-1]))


def _first(changes: torch.Tensor) -> torch.Tensor:
    """Adds the first token of each row."""
    return torch.cat([changes.new_ones((changes.shape[0], 1)), changes], dim=1)
