"""`ballast.testing`: its promises to authors of kernels."""

from __future__ import annotations

import pytest
import torch

from ballast import ops, testing
from ballast.errors import UsageError


@pytest.mark.parametrize("tokens", [1, 63, 64, 200])
def test_a_kernel_is_tested_in_five_lines(tokens: int) -> None:
    case = testing.golden("chunk_gated_delta_rule", tokens=tokens, dtype=torch.bfloat16)
    case.check(ops.chunk_gated_delta_rule, rms=1e-2)


def test_golden_values_have_the_same_bits_everywhere() -> None:
    # Computed with Python's integers.
    def value(i: int, seed: int) -> float:
        x = (i * 0x9E3779B1 + seed * 0x85EBCA77) % 2**32
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> shift)) * factor) % 2**32
        return -1 + 2 * (x ^ (x >> 16)) / 2**32

    assert testing.values([2, 3], 5).flatten().tolist() == [value(i, 5) for i in range(1, 7)]
    many = testing.values([100_000])
    assert abs(many.mean()) < 0.01 and abs(many.square().mean() - 1 / 3) < 0.01


def test_a_wrong_gradient_is_named_with_its_worst_element() -> None:
    case = testing.golden("gated_rms_norm")

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
            return x.clone()

        @staticmethod
        def backward(ctx, dx: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
            dx = dx.clone()
            dx[3, 7] += 1
            return dx

    with pytest.raises(AssertionError, match=r"dz: relative RMS .* worst of 384 elements \[3, 7\]: got "):
        case.check(lambda x, z, weight: ops.gated_rms_norm(x, Wrong.apply(z), weight))


def test_a_nan_a_shape_and_a_missing_output_do_not_pass() -> None:
    one = torch.ones(2)
    with pytest.raises(AssertionError, match=r"worst of 2 elements \[1\]: got nan, expected 1"):
        testing.assert_close(torch.tensor([1.0, float("nan")]), one, rms=10)
    with pytest.raises(AssertionError, match=r"got the shape \[1\], expected \[2\]"):
        testing.assert_close(one[:1], one)
    assert testing.assert_close(torch.full((2,), 1e-7), torch.zeros(2), rms=1e-6) > 0
    case = testing.golden("chunk_gated_delta_rule", tokens=3)
    with pytest.raises(AssertionError, match="expected .*final_state"):
        case.check(lambda **given: ops.chunk_gated_delta_rule(**given)[0])
    with pytest.raises(UsageError, match="unknown operation 'rule'; use one of chunk_gated_delta_rule"):
        testing.golden("rule")


@pytest.mark.parametrize(
    ("reference", "shapes"),
    [
        (testing.gated_rms_norm_reference, [(3, 4), (3, 4), (4,)]),
        (testing.attention_reference, [(1, 5, 2, 3), (1, 5, 1, 3), (1, 5, 1, 2)]),
        (testing.causal_conv1d_reference, [(1, 3, 6), (3, 4)]),
    ],
)
def test_the_references_pass_a_numeric_gradient_check(
    reference: object, shapes: list[tuple[int, ...]]
) -> None:
    inputs = tuple(testing.values(shape, seed).requires_grad_() for seed, shape in enumerate(shapes))
    assert torch.autograd.gradcheck(reference, inputs)


def test_the_references_agree_with_torch() -> None:
    q, k, v = (testing.values([1, 9, 2, 4], seed) for seed in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    )
    testing.assert_close(testing.attention_reference(q, k, v), expected.transpose(1, 2), rms=1e-12)
    hidden, weight, targets = testing.values([6, 3]), testing.values([5, 3], 1), torch.arange(6) % 5
    found = testing.linear_cross_entropy_reference(
        hidden, weight, targets, ignore_index=2, label_smoothing=0.2
    )
    expected = torch.nn.functional.cross_entropy(
        hidden @ weight.T, targets, ignore_index=2, label_smoothing=0.2
    )
    # torch spreads the smoothing over the same classes.
    testing.assert_close(found, expected, rms=1e-12)
