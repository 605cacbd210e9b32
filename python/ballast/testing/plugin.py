"""Fixtures of pytest for leak and conformance tests.

In conftest.py:

    pytest_plugins = ["ballast.testing.plugin"]

| fixture | purpose |
|---|---|
| `assert_no_leak` | `ballast.testing.assert_no_leak` with the seeds of torch set, and restored afterwards |
| `assert_conforms` | `ballast.testing.conformance`, which fails with the table |

Reports of a failed test are sections of pytest's output. Nothing else in `ballast.testing` needs pytest.

>>> from ballast.testing import plugin
>>> sorted(name for name in vars(plugin) if name.startswith("assert_"))
['assert_conforms', 'assert_no_leak']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ballast import testing
from ballast._torch import torch

__all__ = ["assert_conforms", "assert_no_leak"]


@pytest.fixture
def assert_no_leak(request: pytest.FixtureRequest) -> Iterator[Callable[..., testing.LeakReport]]:
    """Returns `ballast.testing.assert_no_leak`; torch's random numbers are the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)

        def run(model: torch.nn.Module, *args: Any, **kwargs: Any) -> testing.LeakReport:  # noqa: ANN401
            __tracebackhide__ = True
            report = testing.find_leaks(model, *args, **kwargs)
            request.node.add_report_section("call", "leaks", str(report))
            report.raise_if_failed()
            return report

        yield run


@pytest.fixture
def assert_conforms(request: pytest.FixtureRequest) -> Callable[..., testing.Conformance]:
    """Returns `ballast.testing.conformance`; a kernel that fails a case fails the test."""

    def run(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> testing.Conformance:  # noqa: ANN401
        __tracebackhide__ = True
        report = testing.conformance(fn, *args, **kwargs)
        request.node.add_report_section("call", "conformance", str(report))
        report.raise_if_failed()
        return report

    return run
