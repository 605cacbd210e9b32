"""Softmax attention and the sparse indexer in f64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ballast._torch import torch
from ballast.testing._inputs import Maker, spans


def _visible(
    tokens: int, window: int | None, selected: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Mask [tokens, tokens] of the keys that each query of a sequence sees."""
    position = torch.arange(tokens, device=device)
    distance = position[:, None] - position[None, :]
    mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if selected is not None:
        listed = torch.zeros(tokens, tokens + 1, dtype=torch.bool, device=device)
        index = torch.where(selected < 0, tokens, selected.long())
        mask = mask & listed.scatter(1, index, True)[:, :tokens]
    return mask


def _logits(q: torch.Tensor, k: torch.Tensor, scale: float, soft_cap: float | None) -> torch.Tensor:
    """[heads, queries, keys] of one sequence."""
    x = scale * torch.einsum("thd,uhd->htu", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
    return x if soft_cap is None else soft_cap * torch.tanh(x / soft_cap)


def attention_reference(
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
    """Causal softmax attention in f64, with all logits in memory."""
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outputs, sums = [], []
    for b, tokens in spans(q, cu_seqlens):
        chosen = None if selected is None else selected[b, tokens]
        mask = _visible(tokens.stop - tokens.start, window, chosen, q.device)
        x = _logits(q[b, tokens], k[b, tokens], scale, soft_cap).masked_fill(~mask, -math.inf)
        if sinks is not None:
            x = torch.cat([x, sinks.double()[:, None, None].expand(-1, x.shape[1], 1)], dim=-1)
        lse = torch.logsumexp(x, dim=-1, keepdim=True)
        p = (x - lse).exp()[..., : mask.shape[1]]
        values_of_heads = v[b, tokens].repeat_interleave(q.shape[2] // v.shape[2], dim=1)
        outputs.append(torch.einsum("htu,uhd->thd", p, values_of_heads))
        sums.append(lse[..., 0].transpose(0, 1))
    o = torch.cat(outputs).reshape(*q.shape[:3], v.shape[3])
    return (o, torch.cat(sums).reshape(q.shape[:3]).detach()) if return_lse else o


def attention_inputs(
    make: Maker,
    batch: int = 1,
    tokens: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    sinks: bool = False,
    topk: int | None = None,
    lengths: Sequence[int] | None = None,
    **options: Any,  # noqa: ANN401
) -> dict[str, Any]:
    batch, tokens, _, packing = make.offsets(batch, tokens, lengths)
    tensors = {
        "q": make(batch, tokens, heads, key_dim, low=-2.0, high=2.0),
        "k": make(batch, tokens, kv_heads, key_dim, low=-2.0, high=2.0),
        "v": make(batch, tokens, kv_heads, value_dim),
    }
    if sinks:
        tensors["sinks"] = make(heads, f32=True)
    if topk is not None:
        tensors["selected"] = _selection(make, batch, tokens, topk, packing)
    return {**tensors, **packing, **options}


def _selection(make: Maker, batch: int, tokens: int, topk: int, packing: dict[str, Any]) -> torch.Tensor:
    q, k, w = make(batch, tokens, 1, 4), make(batch, tokens, 4), make(batch, tokens, 1, low=0.5, f32=True)
    selected = indexer_topk_reference(
        q.cpu(), k.cpu(), w.cpu(), topk, **{n: x.cpu() for n, x in packing.items()}
    )
    return selected.to(make.device)


# Indexer


def _scores(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """[queries, keys] of one sequence."""
    x = torch.einsum("thd,ud->thu", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("th,thu->tu", w, x.relu())


def indexer_topk_reference(
    q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, topk: int, *, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Positions of the highest scores in f64, ascending, then -1; of equal scores the earliest."""
    q, k, w = q.detach().double(), k.detach().double(), w.detach().double()
    selected = torch.full((*q.shape[:2], topk), -1, dtype=torch.int32)
    for b, tokens in spans(q, cu_seqlens):
        scores = _scores(q[b, tokens], k[b, tokens], w[b, tokens])
        for t, row in enumerate(scores):
            order = torch.sort(row[: t + 1], descending=True, stable=True).indices[:topk]
            selected[b, tokens.start + t, : len(order)] = order.sort().values.int()
    return selected


def indexer_loss_reference(
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
    """Loss of the indexer in f64: the divergence of softmax(scores) from the attention's distribution."""
    q, k, w = q.double(), k.double(), w.double()
    attention_q, attention_k, lse = (x.detach().double() for x in (attention_q, attention_k, lse))
    scale = attention_q.shape[-1] ** -0.5 if scale is None else scale
    loss, count = q.new_zeros(()), 0
    for b, tokens in spans(q, cu_seqlens):
        chosen = None if selected is None else selected[b, tokens]
        mask = _visible(tokens.stop - tokens.start, window, chosen, q.device)
        x = _logits(attention_q[b, tokens], attention_k[b, tokens], scale, soft_cap)
        p = ((x - lse[b, tokens].T[..., None]).exp() * mask).sum(0)
        p = p / (p.sum(-1, keepdim=True) + 1e-8)
        scores = _scores(q[b, tokens], k[b, tokens], w[b, tokens]).masked_fill(~mask, -math.inf)
        s = torch.softmax(scores, dim=-1)
        loss = loss + (p * ((p + 1e-8).log() - (s + 1e-8).log())).sum()
        count += mask.shape[0]
    return loss_scale * loss / max(count, 1)


def indexer_loss_inputs(
    make: Maker,
    batch: int = 1,
    tokens: int = 48,
    heads: int = 4,
    dim: int = 16,
    attention_heads: int = 4,
    kv_heads: int = 2,
    key_dim: int = 16,
    topk: int | None = None,
    lengths: Sequence[int] | None = None,
    **options: Any,  # noqa: ANN401
) -> dict[str, Any]:
    batch, tokens, _, packing = make.offsets(batch, tokens, lengths)
    q, k, w = make(batch, tokens, heads, dim), make(batch, tokens, dim), make(batch, tokens, heads, f32=True)
    attention_q = make(batch, tokens, attention_heads, key_dim, low=-2.0, high=2.0).detach()
    attention_k = make(batch, tokens, kv_heads, key_dim, low=-2.0, high=2.0).detach()
    given = {name: x for name, x in options.items() if name in ("scale", "window", "soft_cap")} | packing
    if topk is not None:
        given["selected"] = _selection(make, batch, tokens, topk, packing)
    on_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    lse = (
        attention_reference(
            attention_q.cpu(), attention_k.cpu(), attention_k.cpu(), return_lse=True, **on_cpu
        )[1]
        .float()
        .to(make.device)
    )
    return dict(q=q, k=k, w=w, attention_q=attention_q, attention_k=attention_k, lse=lse) | given | options
