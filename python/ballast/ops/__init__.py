"""Ballast's kernels as PyTorch operations, for f32 and bf16 tensors on the CPU.

They are registered with `torch.library`: autograd, `torch.compile(fullgraph=True)`, activation checkpointing
and FSDP2 work with them. Arithmetic is f32 for both storage types. A contiguous input is not copied.
All values saved for backward are tensors, which hooks can see.

| operation | signature of, or purpose |
|---|---|
| `chunk_gated_delta_rule`, `fused_recurrent_gated_delta_rule` | flash-linear-attention |
| `causal_conv1d_fn`, `causal_conv1d_update` | causal-conv1d, with `cu_seqlens` |
| `gated_rms_norm` | the output norm of Gated DeltaNet |
| `attention` | causal softmax attention; f32 products and logits |
| `indexer_topk`, `indexer_loss` | sparse attention |
| `linear_cross_entropy` | output projection and loss, without all logits in memory |
"""

from ballast import _torch  # noqa: F401 - first, for its error
from ballast.ops._tensors import apply_num_threads
from ballast.ops.attention import attention
from ballast.ops.conv import causal_conv1d_fn, causal_conv1d_update
from ballast.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from ballast.ops.indexer import indexer_loss, indexer_topk
from ballast.ops.linear_cross_entropy import linear_cross_entropy
from ballast.ops.norm import gated_rms_norm

__all__ = [
    "attention",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "gated_rms_norm",
    "indexer_loss",
    "indexer_topk",
    "linear_cross_entropy",
]

apply_num_threads()
