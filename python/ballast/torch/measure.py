"""Statistics of a training step over all ranks: loss, tokens, gradient norms and memory."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ballast.torch.sites import Fault
from ballast.torch.tensors import plain_name

# Parts of parameter names and their groups, as in `ballast train`; the first match counts.
_GROUPS = (
    ("embed", "embedding"),
    ("lm_head", "head"),
    ("output_layer", "head"),
    ("indexer", "indexer"),
    ("linear_attn", "linear attention"),
    ("self_att", "attention"),
    ("norm", "norms"),
    ("mlp", "feed-forward"),
    ("experts", "feed-forward"),
)


@dataclass
class Counts:
    """Loss and tokens of a step, over all ranks."""

    loss: float
    tokens: int
    trained: int


class Counter:
    """Counts the input tokens of a model and sums its losses."""

    def __init__(self, model: nn.Module) -> None:
        """Adds the hooks."""
        self._losses: list[torch.Tensor] = []
        self._is_share = False
        self._counts = {True: [0, 0], False: [0, 0]}
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def take(self) -> Counts:
        """Returns the counts since the last call, over all ranks."""
        losses = [float(loss) for loss in self._losses]
        # With `num_items_in_batch` each loss is the micro-batch's share of the mean over the step.
        loss = math.fsum(losses) / (1 if self._is_share or not losses else len(losses))
        tokens, trained = self._counts[True]
        self._losses, self._counts[True] = [], [0, 0]
        sums = _summed([loss if losses else math.nan, tokens, trained])
        return Counts(sums[0] / _ranks(), int(sums[1]), int(sums[2]))

    def take_evaluated(self) -> int:
        """Returns the number of tokens in evaluations since the last call."""
        tokens, self._counts[False] = self._counts[False][0], [0, 0]
        return int(_summed([tokens])[0])

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask, labels = kwargs.get("attention_mask"), kwargs.get("labels")
        counts = self._counts[module.training]
        if isinstance(ids, torch.Tensor) and not ids.is_floating_point():
            if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
                counts[0] += int(mask.sum())
            else:
                counts[0] += ids.numel()
        if isinstance(labels, torch.Tensor):
            counts[1] += int((labels[..., 1:] != -100).sum())
        self._is_share = kwargs.get("num_items_in_batch") is not None

    def _after(self, module: nn.Module, _: object, output: object) -> None:
        loss = getattr(output, "loss", None)
        if module.training and isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach())


@dataclass
class Norms:
    """Gradient norms of a step."""

    total: float
    groups: dict[str, float]
    non_finite: str | None
    """The first parameter with a non-finite gradient."""


def gradient_norms(model: nn.Module) -> Norms:
    """Returns the norms of all gradients, sharded ones included, in total and by group of parameters."""
    grads: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grads.setdefault(_group(plain_name(name)), []).append(parameter.grad)
    groups = {group: _norm(of_group) for group, of_group in grads.items()}
    total = math.sqrt(math.fsum(norm * norm for norm in groups.values()))
    return Norms(total, groups, None if math.isfinite(total) else _first_non_finite(model))


def _group(name: str) -> str:
    return next((group for part, group in _GROUPS if part in name), "other")


def _norm(grads: list[torch.Tensor]) -> float:
    """Returns the norm of gradients that may be sharded, each kind of sharding summed separately."""
    kinds: dict[object, list[torch.Tensor]] = {}
    for grad in grads:
        kinds.setdefault(getattr(grad, "device_mesh", grad.device), []).append(grad)
    squares = 0.0
    for kind in kinds.values():
        norm = torch.nn.utils.get_total_norm(kind)
        whole = getattr(norm, "full_tensor", lambda norm=norm: norm)()
        squares += float(whole) ** 2
    return math.sqrt(squares)


def _first_non_finite(model: nn.Module) -> str | None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            part = grad.to_local() if hasattr(grad, "to_local") else grad
            if not bool(part.isfinite().all()):
                return plain_name(name)
    return None


def peak_memory() -> int:
    """Returns the peak memory in bytes: of the GPU if one is in use, else of the process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _ranks() -> int:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ready else 1


def rank() -> int:
    """Returns this process's rank; 0 without a process group."""
    return torch.distributed.get_rank() if _ranks() > 1 else 0


def _summed(values: list[float]) -> list[float]:
    """Returns the sums of values over all ranks."""
    if _ranks() == 1:
        return values
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    together = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(together)
    return together.tolist()


def over_ranks(faults: list[Fault]) -> list[Fault]:
    """Returns the faults of all ranks, nearest to the cause first. Without any, ranks exchange one number."""
    if _ranks() == 1 or not _summed([float(bool(faults))])[0]:
        return sorted(faults)
    gathered: list[Any] = [None] * _ranks()
    torch.distributed.all_gather_object(gathered, faults)
    found = [Fault(f.order, f"rank {i}: {f.text}") for i, of_rank in enumerate(gathered) for f in of_rank]
    return sorted(found)
