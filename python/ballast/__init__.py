"""Mixed-precision tools for hybrid Gated-DeltaNet language models whose critical tensors stay f32.

- `ballast.contract`: which tensors must be f32, and why.
- `ballast.errors`: the exceptions.

Neither torch nor numpy is needed. With torch there are also:

- `ballast.ops`: the kernels as operations of torch, on the CPU.
- `ballast.testing`: golden inputs and f64 references for authors of kernels.
- `patch_transformers`: linear-attention layers of transformers on these kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ballast import contract
from ballast._native import VERSION as __version__
from ballast.errors import BallastError
from ballast.threads import get_num_threads, set_num_threads

if TYPE_CHECKING:
    from ballast.transformers import Patch

__all__ = [
    "BallastError",
    "__version__",
    "contract",
    "get_num_threads",
    "patch_transformers",
    "set_num_threads",
]


def patch_transformers() -> Patch:
    """Puts Qwen3-Next, Qwen3.5 and Qwen3.5-MoE of transformers on the kernels of Ballast, on the CPU.

    Returns the patch, whose `undo` takes it back; see `ballast.transformers`.
    """
    from ballast.transformers import patch_transformers

    return patch_transformers()
