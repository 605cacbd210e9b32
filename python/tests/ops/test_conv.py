"""The causal convolution: packed sequences, and the decode step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ballast.errors import UsageError
from ballast.ops import causal_conv1d_fn, causal_conv1d_update
from ballast.testing import assert_close, causal_conv1d_reference, values


def test_it_is_the_convolution_of_torch() -> None:
    x, weight = values([2, 6, 50]).float(), values([6, 4], 1).float()
    expected = F.silu(F.conv1d(x, weight[:, None], padding=3, groups=6)[..., :50])
    for memory in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        assert_close(causal_conv1d_fn(memory, weight, activation="swish"), expected, rms=1e-6)


def test_sequence_numbers_and_offsets_mark_the_same_sequences() -> None:
    x, weight = values([2, 6, 30]).float(), values([6, 4], 1).float()
    numbers = torch.stack([torch.arange(30) // 10, torch.zeros(30).long()]).int()
    by_number = causal_conv1d_fn(x, weight, seq_idx=numbers, activation="silu")
    by_offset = causal_conv1d_fn(x, weight, cu_seqlens=torch.tensor([0, 10, 20, 30, 60]), activation="silu")
    assert torch.equal(by_number, by_offset)
    parts = [causal_conv1d_fn(x[:1, :, i : i + 10], weight, activation="silu") for i in (0, 10, 20)]
    assert torch.equal(by_number[:1], torch.cat(parts, dim=-1))
    with pytest.raises(UsageError, match="exclude each other"):
        causal_conv1d_fn(x, weight, seq_idx=numbers, cu_seqlens=torch.tensor([0, 60]), activation="silu")


@pytest.mark.parametrize("kept", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_decoding_continues_from_the_state_and_updates_it(dtype: torch.dtype, kept: int) -> None:
    x, weight = values([2, 6, 12]).to(dtype), values([6, 4], 1).to(dtype)
    expected = causal_conv1d_reference(x, weight)
    state = F.pad(x[..., :5], (kept, 0))[..., -kept:].clone()
    rms = 1e-6 if dtype == torch.float32 else 5e-3
    for t in (5, 6, 7):
        y = causal_conv1d_update(x[..., t], state, weight, activation="silu")
        assert_close(y, expected[..., t], rms=rms)
    y = causal_conv1d_update(x[..., 8:], state, weight, activation="silu")
    assert_close(y, expected[..., 8:], rms=rms)
    assert torch.equal(state, x[..., -kept:])


def test_final_states_are_stored_where_the_caller_wants_them() -> None:
    x, weight, out = values([2, 6, 9]).float(), values([6, 4], 1).float(), torch.empty(2, 6, 3)
    y, last = causal_conv1d_fn(x, weight, activation="silu", return_final_states=True, final_states_out=out)
    assert last is out and torch.equal(out, x[..., -3:]) and y.shape == x.shape


def test_what_the_kernel_has_not_is_refused() -> None:
    x, weight = torch.ones(1, 2, 3), torch.ones(2, 4)
    with pytest.raises(UsageError, match='activation must be "silu" or "swish", got None'):
        causal_conv1d_fn(x, weight)
    with pytest.raises(UsageError, match="bias must be None"):
        causal_conv1d_fn(x, weight, torch.ones(2), activation="silu")
    with pytest.raises(UsageError, match="kernel width must be 2 to 8, got 9"):
        causal_conv1d_fn(x, torch.ones(2, 9), activation="silu")
    with pytest.raises(UsageError, match=r"got \[1, 2, 3\] and \[3, 4\]"):
        causal_conv1d_fn(x, torch.ones(3, 4), activation="silu")
    with pytest.raises(UsageError, match="cache_seqlens and conv_state_indices must be None"):
        causal_conv1d_update(x, x, weight, activation="silu", cache_seqlens=torch.ones(1))
    with pytest.raises(UsageError, match="conv_state must have 3 or more columns"):
        causal_conv1d_update(x, x[..., :2], weight, activation="silu")
