"""Protected tensors that stay f32 through loading, casts, sharding, training and saving in PyTorch.

- `loading`: lets `from_pretrained` keep the f32 bits of protected tensors.
- `keep_fp32`: protects them from later casts, copies, merges and loads.
- `fully_shard`, `mp_policy`: FSDP2 with protected tensors stored, computed and reduced in f32.
- `Ledger`: checks them at every step, and names the first non-finite value before the update.
- `save_pretrained`: saves protected tensors in F32 and the rest in bf16.

Needs the extra `torch`; `loading`, `save_pretrained` and the Trainer need the extra `hf`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ballast import _torch  # noqa: F401 - first, for its error

if TYPE_CHECKING:
    from ballast.torch.keep import Kept, RoundedWarning, keep_fp32
    from ballast.torch.ledger import Ledger
    from ballast.torch.load import loading
    from ballast.torch.save import save_pretrained
    from ballast.torch.shard import fully_shard, mp_policy

__all__ = [
    "Kept",
    "Ledger",
    "RoundedWarning",
    "fully_shard",
    "keep_fp32",
    "loading",
    "mp_policy",
    "save_pretrained",
]

_FILES = {
    "Kept": "keep",
    "Ledger": "ledger",
    "RoundedWarning": "keep",
    "fully_shard": "shard",
    "keep_fp32": "keep",
    "loading": "load",
    "mp_policy": "shard",
    "save_pretrained": "save",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Imports a name on first use, so that one part does not import the libraries of the others."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
