"""Mixed-precision tools for hybrid Gated-DeltaNet language models whose critical tensors stay f32.

- `ballast.contract`: which tensors must be f32, and why.
- `ballast.checkpoint`: inspect, audit, convert, diff and repair checkpoints.
- `ballast.lab`: the cost of each precision choice on a model, measured against f64.
- `ballast.trace`: one pass of a model, compared with another framework's tensors.
- `ballast.errors`: the exceptions.

None of these needs torch or numpy. `python -m ballast` is the whole command line. With torch (extra `torch`):

- `ballast.torch`: keeps protected tensors in f32 through loading, casts, FSDP2, training and saving.
- `ballast.ops`: the kernels as PyTorch operations on the CPU.
- `ballast.testing`: leak tests for trainers; conformance, golden inputs and f64 references for kernels.
- `patch_transformers`: runs the linear-attention layers of transformers on these kernels.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from ballast import errors
from ballast._native import VERSION as __version__
from ballast.errors import BallastError, BallastWarning
from ballast.threads import get_num_threads, set_num_threads

if TYPE_CHECKING:
    from ballast import checkpoint, contract, lab, ops, testing, trace
    from ballast.transformers import Patch

__all__ = [
    "BallastError",
    "BallastWarning",
    "__version__",
    "checkpoint",
    "contract",
    "errors",
    "get_num_threads",
    "lab",
    "ops",
    "patch_transformers",
    "set_num_threads",
    "testing",
    "trace",
]

_MODULES = frozenset({"checkpoint", "contract", "lab", "ops", "testing", "torch", "trace", "transformers"})


def __getattr__(name: str) -> ModuleType:
    """Imports a module on first use, which keeps `import ballast` fast."""
    if name in _MODULES:
        return importlib.import_module(f"ballast.{name}")
    raise AttributeError(f"module 'ballast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_MODULES.union(__all__))


def patch_transformers() -> Patch:
    """Runs the linear attention of Qwen3-Next, Qwen3.5 and Qwen3.5-MoE on Ballast's kernels, on the CPU.

    Returns the patch; its `undo` reverts it. See `ballast.transformers`.
    """
    from ballast.transformers import patch_transformers

    return patch_transformers()
