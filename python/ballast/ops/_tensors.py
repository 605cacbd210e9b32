"""Checks and conversions shared by the operations."""

from __future__ import annotations

import torch

from ballast._native import ops as native
from ballast.errors import UsageError
from ballast.ops._operation import transformed
from ballast.threads import apply_num_threads

__all__ = [
    "apply_num_threads",
    "check_cpu",
    "check_shape",
    "check_window",
    "native",
    "needs_grad",
    "offsets",
    "selected_keys",
    "storage",
]


def check_cpu(operation: str, **tensors: torch.Tensor | None) -> None:
    """Raises an error that names the alternative if a tensor is not on the CPU."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device.type not in ("cpu", "meta"):
            raise UsageError(
                f"ballast.ops.{operation} runs on the CPU, and {name} is on {tensor.device}; "
                "use flash-linear-attention (the package `fla`) for GPU tensors"
            )


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raises an error unless the tensor has the shape."""
    if tuple(tensor.shape) != expected:
        raise UsageError(f"{name} must have the shape {list(expected)}, got {list(tensor.shape)}")


def storage(operation: str, *tensors: torch.Tensor) -> torch.dtype:
    """Returns the storage type of an operation: bf16 if all tensors are bf16, f32 if they are f32 or bf16."""
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            raise UsageError(
                f"ballast.ops.{operation} takes torch.float32 and torch.bfloat16, got {tensor.dtype}"
            )
    bf16 = all(tensor.dtype == torch.bfloat16 for tensor in tensors)
    return torch.bfloat16 if bf16 else torch.float32


def offsets(cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the offsets of packed sequences as contiguous int64."""
    if cu_seqlens is None:
        return None
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise UsageError(
            "cu_seqlens must be a vector of torch.int32 or torch.int64, "
            f"got {cu_seqlens.dtype} with the shape {list(cu_seqlens.shape)}"
        )
    return cu_seqlens.to(torch.int64).contiguous()


def selected_keys(selected: torch.Tensor | None) -> torch.Tensor | None:
    """Returns `selected` as contiguous int32. A value out of range becomes a key that no sequence has."""
    if selected is None:
        return None
    if selected.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"selected must be torch.int32 or torch.int64, got {selected.dtype}")
    return selected.clamp(-2, 2**31 - 1).to(torch.int32).contiguous()


def check_window(window: int | None) -> None:
    """Raises an error unless the window includes the query's own key."""
    if window is not None and window < 1:
        raise UsageError(f"window must be 1 or more, got {window}")


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Returns true if a backward pass can follow, for which values must be saved."""
    # Inside a transform, tensors show only its own level; an outer level may need the gradient.
    wanted = transformed() or any(t is not None and t.requires_grad for t in tensors)
    return torch.is_grad_enabled() and wanted
