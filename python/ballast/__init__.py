"""Mixed-precision tools for hybrid Gated-DeltaNet language models whose critical tensors stay f32.

- `ballast.contract`: which tensors must be f32, and why.
- `ballast.checkpoint`: inspect, audit, convert, diff and repair checkpoints.
- `ballast.lab`: what each precision choice costs on a model, against f64.
- `ballast.trace`: one pass of a model, compared with another framework's tensors.
- `ballast.torch`: f32 that survives PyTorch: loading, casts, FSDP2, training and saving (extra `torch`).
- `ballast.errors`: the exceptions.

Only `ballast.torch` needs torch, and nothing needs numpy. `python -m ballast` is the whole command line.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from ballast import errors
from ballast._native import VERSION as __version__
from ballast.errors import BallastError, BallastWarning

if TYPE_CHECKING:
    from ballast import checkpoint, contract, lab, trace

__all__ = [
    "BallastError",
    "BallastWarning",
    "__version__",
    "checkpoint",
    "contract",
    "errors",
    "lab",
    "trace",
]

_MODULES = frozenset({"checkpoint", "contract", "lab", "torch", "trace"})


def __getattr__(name: str) -> ModuleType:
    """Imports a module when it is first used, which keeps `import ballast` fast."""
    if name in _MODULES:
        return importlib.import_module(f"ballast.{name}")
    raise AttributeError(f"module 'ballast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
