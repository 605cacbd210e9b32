"""Saves checkpoints with protected tensors in F32 and the rest in bf16."""

from __future__ import annotations

import json
import warnings
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ballast._extras import missing
from ballast.errors import UsageError
from ballast.torch.keep import RoundedWarning
from ballast.torch.tensors import PolicyLike, plain_name, protected_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_pretrained(
    model: nn.Module,
    folder: str | PathLike[str],
    policy: PolicyLike = "strict",
    *,
    dtype: torch.dtype = torch.bfloat16,
    **kwargs: Any,  # noqa: ANN401 (as transformers has them)
) -> None:
    """Saves a transformers model with protected tensors in F32 and the other floats in `dtype`.

    Names, shards and config.json are those of `model.save_pretrained`, which gets the other arguments.
    Wrappers (DDP, torch.compile) are removed. With FSDP2, every rank must call it; rank 0 writes.
    `ballast audit` passes on the result.
    """
    inner = _unwrapped(model)
    state = _whole_state(inner)
    rank = _rank()
    if rank in (None, 0):
        _lower(inner, state, policy, dtype)
        inner.save_pretrained(folder, state_dict=state, **kwargs)
        _name_dtype(Path(folder) / "config.json", dtype)
    if rank is not None:
        torch.distributed.barrier()


def _unwrapped(model: nn.Module) -> PreTrainedModel:
    """Returns the transformers model inside its wrappers."""
    try:
        from transformers import PreTrainedModel
    except ModuleNotFoundError as error:
        raise missing(error) from None

    inner: object = model
    while isinstance(inner, nn.Module) and not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "peft_config"):
            raise UsageError("the model has adapters: call merge_and_unload() before save_pretrained")
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
    if not isinstance(inner, PreTrainedModel):
        raise UsageError(f"save_pretrained needs a transformers model, got {type(model).__name__}")
    return inner


def _rank() -> int | None:
    """Returns this process's rank, or None without a process group."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else None


def _whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state dict, gathered on rank 0 if the model is sharded."""
    if not any(hasattr(p, "full_tensor") for p in model.parameters()):
        return dict(model.state_dict())
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(model, options=options))


def _lower(model: nn.Module, state: dict[str, torch.Tensor], policy: PolicyLike, dtype: torch.dtype) -> None:
    """Casts a state dict in place. Tied tensors remain one tensor, which transformers then saves once."""
    protected = {tensor.name for tensor in protected_tensors(model, policy)}
    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    source = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
    rounded = []
    for name, tensor in state.items():
        if source.get(name, name) != name:
            state[name] = state[source[name]]
        elif isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            is_protected = plain_name(name) in protected
            if is_protected and tensor.dtype != torch.float32:
                rounded.append(name)
            state[name] = tensor.to(torch.float32 if is_protected else dtype)
    if rounded:
        warnings.warn(
            f"{', '.join(rounded)}: not f32 in memory; saved as F32, but bits were lost before",
            RoundedWarning,
            stacklevel=3,
        )


def _name_dtype(config: Path, dtype: torch.dtype) -> None:
    """Writes the dtype of the file to config.json, where transformers writes that of the model in memory."""
    document = json.loads(config.read_text(encoding="utf-8"))
    word = str(dtype).removeprefix("torch.")
    for part in (document, document.get("text_config"), document.get("vision_config")):
        if isinstance(part, dict) and "dtype" in part:
            part["dtype"] = word
    document["dtype"] = word
    config.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
