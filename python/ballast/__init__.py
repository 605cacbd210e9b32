"""Mixed-precision tools for hybrid Gated-DeltaNet language models whose critical tensors stay f32.

- `ballast.contract`: which tensors must be f32, and why.
- `ballast.checkpoint`: inspect, audit, convert, diff and repair checkpoints.
- `ballast.lab`: what each precision choice costs on a model, against f64.
- `ballast.trace`: one pass of a model, compared with another framework's tensors.
- `ballast.errors`: the exceptions.

None of these needs torch or numpy. `python -m ballast` is the whole command line. With torch (extra `torch`):

- `ballast.torch`: f32 that survives PyTorch: loading, casts, FSDP2, training and saving.
- `ballast.ops`: the kernels as operations of torch, on the CPU.
- `ballast.testing`: golden inputs and f64 references for authors of kernels.
- `patch_transformers`: linear-attention layers of transformers on these kernels.
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
    """Imports a module when it is first used, which keeps `import ballast` fast."""
    if name in _MODULES:
        return importlib.import_module(f"ballast.{name}")
    raise AttributeError(f"module 'ballast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_MODULES.union(__all__))


def patch_transformers() -> Patch:
    """Puts Qwen3-Next, Qwen3.5 and Qwen3.5-MoE of transformers on the kernels of Ballast, on the CPU.

    Returns the patch, whose `undo` takes it back; see `ballast.transformers`.
    """
    from ballast.transformers import patch_transformers

    return patch_transformers()
