"""FSDP2 with protected tensors stored, computed and reduced in f32.

FSDP2 casts all parameters of a unit to one dtype, and refuses a unit whose stored dtypes differ. A layer
therefore becomes two units: one without the protected tensors, and a small f32 unit for the module that holds
them, such as `linear_attn`, without any others:

    unit of the layer        q, k, v, MLP, norms, ...     as `mp_policy` says
    unit of `linear_attn`    A_log, dt_bias, norm.weight  stored, gathered and reduced in f32

Names, state dicts and optimizer keys do not change, and the rest may be stored in f32 or bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from ballast.errors import UsageError
from ballast.torch.keep import guarded_keys
from ballast.torch.tensors import PolicyLike, dtype_word, plain_name, protected_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def fully_shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy,
    policy: PolicyLike = "strict",
    **kwargs: Any,  # noqa: ANN401 (as torch has them)
) -> FSDPModule:
    """Shards a model with FSDP2; protected tensors are stored, computed and reduced in f32.

    Each decoder layer of a transformers model becomes a unit, then the rest; any other module becomes one
    unit. Parts that are already sharded stay unchanged. Call it after `keep_fp32`, before or after a cast of
    the model to bf16. The other arguments are those of `torch.distributed.fsdp.fully_shard`.
    """
    protected = _protected_parameters(model, policy)
    if not protected:
        protected_tensors(model, policy, warn=True)
    for name, parameter in protected.items():
        if parameter.dtype != torch.float32:
            found = dtype_word(parameter.dtype)
            raise UsageError(f"{name} is {found}, expected f32: call keep_fp32 first", tensor=name)
    ignored = set(kwargs.pop("ignored_params", None) or ())
    islands = {p for p in protected.values() if p not in ignored}
    for unit in [*_layers(model), model]:
        if not isinstance(unit, FSDPModule):
            _shard_unit(unit, islands, ignored, mp_policy, {"mesh": mesh, **kwargs})
    assert isinstance(model, FSDPModule)
    return model


def mp_policy(
    model: nn.Module, base: MixedPrecisionPolicy, policy: PolicyLike = "strict"
) -> MixedPrecisionPolicy:
    """Returns `base` with protected tensors computed in f32 and gradients reduced in f32.

    For code that calls torch's `fully_shard` itself, such as accelerate. All parameters of a unit must be
    stored in f32, or torch refuses them. `fully_shard` of this module has no such limit.
    """
    return replace(base, **_override(base, _finder(model, policy)))


def _override(base: MixedPrecisionPolicy, is_protected: Callable[[nn.Parameter], bool]) -> dict[str, Any]:
    """Returns the fields of a policy that make torch compute and reduce protected tensors in f32."""
    before = base.param_dtype_override_fn

    def override(parameter: nn.Parameter) -> torch.dtype | None:
        if is_protected(parameter):
            return torch.float32
        return None if before is None else before(parameter)

    return {"reduce_dtype": torch.float32, "param_dtype_override_fn": override}


def _finder(model: nn.Module, policy: PolicyLike) -> Callable[[nn.Parameter], bool]:
    """Returns a predicate for protected tensors, which looks them up anew: a move replaces parameters."""
    tensors = protected_tensors(model, policy, warn=True)
    return lambda parameter: any(parameter is protected.tensor for protected in tensors)


def _protected_parameters(model: nn.Module, policy: PolicyLike) -> dict[str, nn.Parameter]:
    """Returns the parameters protected by the policy or kept by `keep_fp32`."""
    found = {protected.name: protected.tensor for protected in protected_tensors(model, policy)}
    for path, module in model.named_modules():
        for key in guarded_keys(module):
            found.setdefault(plain_name(f"{path}.{key}" if path else key), module._parameters.get(key))
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, nn.Parameter)}


def _layers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that transformers does not split, inner ones first."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    layers = [m for m in model.modules() if type(m).__name__ in classes and m is not model]
    return layers[::-1]


def _shard_unit(
    unit: nn.Module,
    islands: set[nn.Parameter],
    ignored: set[nn.Parameter],
    mp_policy: MixedPrecisionPolicy,
    arguments: dict[str, Any],
) -> None:
    """Shards one unit, and the modules in it that hold protected tensors."""
    holders = _holders(unit, islands)
    if unit in holders:
        # One module cannot be two units: torch's override keeps the dtype of single parameters.
        if any(p.dtype != torch.float32 for p in unit.parameters() if p.requires_grad and p not in ignored):
            name = type(unit).__name__
            raise UsageError(f"{name} holds protected tensors beside bf16 ones: shard the layer around it")
        mixed = replace(mp_policy, **_override(mp_policy, lambda parameter: parameter in islands))
        torch_fully_shard(unit, mp_policy=mixed, ignored_params=ignored, **arguments)
        return
    torch_fully_shard(unit, mp_policy=mp_policy, ignored_params=ignored | islands, **arguments)
    in_f32 = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for holder in holders:
        others = {parameter for parameter in holder.parameters() if parameter not in islands}
        torch_fully_shard(holder, mp_policy=in_f32, ignored_params=others, **arguments)


def _holders(module: nn.Module, islands: set[nn.Parameter]) -> list[nn.Module]:
    """Returns the outermost modules that hold protected parameters themselves, outside of other units."""
    if any(parameter in islands for parameter in module._parameters.values()):
        return [module]
    children = [child for child in module.children() if not isinstance(child, FSDPModule)]
    return [holder for child in children for holder in _holders(child, islands)]
