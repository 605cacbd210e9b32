"""Commands as functions: keywords become options, and the JSON document becomes dataclasses."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import types
import typing
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from os import PathLike
from typing import Any, TypeVar, Union

from ballast import _native
from ballast.contract import Policy
from ballast.errors import BallastError, BallastWarning, UsageError

Path = str | PathLike[str]
"""A file or folder."""

Progress = Callable[[str, int, int], object]
"""Callback for progress: phase, amount done, and total, in bytes or steps; a total of 0 is unknown.

An exception raised in it cancels the command.
"""


@dataclass(frozen=True)
class Report:
    """The result of a command."""

    _document: str = field(repr=False, compare=False, kw_only=True)

    def to_json(self) -> str:
        """Returns the JSON document that the command line prints with `--json`."""
        return self._document


_Report = TypeVar("_Report", bound=Report)


def run(
    kind: type[_Report],
    command: str,
    *paths: Path | None,
    policy: Path | Policy | None = None,
    progress: Progress | None = None,
    may_leave: bool = False,
    **options: object,
) -> _Report:
    """Runs a command and returns its document as a `kind`.

    An option that is None or False is omitted; one that is True is a flag. With `may_leave`, a command that
    does not stop soon after an interrupt continues in the background and writes nothing.
    """
    for path in paths:
        # A number would be taken for a file name.
        if not isinstance(path, (str, bytes, PathLike, type(None))):
            raise UsageError(f"a path must be a str or an os.PathLike, got {type(path).__name__} {path!r}")
    args = [command]
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            args.append(option)
        elif isinstance(value, tuple):
            args += [option, *map(_word, value)]
        elif value is not None and value is not False:
            args.append(f"{option}={_word(value)}")
    args += ["--", *(_word(path) for path in paths if path is not None)]
    handle = None if policy is None else Policy.load(policy)._handle
    try:
        document, _, found = _native.call(args, handle, progress, may_leave)
    except BallastError as error:
        message = _with_keywords(error.message, options)
        raise type(error)(message, error.file, error.tensor, error.byte) from None
    for warning in found:
        warnings.warn(_with_keywords(warning, options), BallastWarning, stacklevel=3)
    report: _Report = _build(kind, {**json.loads(document), "_document": document})
    return report


def _with_keywords(message: str, options: dict[str, object]) -> str:
    """Returns a message of the command line with its options replaced by keywords."""

    def keyword(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        if name not in options:
            return found[0]
        return f"{name}=True" if isinstance(options[name], bool) else name

    # The parser of the command line quotes an option with its form, as in '--dtype <DTYPE>'.
    return re.sub(r"(?<!')--([a-z][a-z0-9-]*)", keyword, message)


def _word(value: object) -> str:
    return os.fsdecode(value) if isinstance(value, (str, bytes, PathLike)) else str(value)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _build(kind: Any, value: Any) -> Any:  # noqa: ANN401 (any type of a field, any value of a document)
    """Returns `value`, a part of a document, as a `kind`. The field `from_` has the key `from`."""
    if isinstance(kind, type) and is_dataclass(kind):
        keys = {f.name: f.name.rstrip("_") for f in fields(kind)}
        return kind(**{n: _build(_hints(kind)[n], value[key]) for n, key in keys.items() if key in value})
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and inner[-1] is Ellipsis:
        return tuple(_build(inner[0], item) for item in value)
    if origin is tuple:
        return tuple(_build(part, item) for part, item in zip(inner, value, strict=True))
    if origin is dict:
        return {key: _build(inner[1], item) for key, item in value.items()}
    if origin in (Union, types.UnionType):
        return None if value is None else _build(inner[0], value)
    # JSON has neither NaN nor infinity: both are null.
    return math.nan if kind is float and value is None else value
