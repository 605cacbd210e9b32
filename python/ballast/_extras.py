"""Errors for missing optional packages, which name the extra to install."""

from __future__ import annotations

__all__ = ["missing"]

_EXTRAS = {"torch": "torch", "transformers": "hf", "accelerate": "hf", "peft": "hf"}


def missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Returns an error that names the extra of the package, or `error` itself if no extra has it."""
    if error.name not in _EXTRAS:
        return error
    extra = _EXTRAS[error.name]
    message = f"{error.name} is not installed; install the extra `{extra}`: pip install '.[{extra}]'"
    return ModuleNotFoundError(message, name=error.name)
