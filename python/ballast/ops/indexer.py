"""Sparse-attention indexer with f32 logits: it selects the keys of an attention and is trained to match it.

    score_tu = sum_h w_th relu(q_th.k_u d^-1/2)          u <= t
    loss = scale mean_t sum_u p_tu (ln(p_tu + 1e-8) - ln(s_tu + 1e-8))     s = softmax(score)

p is the mean of the attention's probabilities over its heads. q [B, T, heads, d]; k [B, T, d];
w [B, T, heads], which includes the factor heads^-1/2.
"""

from __future__ import annotations

import torch

from ballast.errors import UsageError
from ballast.ops._operation import operation
from ballast.ops._tensors import (
    check_cpu,
    check_shape,
    check_window,
    native,
    needs_grad,
    offsets,
    selected_keys,
    storage,
)

__all__ = ["indexer_loss", "indexer_topk"]


def indexer_topk(
    q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, topk: int, *, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the positions of the keys with the highest scores, [B, T, topk] int32, ascending, then -1.

    Ties go to the earliest key.

    >>> import torch
    >>> from ballast.ops import indexer_topk
    >>> q, w = torch.ones(1, 3, 1, 1), torch.ones(1, 3, 1)
    >>> indexer_topk(q, torch.tensor([1.0, 3.0, 2.0]).view(1, 3, 1), w, 2).tolist()
    [[[0, -1], [0, 1], [1, 2]]]
    """
    check_cpu("indexer_topk", q=q, k=k, w=w, cu_seqlens=cu_seqlens)
    if topk < 1:
        raise UsageError(f"topk must be 1 or more, got {topk}")
    q, k, w = _inputs("indexer_topk", q, k, w, cu_seqlens)
    return _topk(q.detach(), k.detach(), w.detach(), topk, offsets(cu_seqlens))


def indexer_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    attention_q: torch.Tensor,
    attention_k: torch.Tensor,
    lse: torch.Tensor,
    *,
    loss_scale: float = 1.0,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    selected: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the loss of the indexer relative to its attention, an f32 scalar.

    `attention_q`, `attention_k`, `lse`, `scale`, `window`, `soft_cap` and `selected` are those of
    `ballast.ops.attention`, which gets no gradient. With `selected`, the sum is over the selected keys.

    >>> import torch
    >>> from ballast.ops import attention, indexer_loss
    >>> x = torch.ones(1, 4, 1, 2)
    >>> _, lse = attention(x, x, x, return_lse=True)
    >>> w = torch.ones(1, 4, 1)
    >>> indexer_loss(x, x[:, :, 0], w, x, x, lse).abs().item() < 1e-6  # all keys are equal for both
    True
    """
    tensors = dict(q=q, k=k, w=w, attention_q=attention_q, attention_k=attention_k, lse=lse)
    check_cpu("indexer_loss", **tensors, selected=selected, cu_seqlens=cu_seqlens)
    q, k, w = _inputs("indexer_loss", q, k, w, cu_seqlens)
    batch, tokens = q.shape[:2]
    check_shape("attention_q", attention_q, (batch, tokens, *attention_q.shape[2:]))
    check_shape("attention_k", attention_k, (batch, tokens, attention_k.shape[2], attention_q.shape[3]))
    check_shape("lse", lse, tuple(attention_q.shape[:3]))
    check_window(window)
    loss, *_ = _loss(
        *(q, k, w),
        *(x.detach().to(q.dtype).contiguous() for x in (attention_q, attention_k)),
        lse.detach().float().contiguous(),
        *(selected_keys(selected), offsets(cu_seqlens), loss_scale),
        attention_q.shape[3] ** -0.5 if scale is None else float(scale),
        *(window, soft_cap, needs_grad(q, k, w)),
    )
    return loss


def _inputs(
    operation: str, q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = storage(operation, q, k)
    batch, tokens, heads, width = q.shape
    check_shape("k", k, (batch, tokens, width))
    check_shape("w", w, (batch, tokens, heads))
    if cu_seqlens is not None and batch != 1:
        raise UsageError(f"the batch size must be 1 with cu_seqlens, got {batch}; flatten the batch first")
    return q.to(dtype).contiguous(), k.to(dtype).contiguous(), w.float().contiguous()


@operation("indexer_topk", native.indexer_topk)
def _topk(
    q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, topk: int, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """selected [B, T, topk]."""
    return torch.empty((*q.shape[:2], topk), dtype=torch.int32, device=q.device)


@operation("indexer_loss", native.indexer_loss, loss=True)
def _loss(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    attention_q: torch.Tensor,
    attention_k: torch.Tensor,
    lse: torch.Tensor,
    selected: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    loss_scale: float,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss and its gradients dq, dk, and dw, which forward computes with it."""
    dq, dk, dw = (torch.empty_like(x) if save else x.new_empty(0) for x in (q, k, w))
    return torch.empty((), dtype=torch.float32, device=q.device), dq, dk, dw
