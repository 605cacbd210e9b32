"""`from_pretrained` that keeps the f32 bits of protected tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ballast.torch.tensors import PolicyLike, protected_tensors


@contextmanager
def loading(policy: PolicyLike = "strict") -> Iterator[None]:
    """Lets `from_pretrained` load protected tensors in f32, and all others in the dtype it is asked for.

    Without it, transformers loads the F32 tensors of a released checkpoint as bf16, and the bits are lost.

    ```python
    with loading("strict"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ```

    Later casts are the subject of `keep_fp32`.
    """
    from transformers import PreTrainedModel

    plan_of_transformers = PreTrainedModel._get_dtype_plan

    def plan(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        names = _raise_to_fp32(model, policy)
        # The plan's keys are regular expressions, searched in the parameter's name.
        exact = {f"^{re.escape(name)}$": torch.float32 for name in names}
        return {**exact, **plan_of_transformers(model, dtype)}

    PreTrainedModel._get_dtype_plan = plan
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = plan_of_transformers


def _raise_to_fp32(model: nn.Module, policy: PolicyLike) -> list[str]:
    """Makes the protected tensors of a model without values f32, so that missing ones are drawn in f32.

    Returns their names.
    """
    found = protected_tensors(model, policy)
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
