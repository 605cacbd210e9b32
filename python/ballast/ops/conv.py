"""Causal depthwise convolution with SiLU, with the signatures of causal-conv1d, and packed sequences.

    y_t = silu(sum_j w_j x_{t-(W-1)+j})      for each channel; the initial state precedes a sequence

x, y [B, C, T]; weight [C, W]; states [N, C, W-1]. An x with adjacent channels in memory, such as
the transposed output of a projection, is not copied.
"""

from __future__ import annotations

from typing import Literal, overload

import torch

from ballast.errors import UsageError
from ballast.ops._operation import operation
from ballast.ops._tensors import check_cpu, check_shape, native, offsets, storage
from ballast.ops.packing import offsets_of_sequence_ids

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


@overload
def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = ...,
    seq_idx: torch.Tensor | None = ...,
    initial_states: torch.Tensor | None = ...,
    return_final_states: Literal[False] = ...,
    final_states_out: torch.Tensor | None = ...,
    activation: str | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
) -> torch.Tensor: ...


@overload
def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = ...,
    seq_idx: torch.Tensor | None = ...,
    initial_states: torch.Tensor | None = ...,
    *,
    return_final_states: Literal[True],
    final_states_out: torch.Tensor | None = ...,
    activation: str | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns y [B, C, T] and, if `return_final_states`, the last W-1 columns of each sequence [N, C, W-1].

    Packed sequences are separated by `seq_idx` [B, T], the sequence number of each token, or by
    `cu_seqlens` [N+1], offsets in the flattened batch. `activation` must be "silu" or "swish", `bias` None.

    >>> import torch
    >>> from ballast.ops import causal_conv1d_fn
    >>> x, weight = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.ones(1, 2)
    >>> packed = causal_conv1d_fn(x, weight, activation="silu", cu_seqlens=torch.tensor([0, 2, 3]))
    >>> torch.allclose(packed, torch.nn.functional.silu(torch.tensor([[[1.0, 3.0, 3.0]]])))
    True
    """
    check_cpu("causal_conv1d_fn", x=x, weight=weight, initial_states=initial_states, cu_seqlens=cu_seqlens)
    _check(x, weight, bias, activation)
    dtype, sequences = (
        storage("causal_conv1d_fn", x, *(() if initial_states is None else (initial_states,))),
        x.shape[0],
    )
    if seq_idx is not None:
        if cu_seqlens is not None:
            raise UsageError("seq_idx and cu_seqlens exclude each other")
        check_shape("seq_idx", seq_idx, (x.shape[0], x.shape[2]))
        cu_seqlens = offsets_of_sequence_ids(seq_idx)
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
    state = None
    if initial_states is not None:
        check_shape("initial_states", initial_states, (sequences, x.shape[1], weight.shape[1] - 1))
        state = initial_states.to(dtype).transpose(1, 2).contiguous()
    rows = x.to(dtype).transpose(1, 2).contiguous()
    final = return_final_states or final_states_out is not None
    y, last = _conv(rows, weight.contiguous(), state, offsets(cu_seqlens), final)
    y, last = y.transpose(1, 2).to(x.dtype), last.transpose(1, 2).to(x.dtype)
    if final_states_out is not None:
        last = final_states_out.copy_(last)
    return (y, last) if return_final_states else y


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns y [B, C] or [B, C, L] of the next tokens; `conv_state` [B, C, S], S >= W-1, is updated.

    `activation` must be "silu" or "swish"; `bias`, `cache_seqlens` and `conv_state_indices` must be None.

    >>> import torch
    >>> from ballast.ops import causal_conv1d_update
    >>> state, weight = torch.tensor([[[3.0]]]), torch.ones(1, 2)
    >>> y = causal_conv1d_update(torch.tensor([[4.0]]), state, weight, activation="silu")
    >>> torch.allclose(y, torch.nn.functional.silu(torch.tensor([[7.0]]))), state.item()
    (True, 4.0)
    """
    if cache_seqlens is not None or conv_state_indices is not None:
        raise UsageError(
            "ballast.ops.causal_conv1d_update: cache_seqlens and conv_state_indices must be None"
        )
    columns = x.unsqueeze(-1) if x.ndim == 2 else x
    check_cpu("causal_conv1d_update", x=x, conv_state=conv_state, weight=weight)
    _check(columns, weight, bias, activation)
    before, kept = weight.shape[1] - 1, conv_state.shape[-1]
    if conv_state.ndim != 3 or kept < before:
        raise UsageError(
            f"conv_state must have {before} or more columns, got the shape {list(conv_state.shape)}"
        )
    y = causal_conv1d_fn(
        columns, weight, initial_states=conv_state[..., kept - before :].to(x.dtype), activation=activation
    )
    with torch.no_grad():
        conv_state.copy_(torch.cat([conv_state, columns.to(conv_state.dtype)], dim=-1)[..., -kept:])
    return y.squeeze(-1) if x.ndim == 2 else y


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> None:
    if activation not in ("silu", "swish"):
        raise UsageError(f'activation must be "silu" or "swish", got {activation!r}')
    if bias is not None:
        raise UsageError("bias must be None: the convolution of Gated DeltaNet has none")
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[1]:
        raise UsageError(
            f"x must have the shape [B, C, T] and weight [C, W], got {list(x.shape)} and {list(weight.shape)}"
        )


@operation("causal_conv", native.conv_forward)
def _conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    final: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [B, T, C] and the final states [N, W-1, C]."""
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return torch.empty_like(x), x.new_empty((sequences if final else 0, weight.shape[1] - 1, x.shape[2]))


@_conv.backward(native.conv_backward)
def _conv_backward(
    dy: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dweight in f32, and dstate."""
    dstate = x.new_empty(0) if state is None else torch.empty_like(state)
    return torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32), dstate
