"""The exceptions. Each has the exit code that the command line ends with for the same error."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar


class BallastError(Exception):
    """The base class of all exceptions of Ballast.

    `file`, `tensor` and `byte` say where the error is, as far as that is known.
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
    """A check failed: the input can be read, and it is not what it must be."""

    exit_code = 1


class UsageError(BallastError, ValueError):
    """An argument or a setting is wrong."""

    exit_code = 2


class InputError(BallastError):
    """An input is missing or malformed."""

    exit_code = 3


class SpaceError(BallastError):
    """Memory or disk space is not enough."""

    exit_code = 4


class NonFiniteError(BallastError):
    """A NaN or an infinity appeared."""

    exit_code = 5


class BallastWarning(UserWarning):
    """A warning that the command line prints on stderr."""
