"""Number of threads of the kernels: torch's, so that both use the same processors."""

from __future__ import annotations

import os
import sys

from ballast.errors import UsageError

_count: int | None = None


def set_num_threads(count: int) -> None:
    """Sets the number of threads of the kernels and of torch.

    Both share one number, so `torch.set_num_threads` changes it too. Before torch is imported, the number is
    kept until `ballast.ops` is.

    >>> import ballast
    >>> ballast.set_num_threads(1)
    >>> ballast.get_num_threads()
    1
    """
    global _count
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"number of threads must be 1 or more, got {count!r}")
    _count = count
    if "torch" in sys.modules:
        apply_num_threads()


def get_num_threads() -> int:
    """Returns the number of threads of the kernels."""
    if "torch" in sys.modules:
        import torch

        apply_num_threads()
        return torch.get_num_threads()
    return _count or os.cpu_count() or 1


def apply_num_threads() -> None:
    """Passes a number that was set before torch was imported on to torch."""
    global _count
    if _count is not None:
        import torch

        torch.set_num_threads(_count)
        _count = None
