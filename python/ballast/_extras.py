"""Errors of optional packages that are not installed: they name the extra that brings them."""

from __future__ import annotations

__all__ = ["missing"]

_EXTRAS = {"torch": "torch", "transformers": "hf", "accelerate": "hf", "peft": "hf"}


def missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Returns an error with the extra in its message; `error` itself if no extra has the package."""
    if error.name not in _EXTRAS:
        return error
    extra = _EXTRAS[error.name]
    message = (
        f"{error.name} is not installed; the extra `{extra}` of ballast-ml has it: pip install '.[{extra}]'"
    )
    return ModuleNotFoundError(message, name=error.name)
