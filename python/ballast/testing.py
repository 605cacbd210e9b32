"""Tools to test a kernel: golden inputs, f64 references, and a comparison that names the worst element.

A test of a kernel, on any device, for the outputs and every gradient:

    import pytest, torch
    from ballast import testing

    @pytest.mark.parametrize("tokens", [1, 63, 64, 200])
    def test_my_kernel(tokens):
        case = testing.golden("chunk_gated_delta_rule", tokens=tokens, dtype=torch.bfloat16, device="cuda")
        case.check(my_kernel, rms=1e-2)

The kernel is called with the keywords of the operation of the same name in `ballast.ops`.

| operation | shape keywords |
|---|---|
| `chunk_gated_delta_rule` | batch, tokens, key_heads, value_heads, key_dim, value_dim, initial_state |
| `causal_conv1d_fn` | batch, tokens, channels, width, initial_states |
| `gated_rms_norm` | rows, width |
| `attention` | batch, tokens, heads, kv_heads, key_dim, value_dim, sinks, topk |
| `indexer_loss` | batch, tokens, heads, dim, attention_heads, kv_heads, key_dim, topk |
| `linear_cross_entropy` | tokens, width, vocabulary |

Operations with `batch` also take `lengths`, for packed sequences of these lengths. Other keywords are
arguments of the kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ballast._torch import torch
from ballast.errors import UsageError

F = torch.nn.functional

__all__ = [
    "Golden",
    "assert_close",
    "attention_reference",
    "causal_conv1d_reference",
    "gated_delta_rule_reference",
    "gated_rms_norm_reference",
    "golden",
    "indexer_loss_reference",
    "indexer_topk_reference",
    "linear_cross_entropy_reference",
    "relative_rms",
    "values",
]


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


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns RMS(actual - expected) / RMS(expected); the absolute RMS if all expected values are 0."""
    expected = expected.detach().double().cpu()
    difference = actual.detach().double().cpu() - expected
    if expected.numel() == 0:
        return 0.0
    size = expected.square().mean().sqrt().item() or 1.0
    return difference.square().mean().sqrt().item() / size


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, rms: float = 1e-5, name: str = "result"
) -> float:
    """Returns the relative RMS of the difference; above `rms`, raises an error that names the worst element.

    >>> import torch
    >>> from ballast.testing import assert_close
    >>> assert_close(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), name="dk")
    Traceback (most recent call last):
    AssertionError: dk: relative RMS 2.24e-01 is above 1.00e-05; worst of 2 elements [1]: got 2.5, expected 2
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: got the shape {list(actual.shape)}, expected {list(expected.shape)}")
    found = relative_rms(actual, expected)
    if found <= rms:
        return found
    a, b = actual.detach().double().cpu(), expected.detach().double().cpu()
    # NaN is worse than any number.
    worst = (a - b).abs().nan_to_num(nan=math.inf).argmax().item()
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), a.shape)]
    raise AssertionError(
        f"{name}: relative RMS {found:.2e} is above {rms:.2e}; worst of {a.numel()} elements {index}: "
        f"got {a.flatten()[worst]:.9g}, expected {b.flatten()[worst]:.9g}"
    )


@dataclass(frozen=True)
class Golden:
    """Inputs of an operation and its reference."""

    operation: str
    arguments: dict[str, Any]
    """Keyword arguments of the kernel; tensors to differentiate require a gradient."""
    reference: Callable[..., Any] = field(repr=False)
    outputs: tuple[str, ...] = field(repr=False)
    """Names of the outputs."""

    def results(self, kernel: Callable[..., Any]) -> dict[str, torch.Tensor]:
        """Returns the outputs of a kernel and, as `d<name>`, the gradients for golden output gradients."""
        given = self.arguments
        found = kernel(**given)
        found = found if isinstance(found, tuple | list) else (found,)
        results = {name: x for name, x in zip(self.outputs, found, strict=False) if x is not None}
        leaves = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad}
        tops = {name: x for name, x in results.items() if x.requires_grad}
        cotangents = [values(x.shape, seed=101 + i).to(x) for i, x in enumerate(tops.values())]
        grads = torch.autograd.grad(list(tops.values()), list(leaves.values()), cotangents, allow_unused=True)
        for name, grad in zip(leaves, grads, strict=True):
            results["d" + name] = torch.zeros_like(leaves[name]) if grad is None else grad
        return results

    def expected(self) -> dict[str, torch.Tensor]:
        """Returns the outputs and gradients of the reference, in f64 on the CPU."""
        wide = {
            name: x.detach().cpu().double().requires_grad_(x.requires_grad)
            if isinstance(x, torch.Tensor) and x.is_floating_point()
            else (x.cpu() if isinstance(x, torch.Tensor) else x)
            for name, x in self.arguments.items()
        }
        case = Golden(self.operation, wide, self.reference, self.outputs)
        return {name: x.detach() for name, x in case.results(self.reference).items()}

    def check(self, kernel: Callable[..., Any], *, rms: float = 1e-5) -> dict[str, float]:
        """Compares every output and gradient of a kernel with the reference; returns their relative RMS."""
        expected, found = self.expected(), self.results(kernel)
        if found.keys() != expected.keys():
            raise AssertionError(f"{self.operation}: got {sorted(found)}, expected {sorted(expected)}")
        return {name: assert_close(found[name], expected[name], rms=rms, name=name) for name in expected}


def golden(
    operation: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    **shape: Any,  # noqa: ANN401
) -> Golden:
    """Returns golden inputs of an operation in `dtype`; gates and states stay f32.

    >>> import ballast.ops
    >>> from ballast import testing
    >>> case = testing.golden("gated_rms_norm", rows=3, width=8)
    >>> sorted(case.check(ballast.ops.gated_rms_norm))
    ['dweight', 'dx', 'dz', 'y']
    """
    if operation not in _CASES:
        raise UsageError(f"unknown operation {operation!r}; use one of {', '.join(_CASES)}")
    inputs, reference, outputs = _CASES[operation]
    maker = _Maker(dtype, device, seed)
    return Golden(operation, inputs(maker, **shape), reference, outputs)


@dataclass
class _Maker:
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


def _spans(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[tuple[int, slice]]:
    """Row of the batch and tokens of every sequence."""
    if cu_seqlens is None:
        return [(b, slice(0, x.shape[1])) for b in range(x.shape[0])]
    return [(0, slice(*pair)) for pair in itertools.pairwise(cu_seqlens.tolist())]


# Gated delta rule


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
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outputs, finals = [], []
    for n, (b, tokens) in enumerate(_spans(q, cu_seqlens)):
        state = q.new_zeros(v.shape[2], q.shape[3], v.shape[3])
        if initial_state is not None:
            state = initial_state[n].double()
        for t in range(tokens.start, tokens.stop):
            state = g[b, t].exp()[:, None, None] * state
            delta = beta[b, t][:, None] * (v[b, t] - torch.einsum("hkv,hk->hv", state, k[b, t]))
            state = state + k[b, t][:, :, None] * delta[:, None, :]
            outputs.append(scale * torch.einsum("hkv,hk->hv", state, q[b, t]))
        finals.append(state)
    o = torch.stack(outputs).reshape(v.shape) if outputs else torch.zeros_like(v)
    shape = (len(finals), v.shape[2], q.shape[3], v.shape[3])
    return o, torch.stack(finals).reshape(shape) if output_final_state else None


def _gated_delta_rule_inputs(
    make: _Maker,
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


# Convolution


def causal_conv1d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = "silu",
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """silu of the causal depthwise convolution in f64; x [B, C, T], weight [C, W], states [N, C, W-1]."""
    x, weight = x.double(), weight.double()
    before = weight.shape[1] - 1
    outputs, finals = [], []
    for n, (b, tokens) in enumerate(_spans(x.transpose(1, 2), cu_seqlens)):
        state = x.new_zeros(x.shape[1], before) if initial_states is None else initial_states[n].double()
        row = torch.cat([state, x[b, :, tokens]], dim=-1)
        count = row.shape[-1] - before
        outputs.append(sum(weight[:, j : j + 1] * row[:, j : j + count] for j in range(before + 1)))
        finals.append(row[:, row.shape[-1] - before :])
    y = torch.cat(outputs, dim=-1) if cu_seqlens is not None else torch.stack(outputs)
    y = y.reshape(x.shape)
    y = F.silu(y) if activation in ("silu", "swish") else y
    return (y, torch.stack(finals)) if return_final_states else y


def _causal_conv1d_inputs(
    make: _Maker,
    batch: int = 1,
    tokens: int = 64,
    channels: int = 24,
    width: int = 4,
    initial_states: bool = False,
    lengths: Sequence[int] | None = None,
    **options: Any,  # noqa: ANN401
) -> dict[str, Any]:
    batch, tokens, sequences, packing = make.offsets(batch, tokens, lengths)
    tensors = {"x": make(batch, channels, tokens), "weight": make(channels, width)}
    if initial_states:
        tensors["initial_states"] = make(sequences, channels, width - 1)
    return {**tensors, **packing, "activation": "silu", **options}


# Gated RMSNorm


def gated_rms_norm_reference(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """x / sqrt(mean x^2 + eps) weight silu(z) in f64."""
    x, z, weight = x.double(), z.double(), weight.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight * F.silu(z)


def _gated_rms_norm_inputs(make: _Maker, rows: int = 12, width: int = 32, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    x, z = make(rows, width, low=-2.0, high=2.0), make(rows, width, low=-3.0, high=3.0)
    return {"x": x, "z": z, "weight": make(width, low=0.5, high=1.5, f32=True), **options}


# Attention


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
    for b, tokens in _spans(q, cu_seqlens):
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


def _attention_inputs(
    make: _Maker,
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


def _selection(make: _Maker, batch: int, tokens: int, topk: int, packing: dict[str, Any]) -> torch.Tensor:
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
    for b, tokens in _spans(q, cu_seqlens):
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
    for b, tokens in _spans(q, cu_seqlens):
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


def _indexer_loss_inputs(
    make: _Maker,
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


# Linear cross entropy


def linear_cross_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross entropy of the projection in f64, with all logits in memory."""
    logits = hidden.double() @ weight.double().T
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    counted = targets != ignore_index
    logits, targets = logits[counted], targets[counted]
    total = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="sum")
    total = total + z_loss * torch.logsumexp(logits, dim=-1).square().sum()
    return total if reduction == "sum" else total / max(int(counted.sum()), 1)


def _linear_cross_entropy_inputs(
    make: _Maker,
    tokens: int = 40,
    width: int = 16,
    vocabulary: int = 50,
    **options: Any,  # noqa: ANN401
) -> dict[str, Any]:
    hidden, weight = make(tokens, width), make(vocabulary, width)
    targets = torch.arange(tokens, device=make.device) * 7919 % vocabulary
    return {"hidden": hidden, "weight": weight, "targets": targets, **options}


_CASES: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., Any], tuple[str, ...]]] = {
    "chunk_gated_delta_rule": (_gated_delta_rule_inputs, gated_delta_rule_reference, ("o", "final_state")),
    "causal_conv1d_fn": (_causal_conv1d_inputs, causal_conv1d_reference, ("y", "final_states")),
    "gated_rms_norm": (_gated_rms_norm_inputs, gated_rms_norm_reference, ("y",)),
    "attention": (_attention_inputs, attention_reference, ("o", "lse")),
    "indexer_loss": (_indexer_loss_inputs, indexer_loss_reference, ("loss",)),
    "linear_cross_entropy": (_linear_cross_entropy_inputs, linear_cross_entropy_reference, ("loss",)),
}
