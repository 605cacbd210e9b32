"""Tests for authors of trainers and kernels.

Packed sequences stay apart in a model, forward and backward (`assert_no_leak`; as a fixture of pytest in
`ballast.testing.plugin`):

>>> import torch
>>> from ballast.testing import find_leaks
>>> model = torch.nn.Sequential(torch.nn.Embedding(20, 4), torch.nn.LSTM(4, 4, batch_first=True))
>>> [(leak.module, leak.kind) for leak in find_leaks(model, pack="none").leaks]
[('1', 'state')]

A delta-rule kernel against f64, as a table of errors per case, output and gradient:

>>> from ballast import ops, testing
>>> report = testing.conformance(ops.chunk_gated_delta_rule, cases=["one token", "packed"])
>>> print(str(report).splitlines()[-1])
PASSED: 0 of 2 cases failed, 15 comparisons

A test of any kernel, on any device, with golden inputs, for the outputs and every gradient:

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
| `chunk_kda` | the same |
| `causal_conv1d_fn` | batch, tokens, channels, width, initial_states |
| `gated_rms_norm` | rows, width |
| `attention` | batch, tokens, heads, kv_heads, key_dim, value_dim, sinks, topk |
| `indexer_loss` | batch, tokens, heads, dim, attention_heads, kv_heads, key_dim, topk |
| `linear_cross_entropy` | tokens, width, vocabulary |

Operations with `batch` also take `lengths`, for packed sequences of these lengths. Other keywords are
arguments of the kernel.
"""

from __future__ import annotations

from ballast import _torch  # noqa: F401 - first, for its error
from ballast.testing._attention import attention_reference, indexer_loss_reference, indexer_topk_reference
from ballast.testing._compare import assert_close, relative_rms
from ballast.testing._conformance import CaseResult, Conformance, Measured, conformance
from ballast.testing._delta_rule import gated_delta_rule_reference, kda_reference
from ballast.testing._golden import Golden, golden
from ballast.testing._inputs import values
from ballast.testing._layers import (
    causal_conv1d_reference,
    gated_rms_norm_reference,
    linear_cross_entropy_reference,
)
from ballast.testing._leaks import Leak, LeakReport, assert_no_leak, find_leaks

__all__ = [
    "CaseResult",
    "Conformance",
    "Golden",
    "Leak",
    "LeakReport",
    "Measured",
    "assert_close",
    "assert_no_leak",
    "attention_reference",
    "causal_conv1d_reference",
    "find_leaks",
    "gated_delta_rule_reference",
    "gated_rms_norm_reference",
    "conformance",
    "golden",
    "indexer_loss_reference",
    "indexer_topk_reference",
    "kda_reference",
    "linear_cross_entropy_reference",
    "relative_rms",
    "values",
]
