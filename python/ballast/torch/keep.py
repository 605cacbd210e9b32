"""Keeps the protected tensors of a model in f32.

Every cast of a module goes through `nn.Module._apply`, which is wrapped once per process: a module with
protected tensors carries a `_Guard` with their names, and a guarded tensor changes its device but never its
dtype. The guard holds only names, so it survives deepcopy and pickling, and finds the tensors of a sharded or
swapped module. A hook upcasts the tensors that `load_state_dict` would assign. FSDP1 is refused, because it
flattens a unit into one tensor and computes in one dtype.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ballast.errors import BallastWarning, CheckFailed, UsageError
from ballast.torch.tensors import PolicyLike, Protected, dtype_word, plain_name, protected_tensors, rounded_to

_GUARD = "_ballast_guard"


class RoundedWarning(BallastWarning):
    """A protected tensor has only the precision of bf16, f16 or tf32."""


class Kept:
    """Protected tensors of a model, as kept by `keep_fp32`."""

    def __init__(self, tensors: list[Protected]) -> None:
        """Records the present tensors; called by `keep_fp32`."""
        self._tensors = tensors
        found = {t.name: rounded_to(t.tensor) for t in tensors if t.tensor is not None}
        self._rounded_to = {name: kind for name, kind in found.items() if kind is not None}
        self.rounded = tuple(self._rounded_to)
        """Names of the tensors that had only the precision of bf16, f16 or tf32."""
        self._exact = frozenset(t.name for t in tensors if t.name not in self.rounded and _has_values(t))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the protected tensors in a checkpoint."""
        return tuple(t.name for t in self._tensors)

    def verify(self) -> None:
        """Raises `CheckFailed` with the names of the tensors that are no longer f32, or were rounded."""
        problems = []
        for kept in self._tensors:
            tensor = kept.tensor
            if tensor is None:
                problems.append(f"{kept.name} was removed")
            elif tensor.dtype != torch.float32:
                problems.append(f"{kept.name} is {dtype_word(tensor.dtype)}, expected f32")
            elif _is_flattened(tensor):
                problems.append(f"{kept.name} is a part of a tensor of FSDP1, which computes in one dtype")
            elif kept.name in self._exact and (kind := rounded_to(tensor)) is not None:
                problems.append(f"{kept.name} is f32 but all its values were rounded to {kind}")
        if problems:
            raise CheckFailed("protected-tensor check failed: " + "; ".join(problems))

    def release(self) -> None:
        """Ends the protection, without changing the tensors."""
        for kept in self._tensors:
            guard = kept.module.__dict__.pop(_GUARD, None)
            if guard is not None:
                hooks = kept.module._load_state_dict_pre_hooks
                for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                    del hooks[key]

    def __repr__(self) -> str:
        """Returns the number of tensors."""
        return f"Kept({len(self._tensors)} protected tensors)"


def keep_fp32(model: nn.Module, policy: PolicyLike = "strict") -> Kept:
    """Keeps the protected tensors of a model in f32 from now on.

    `.to(bf16)`, `.half()`, wrappers that cast, evaluation in bf16, deepcopy, pickling, merges of adapters,
    `load_state_dict` and `to_empty` leave them f32, and casts leave all their bits. Names and state dicts do
    not change. A tensor that is not f32 is upcast. A warning names the tensors whose values all fit bf16, f16
    or tf32: they were rounded before.

    >>> model = nn.Module()
    >>> model.linear_attn = nn.Module()
    >>> model.linear_attn.A_log = nn.Parameter(torch.tensor([0.1, 0.2]))
    >>> kept = keep_fp32(model)
    >>> model.bfloat16().linear_attn.A_log.tolist() == torch.tensor([0.1, 0.2]).tolist()
    True
    >>> kept.verify()
    """
    _install()
    if any(map(_is_flattened, model.parameters())):
        raise UsageError(f"the model is sharded by FSDP1, {_NOT_FSDP1}")
    tensors = protected_tensors(model, policy, warn=True)
    for protected in tensors:
        _upcast(protected)
        _mark_for_megatron(protected.tensor)
        module = protected.module
        module.__dict__[_GUARD] = _Guard(guarded_keys(module) | {protected.key})
        if not any(map(_is_ours, module._load_state_dict_pre_hooks.values())):
            module.register_load_state_dict_pre_hook(_upcast_loaded)
    kept = Kept(tensors)
    for kind in sorted(set(kept._rounded_to.values())):
        names = [name for name, found in kept._rounded_to.items() if found == kind]
        warnings.warn(
            f"{_listed(names)}: all values are {kind} values: they come from a {kind} file, or were "
            "rounded before keep_fp32 (ballast.torch.loading keeps the bits of an F32 file)",
            RoundedWarning,
            stacklevel=2,
        )
    return kept


def guarded_keys(module: nn.Module) -> frozenset[str]:
    """Returns the names of the tensors of one module that `keep_fp32` keeps."""
    guard = module.__dict__.get(_GUARD)
    return frozenset() if guard is None else guard.keys


class _Guard:
    """Names of a module's protected tensors. Unpickling it with the module installs the wrapper."""

    def __init__(self, keys: set[str] | frozenset[str]) -> None:
        self.keys = frozenset(keys)
        _install()

    def __reduce__(self) -> tuple[type[_Guard], tuple[frozenset[str]]]:
        return _Guard, (self.keys,)


_apply_of_torch: Callable[..., nn.Module] | None = None


def _install() -> None:
    """Wraps `nn.Module._apply` once per process."""
    global _apply_of_torch
    if _apply_of_torch is None:
        _apply_of_torch = nn.Module._apply
        nn.Module._apply = _apply  # type: ignore[method-assign]
        if torch.distributed.is_available():
            _refuse_fsdp1()


_NOT_FSDP1 = (
    "which computes all tensors of a unit in one dtype; use FSDP2: ballast.torch.fully_shard, or "
    "ballast.torch.mp_policy for code that shards by itself (fsdp_version=2 in accelerate)"
)


def _refuse_fsdp1() -> None:
    """Makes FSDP1 refuse modules with protected tensors."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrap = FullyShardedDataParallel.__init__

    @functools.wraps(wrap)
    def checked(self: nn.Module, module: nn.Module, *args: object, **kwargs: object) -> None:
        for path, part in module.named_modules():
            for key in sorted(guarded_keys(part)):
                name = plain_name(f"{path}.{key}" if path else key)
                raise UsageError(
                    f"{name} is kept in f32 and would be sharded by FSDP1, {_NOT_FSDP1}", tensor=name
                )
        wrap(self, module, *args, **kwargs)

    FullyShardedDataParallel.__init__ = checked  # type: ignore[method-assign]


def _is_flattened(tensor: torch.Tensor) -> bool:
    """Returns true for FSDP1's flat tensors and their views."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def _mark_for_megatron(tensor: torch.Tensor | None) -> None:
    """Marks a tensor to stay f32 for megatron-core, in the versions that have such a mark."""
    megatron = sys.modules.get("megatron.core.transformer.module")
    mark = getattr(megatron, "mark_keep_in_fp32", None)
    if mark is not None and tensor is not None:
        mark(tensor)


def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    assert _apply_of_torch is not None
    guard = self.__dict__.get(_GUARD)
    if guard is None:
        return _apply_of_torch(self, fn, recurse)
    if recurse:
        for child in self.children():
            child._apply(fn)
    tensors = [*self._parameters.items(), *self._buffers.items()]
    guarded = [tensor for key, tensor in tensors if key in guard.keys and tensor is not None]
    # A gradient has the dtype of its tensor.
    guarded += [grad for tensor in guarded if (grad := tensor.grad) is not None]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not any(tensor is other for other in guarded):
            return fn(tensor)
        # On an alias, because a function that casts in place must not reach the tensor.
        applied = fn(tensor.detach())
        return applied if applied.dtype == tensor.dtype else tensor.detach().to(applied.device)

    return _apply_of_torch(self, keep, False)


def _upcast_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Upcasts tensors before they are loaded, because `assign=True` and the swap flag take their dtype."""
    rounded = []
    for key in sorted(guarded_keys(module)):
        loaded = state_dict.get(prefix + key)
        if isinstance(loaded, torch.Tensor) and loaded.is_floating_point() and loaded.dtype != torch.float32:
            rounded.append(f"{plain_name(prefix + key)} ({dtype_word(loaded.dtype)})")
            state_dict[prefix + key] = loaded.to(torch.float32)
    if rounded:
        warnings.warn(
            f"{_listed(rounded)} loaded into protected tensors: the f32 bits were lost before",
            RoundedWarning,
            stacklevel=2,
        )


def _is_ours(hook: object) -> bool:
    return getattr(hook, "hook", hook) is _upcast_loaded


def _upcast(kept: Protected) -> None:
    tensor = kept.tensor
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float32:
        return
    meant = (tensor, tensor.grad)
    assert _apply_of_torch is not None
    _apply_of_torch(
        kept.module, lambda other: other.float() if any(other is t for t in meant) else other, False
    )


def _has_values(kept: Protected) -> bool:
    return kept.tensor is not None and not kept.tensor.is_meta


def _listed(names: list[str] | tuple[str, ...]) -> str:
    """Returns a list of names, cut after the first six."""
    few = ", ".join(names[:6])
    return few if len(names) <= 6 else f"{few} and {len(names) - 6} more"
