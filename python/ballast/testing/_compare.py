"""A comparison that names the worst element."""

from __future__ import annotations

import math

from ballast._torch import torch


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
