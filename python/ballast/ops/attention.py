"""Causal softmax attention with products q.k and logits in f32 for both storage types.

    x_j = scale q.k_j;   x_j = cap tanh(x_j / cap) with a soft cap;   o = sum_j softmax(x)_j v_j

q [B, T, heads, D]; k [B, T, kv_heads, D]; v [B, T, kv_heads, V]; heads is a multiple of kv_heads.
"""

from __future__ import annotations

from typing import Literal, overload

import torch

from ballast.errors import UsageError
from ballast.ops._operation import operation
from ballast.ops._tensors import (
    check_cpu,
    check_shape,
    check_window,
    native,
    offsets,
    selected_keys,
    storage,
)

__all__ = ["attention"]


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    selected: torch.Tensor | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    selected: torch.Tensor | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns o [B, T, heads, V] and, if `return_lse`, the log-sum-exp [B, T, heads] in f32 without gradient.

    A query sees the keys up to its own position in its sequence: the last `window` of them, and of those the
    ones listed in `selected` [B, T, topk] (int32, -1 in unused slots, as `indexer_topk` returns). `sinks`
    [heads] are logits without values. With `cu_seqlens` [N+1] the batch size is 1, and N sequences are
    packed; `selected` then counts from the first token of the query's own sequence.

    >>> import torch
    >>> from ballast.ops import attention
    >>> q, k = torch.zeros(1, 2, 1, 1), torch.ones(1, 2, 1, 1)
    >>> attention(q, k, torch.tensor([2.0, 4.0]).view(1, 2, 1, 1)).flatten().tolist()
    [2.0, 3.0]
    """
    check_cpu("attention", q=q, k=k, v=v, sinks=sinks, selected=selected, cu_seqlens=cu_seqlens)
    dtype = storage("attention", q, k, v)
    batch, tokens, heads, width = q.shape
    kv_heads = k.shape[2]
    if kv_heads == 0 or heads % kv_heads != 0:
        raise UsageError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    check_window(window)
    check_shape("k", k, (batch, tokens, kv_heads, width))
    check_shape("v", v, (batch, tokens, kv_heads, v.shape[3]))
    if cu_seqlens is not None and batch != 1:
        raise UsageError(f"the batch size must be 1 with cu_seqlens, got {batch}; flatten the batch first")
    if sinks is not None:
        check_shape("sinks", sinks, (heads,))
        sinks = sinks.float().contiguous()
    if selected is not None:
        check_shape("selected", selected, (batch, tokens, selected.shape[-1]))
    o, lse = _attention(
        *(x.to(dtype).contiguous() for x in (q, k, v)),
        *(sinks, selected_keys(selected), offsets(cu_seqlens)),
        width**-0.5 if scale is None else float(scale),
        window,
        soft_cap,
    )
    return (o.to(q.dtype), lse.detach()) if return_lse else o.to(q.dtype)


@operation("attention", native.attention_forward)
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    selected: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse."""
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    return o, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


@_attention.backward(native.attention_backward)
def _attention_backward(
    d_o: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    selected: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, and dsinks."""
    dsinks = lse.new_zeros(0 if sinks is None else sinks.shape[0])
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks
