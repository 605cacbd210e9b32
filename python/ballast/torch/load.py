"""`from_pretrained` that keeps the f32 bits of protected tensors."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ballast._extras import missing
from ballast.torch.tensors import PolicyLike, protected_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def loading(policy: PolicyLike = "strict") -> Iterator[None]:
    """Lets `from_pretrained` load protected tensors in f32, and all others in the requested dtype.

    Without it, transformers loads the F32 tensors of a released checkpoint as bf16, and the bits are lost.

    ```python
    with loading("strict"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ```

    Blocks may overlap and end in any order: the policies of all open blocks apply, and the last one to end
    restores transformers. `keep_fp32` protects from later casts.
    """
    block = _Block(policy)
    _enter(block)
    try:
        yield
    finally:
        _leave(block)


@dataclass(eq=False)
class _Block:
    """A `loading` block; two with the same policy differ."""

    policy: PolicyLike


# Blocks may end out of order (generators, threads), so a block cannot restore what it found: the first would
# restore the function of transformers while the second is open, and the second would restore the first's.
_open: list[_Block] = []
_plan_of_transformers: Callable[..., dict[str, torch.dtype]] | None = None
_lock = threading.Lock()


def _enter(block: _Block) -> None:
    global _plan_of_transformers
    try:
        from transformers import PreTrainedModel
    except ModuleNotFoundError as error:
        raise missing(error) from None

    with _lock:
        if not _open:
            _plan_of_transformers = PreTrainedModel._get_dtype_plan
            PreTrainedModel._get_dtype_plan = _plan
        _open.append(block)


def _leave(block: _Block) -> None:
    from transformers import PreTrainedModel

    with _lock:
        _open.remove(block)
        # A later replacement by others stays.
        if not _open and PreTrainedModel._get_dtype_plan is _plan:
            PreTrainedModel._get_dtype_plan = _plan_of_transformers


def _plan(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Stands in for `PreTrainedModel._get_dtype_plan` while a block is open."""
    names = {name for block in tuple(_open) for name in _raise_to_fp32(model, block.policy)}
    # The plan's keys are regular expressions, searched in the parameter's name.
    exact = {f"^{re.escape(name)}$": torch.float32 for name in sorted(names)}
    return {**exact, **_plan_of_transformers(model, dtype)}


def _raise_to_fp32(model: nn.Module, policy: PolicyLike) -> list[str]:
    """Makes the protected tensors of a meta model f32, so that missing ones are initialized in f32.

    Returns their names.
    """
    found = protected_tensors(model, policy, warn=True)
    for protected in found:
        tensor = protected.tensor
        if tensor is not None and tensor.is_meta and tensor.is_floating_point():
            raised = torch.empty_like(tensor, dtype=torch.float32)
            if isinstance(tensor, nn.Parameter):
                raised = nn.Parameter(raised, requires_grad=tensor.requires_grad)
                protected.module._parameters[protected.key] = raised
            else:
                protected.module._buffers[protected.key] = raised
    return [protected.name for protected in found]
