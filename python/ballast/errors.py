"""Exceptions. Each has the exit code of the command line for the same error."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar


class BallastError(Exception):
    """Base class of all exceptions of Ballast.

    `file`, `tensor` and `byte` locate the error, where known.
    """

    exit_code: ClassVar[int] = 3

    def __init__(
        self,
        message: str,
        file: Path | str | None = None,
        tensor: str | None = None,
        byte: int | None = None,
    ) -> None:
        """Creates the exception; `byte` is an offset in `file`."""
        super().__init__(message, file, tensor, byte)
        self.message = message
        self.file = None if file is None else Path(file)
        self.tensor = tensor
        self.byte = byte

    def __str__(self) -> str:
        """Returns the message."""
        return self.message


class CheckFailed(BallastError):
    """A check failed: the input is readable, but not as required."""

    exit_code = 1


class UsageError(BallastError, ValueError):
    """An argument or setting is wrong."""

    exit_code = 2


class InputError(BallastError):
    """An input is missing or malformed."""

    exit_code = 3


class SpaceError(BallastError):
    """Not enough memory or disk space."""

    exit_code = 4


class NonFiniteError(BallastError):
    """A NaN or infinity appeared."""

    exit_code = 5


class BallastWarning(UserWarning):
    """A warning that the command line prints on stderr."""
