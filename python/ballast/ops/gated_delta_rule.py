"""The gated delta rule with the signatures of flash-linear-attention.

    S = e^g S;   d = beta (v - S^T k);   S = S + k d^T;   o = scale S^T q       token by token

q, k [B, T, H, K]; v [B, T, HV, V]; g, beta [B, T, HV]; states [N, HV, K, V] in f32. HV is a multiple of H.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F

from ballast.errors import UsageError
from ballast.ops._operation import operation
from ballast.ops._tensors import check_cpu, check_shape, native, needs_grad, offsets, storage

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]

CHUNK = 32
"""Tokens per chunk; it changes the result by rounding only."""

STATES_EVERY = 4
"""Chunks per saved state; the kernel has the same number."""


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,  # noqa: ANN401 - as in flash-linear-attention
    **kwargs: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns o [B, T, HV, V] and, if `output_final_state`, the final state [N, HV, K, V] in f32, else None.

    `scale` is K^-1/2 by default. A `g` above 0 makes the state grow; chunks are then smaller and slower. `g`
    must not exceed 88. With `cu_seqlens` [N+1] the batch size is 1 and the N sequences are
    packed; otherwise N is the batch size. `use_gate_in_kernel` with `A_log` and `dt_bias` computes the
    decay from a raw `g`; `chunk_size` is 16, 32 or 64. `cu_seqlens_cpu` and `chunk_indices` are
    ignored; context parallelism is not supported.

    >>> import torch
    >>> from ballast.ops import chunk_gated_delta_rule
    >>> q, k, v = (torch.ones(1, 2, 1, 1) for _ in range(3))
    >>> g, beta = torch.zeros(1, 2, 1), torch.full((1, 2, 1), 0.5)
    >>> o, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    >>> o.flatten().tolist(), state.shape
    ([0.5, 0.75], torch.Size([1, 1, 1, 1]))
    """
    if "head_first" in kwargs:
        raise DeprecationWarning("head_first was removed; inputs must have the shape [B, T, H, ...]")
    if cp_context is not None:
        raise UsageError(
            "ballast.ops.chunk_gated_delta_rule has no context parallelism: cp_context must be None"
        )
    chunk = kwargs.pop("chunk_size", CHUNK)
    if chunk not in (16, 32, 64):
        raise ValueError(f"chunk_size must be 16, 32 or 64, got {chunk}")
    if kwargs.get("use_gate_in_kernel"):
        g = _decay(g, kwargs.get("A_log"), kwargs.get("dt_bias"))
    return _rule(
        "chunk_gated_delta_rule",
        (q, k, v, g, beta),
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        (use_beta_sigmoid_in_kernel, allow_neg_eigval),
        _state_v_first(state_v_first, kwargs),
        cu_seqlens,
        chunk,
    )


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,  # noqa: ANN401 - as in flash-linear-attention
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns what `chunk_gated_delta_rule` returns, computed token by token: for decoding.

    Without `g` there is no decay; without `beta` it is 1. The per-channel decays gk and gv are not supported.
    If a backward pass can follow, `chunk_gated_delta_rule` runs instead, which differs only by rounding.

    >>> import torch
    >>> from ballast.ops import fused_recurrent_gated_delta_rule
    >>> q, k, v = (torch.ones(1, 1, 1, 1) for _ in range(3))
    >>> o, state = fused_recurrent_gated_delta_rule(q, k, v, output_final_state=True)
    >>> o.item(), state.item()
    (1.0, 1.0)
    """
    if gk is not None or gv is not None:
        raise UsageError(
            "ballast.ops.fused_recurrent_gated_delta_rule has no decay per channel: gk and gv must be None"
        )
    if use_gate_in_kernel:
        if g is None:
            raise ValueError("use_gate_in_kernel needs g, the input of the gate")
        g = _decay(g, A_log, dt_bias)
    g = v.new_zeros(v.shape[:3], dtype=torch.float32) if g is None else g
    beta = v.new_ones(v.shape[:3], dtype=torch.float32) if beta is None else beta
    return _rule(
        "fused_recurrent_gated_delta_rule",
        (q, k, v, g, beta),
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        (use_beta_sigmoid_in_kernel, allow_neg_eigval),
        _state_v_first(state_v_first, kwargs),
        cu_seqlens,
        CHUNK if needs_grad(q, k, v, g, beta, initial_state) else None,
    )


def _decay(g: torch.Tensor, a_log: torch.Tensor | None, dt_bias: torch.Tensor | None) -> torch.Tensor:
    if a_log is None:
        raise ValueError("use_gate_in_kernel needs A_log")
    g = g.float() if dt_bias is None else g.float() + dt_bias.float()
    return -a_log.float().exp() * F.softplus(g)


def _state_v_first(state_v_first: bool, kwargs: dict[str, Any]) -> bool:
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("state_v_first and the deprecated transpose_state_layout exclude each other")
    warnings.warn("transpose_state_layout is deprecated; use state_v_first", DeprecationWarning, stacklevel=3)
    return kwargs["transpose_state_layout"]


def _rule(
    operation: str,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    l2norm: bool,
    sigmoid: tuple[bool, bool],
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    chunk: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Checks the arguments and calls the kernel: in chunks, or token by token if `chunk` is None."""
    q, k, v, g, beta = tensors
    check_cpu(operation, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    dtype, sequences = storage(operation, q, k, v), q.shape[0]
    if q.ndim != 4 or v.ndim != 4:
        raise UsageError(f"q and v must have 4 dimensions [B, T, H, ...], got {q.ndim} and {v.ndim}")
    (batch, tokens, heads, key_dim), (value_heads, value_dim) = q.shape, v.shape[2:]
    if heads == 0 or value_heads % heads != 0:
        raise ValueError(f"HV must be a multiple of H, got {value_heads} and {heads}")
    check_shape("k", k, (batch, tokens, heads, key_dim))
    check_shape("v", v, (batch, tokens, value_heads, value_dim))
    check_shape("g", g, (batch, tokens, value_heads))
    check_shape("beta", beta, (batch, tokens, value_heads))
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(
                f"the batch size must be 1 with cu_seqlens, got {batch}; flatten the batch first"
            )
        sequences = cu_seqlens.shape[0] - 1
    use_sigmoid, negative = sigmoid
    if negative and not use_sigmoid:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    if use_sigmoid:
        beta = beta.float().sigmoid() * (2.0 if negative else 1.0)
    h0 = initial_state
    if h0 is not None:
        h0 = (h0.transpose(-1, -2) if state_v_first else h0).float().contiguous()
        check_shape("initial_state", h0, (sequences, value_heads, key_dim, value_dim))
    inputs = (q.to(dtype).contiguous(), k.to(dtype).contiguous(), v.to(dtype).contiguous())
    inputs += (g.float().contiguous(), beta.float().contiguous(), h0, offsets(cu_seqlens))
    scale = key_dim**-0.5 if scale is None else float(scale)
    if chunk is None:
        o, ht = _steps(*inputs, scale, l2norm)
    else:
        save = needs_grad(*inputs[:6])
        o, ht, *_ = _chunks(*inputs, scale, l2norm, chunk, output_final_state, save)
    if not output_final_state:
        return o.to(q.dtype), None
    return o.to(q.dtype), ht.transpose(-1, -2) if state_v_first else ht


def _state(q: torch.Tensor, v: torch.Tensor, sequences: int) -> torch.Tensor:
    shape = (sequences, v.shape[2], q.shape[3], v.shape[3])
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _sequences(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


@operation("gated_delta_rule", native.gated_delta_rule_forward)
def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    h0: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    l2norm: bool,
    chunk: int,
    final: bool,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """o, ht, and the values saved for backward: q_rstd, k_rstd, states.

    Without offsets the number of states is that of the kernel; with them it is a bound that depends on shapes
    alone, and the rest is zero.
    """
    (batch, tokens), segment = q.shape[:2], chunk * STATES_EVERY
    if cu_seqlens is None:
        states = batch * -(-tokens // segment)
    else:
        states = batch * tokens // segment + cu_seqlens.shape[0] - 1
    rstd = (batch, tokens if save and l2norm else 0, q.shape[2])
    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        _state(q, v, _sequences(q, cu_seqlens) if final else 0),
        torch.empty(rstd, dtype=torch.float32, device=q.device),
        torch.empty(rstd, dtype=torch.float32, device=q.device),
        _state(q, v, states if save else 0),
    )


@_chunks.backward(native.gated_delta_rule_backward)
def _chunks_backward(
    d_o: torch.Tensor,
    dht: torch.Tensor | None,
    q_rstd: torch.Tensor,
    k_rstd: torch.Tensor,
    states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    h0: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    l2norm: bool,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, dg, dbeta, and dh0."""
    dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g, beta))
    return dq, dk, dv, dg, dbeta, _state(q, v, 0 if h0 is None else h0.shape[0])


@operation("gated_delta_rule_steps", native.gated_delta_rule_steps)
def _steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    h0: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    l2norm: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o, and ht, which starts as h0; token by token, without a backward pass."""
    ht = _state(q, v, _sequences(q, cu_seqlens)).zero_() if h0 is None else h0.clone()
    return torch.empty_like(v), ht
