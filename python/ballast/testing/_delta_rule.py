"""The delta rule in f64, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ballast._torch import torch
from ballast.testing._inputs import Maker, spans


def gated_delta_rule_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """S = e^g S; d = beta (v - S^T k); S = S + k d^T; o = scale S^T q, token by token in f64."""
    state = (initial_state, output_final_state)
    return _reference(q, k, v, g[..., None], beta, scale, *state, use_qk_l2norm_in_kernel, cu_seqlens)


def kda_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The delta rule with a decay per channel, g [B, T, HV, K]: S = diag(e^g) S, then as the gated rule."""
    state = (initial_state, output_final_state)
    return _reference(q, k, v, g, beta, scale, *state, use_qk_l2norm_in_kernel, cu_seqlens)


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    l2norm: bool,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both rules; g [B, T, HV, 1 or K]."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    # Rows of q and k, columns of the state.
    inputs = (q[..., None, :], k[..., None, :], v[..., None, :], g.exp()[..., None], beta[..., None, None])
    outputs, finals = [], []
    for n, (b, tokens) in enumerate(spans(q, cu_seqlens)):
        state = q.new_zeros(v.shape[2], q.shape[3], v.shape[3])
        if initial_state is not None:
            state = initial_state[n].double()
        for q_t, k_t, v_t, decay, beta_t in zip(*(x[b, tokens].unbind(0) for x in inputs), strict=True):
            state = decay * state
            state = state + k_t.mT @ (beta_t * (v_t - k_t @ state))
            outputs.append(q_t @ state)
        finals.append(state)
    o = torch.stack(outputs).reshape(v.shape) if outputs else torch.zeros_like(v)
    shape = (len(finals), v.shape[2], q.shape[3], v.shape[3])
    return o, torch.stack(finals).reshape(shape) if output_final_state else None


def gated_delta_rule_inputs(
    make: Maker,
    batch: int = 1,
    tokens: int = 64,
    key_heads: int = 2,
    value_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    initial_state: bool = False,
    lengths: Sequence[int] | None = None,
    **options: Any,  # noqa: ANN401
) -> dict[str, Any]:
    batch, tokens, sequences, packing = make.offsets(batch, tokens, lengths)
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, **options}
    tensors = {
        "q": make(batch, tokens, key_heads, key_dim),
        "k": make(batch, tokens, key_heads, key_dim),
        "v": make(batch, tokens, value_heads, value_dim),
        "g": make(batch, tokens, value_heads, low=-1.0, high=0.0, f32=True),
        "beta": make(batch, tokens, value_heads, low=0.0, high=1.0, f32=True),
    }
    if initial_state:
        tensors["initial_state"] = make(sequences, value_heads, key_dim, value_dim, f32=True)
    return {**tensors, **packing, **options}


def kda_inputs(make: Maker, **shape: Any) -> dict[str, Any]:  # noqa: ANN401
    given = gated_delta_rule_inputs(make, **shape)
    batch, tokens, heads = given["g"].shape
    return {**given, "g": make(batch, tokens, heads, given["q"].shape[3], low=-1.0, high=0.0, f32=True)}
