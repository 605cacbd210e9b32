"""The kernels on tensors of torch. A function fills its outputs, which the caller has allocated."""

import torch

_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Scale, window, soft cap.
_AttentionSettings = tuple[float, int | None, float | None]

def attention_forward(
    o: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    selected_keys: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    settings: _AttentionSettings,
    threads: int,
) -> None: ...
def attention_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dsinks: torch.Tensor | None,
    d_o: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    selected_keys: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    settings: _AttentionSettings,
    threads: int,
) -> None: ...
def conv_forward(
    y: torch.Tensor,
    final_state: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    threads: int,
) -> None: ...
def conv_backward(
    dx: torch.Tensor,
    dweight: torch.Tensor,
    dstate: torch.Tensor | None,
    dy: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    threads: int,
) -> None: ...
def gated_delta_rule_forward(
    o: torch.Tensor,
    ht: torch.Tensor | None,
    saved: _Tensors | None,
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
    threads: int,
) -> None: ...
def gated_delta_rule_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dg: torch.Tensor,
    dbeta: torch.Tensor,
    dh0: torch.Tensor | None,
    d_o: torch.Tensor,
    dht: torch.Tensor | None,
    saved: _Tensors,
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
    threads: int,
) -> None: ...
def gated_delta_rule_steps(
    o: torch.Tensor,
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    l2norm: bool,
    threads: int,
) -> None: ...
def indexer_topk(
    selected: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    threads: int,
) -> None: ...
def indexer_loss(
    grads: _Tensors | None,
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    attention_q: torch.Tensor,
    attention_k: torch.Tensor,
    lse: torch.Tensor,
    selected: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    loss_scale: float,
    settings: _AttentionSettings,
    threads: int,
) -> float: ...
def linear_cross_entropy(
    dhidden: torch.Tensor | None,
    dweight: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    soft_cap: float | None,
    z_loss: float,
    label_smoothing: float,
    threads: int,
) -> tuple[float, int]: ...
def gated_rms_norm_forward(
    y: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    threads: int,
) -> None: ...
def gated_rms_norm_backward(
    dx: torch.Tensor,
    dz: torch.Tensor,
    dweight: torch.Tensor,
    dy: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    threads: int,
) -> None: ...
