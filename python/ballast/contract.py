"""The precision contract: which tensors must be f32, and why.

The helpers have the names, signatures and results of NeMo Automodel's module `gated_delta_net_fp32`, so an
adapter can import them from here instead. They differ in four cases:

- the last path segment must be the name: `x.linear_attn.my_A_log` is not tracked (there, any suffix matches);
- `architectures` is also read from a nested `text_config`, and a config may be a dict;
- every nested `_fp32_params` is stripped;
- a float64 tensor is not narrowed, and a float8 tensor is not cast without its scale: both raise
  `CheckFailed`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from ballast import _native
from ballast.errors import CheckFailed, InputError, UsageError

__all__ = [
    "FP32_GDN_PARAM_NAMES",
    "GDN_FP32_CHECKPOINT_ARCHITECTURES",
    "HOLDER_NAME",
    "Policy",
    "Rule",
    "forced_gated_delta_net_fp32_dtype_mapping",
    "has_gated_delta_net_fp32_checkpoint_contract",
    "is_gated_delta_net_fp32_param_key",
    "route_fp32_holder_key",
    "strip_fp32_holder_key",
    "upcast_gated_delta_net_fp32_state_tensor",
]

HOLDER_NAME: str = _native.HOLDER_NAME
"""Name of the module that holds the f32 parameters at run time."""

FP32_GDN_PARAM_NAMES: tuple[str, ...] = tuple(_native.FP32_GDN_PARAM_NAMES)
"""Parameters in the holder."""

GDN_FP32_CHECKPOINT_ARCHITECTURES: frozenset[str] = frozenset(_native.CONTRACT_ARCHITECTURES)
"""Architectures whose checkpoints follow this convention."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Rule:
    """A rule: tensors that must be stored in `dtype`."""

    name: str
    reason: str
    dtype: str
    tensors: tuple[str, ...]
    families: tuple[str, ...]
    source: str = ""


def _rule(fields: tuple[str, str, str, list[str], list[str], str]) -> Rule:
    name, reason, dtype, tensors, families, source = fields
    return Rule(name, reason, dtype, tuple(tensors), tuple(families), source)


@dataclass(frozen=True)
class Policy:
    """A named selection of rules.

    >>> policy = Policy.named("strict")
    >>> rule = policy.protects("model.layers.0.linear_attn.A_log")
    >>> rule.name, rule.dtype
    ('gdn-a-log', 'F32')
    >>> policy.protects("model.layers.0.mlp.up_proj.weight") is None
    True
    """

    name: str
    description: str
    rules: tuple[Rule, ...]
    _handle: _native.Policy = field(repr=False, compare=False)

    @classmethod
    def _of(cls, native: _native.Policy) -> Policy:
        rules = tuple(_rule(fields) for fields in native.rules())
        return cls(native.name, native.description, rules, native)

    @classmethod
    def named(cls, name: str) -> Policy:
        """Returns a built-in policy: strict, megatron, nemo or none.

        >>> Policy.named("nemo").protects("model.layers.0.linear_attn.norm.weight") is None
        True
        >>> Policy.named("megatron").protects("model.layers.0.linear_attn.norm.weight").name
        'gdn-out-norm'
        """
        return cls._of(_native.Policy.named(name))

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Policy:
        """Reads a policy file (TOML), which may extend a built-in policy."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot read: {error}", file=Path(path)) from error
        try:
            return cls._of(_native.Policy.parse(text))
        except UsageError as error:
            raise UsageError(f"{path}: {error}", file=Path(path)) from None

    @classmethod
    def load(cls, policy: str | PathLike[str] | Policy) -> Policy:
        """Returns the policy given as a name, a file (.toml) or a `Policy`.

        >>> Policy.load("strict") == Policy.named("strict")
        True
        """
        if isinstance(policy, Policy):
            return policy
        if Path(policy).suffix == ".toml":
            return cls.from_file(policy)
        return cls.named(str(policy))

    def protects(self, name: str) -> Rule | None:
        """Returns the rule that protects the tensor called `name`, bare or routed into the holder.

        >>> Policy.named("strict").protects("m.linear_attn._fp32_params.dt_bias").name
        'gdn-dt-bias'
        """
        fields = self._handle.rule_for(name)
        return None if fields is None else _rule(fields)

    def for_architecture(
        self, config: object = None, names: Iterable[str] | Mapping[str, int] = ()
    ) -> Policy:
        """Returns the policy reduced to the rules of one architecture.

        `config` is a config.json as a dict or a transformers config. Without one, or if it names no
        architecture that the table knows, the architecture is found by the tensor names, which may come with
        their numbers of elements. Tensors that the table does not know are found by structure: an `A_log`
        beside a `dt_bias`, say.

        >>> policy = Policy.named("strict")
        >>> policy.protects("model.layers.1.mlp.gate.weight").families
        ('ernie4_5_moe',)
        >>> qwen = policy.for_architecture({"model_type": "qwen3_5_moe"})
        >>> qwen.protects("model.layers.1.mlp.gate.weight") is None
        True
        >>> names = ["layers.0.ssm.A_log", "layers.0.ssm.dt_bias"]
        >>> policy.for_architecture({"model_type": "new"}, names).protects("layers.7.ssm.A_log").name
        'structure-a-log'
        """
        return self._reduced(config, names)[0]

    def _reduced(self, config: object, names: Iterable[str] | Mapping[str, int]) -> tuple[Policy, list[str]]:
        """Returns the policy of `for_architecture`, and the families that the model belongs to."""
        parts = {key: _part(config, key) for key in ("architectures", "model_type")}
        text = _part(config, "text_config")
        nested = {key: _part(text, key) for key in ("architectures", "model_type")}
        document = json.dumps({**parts, "text_config": nested})
        tensors = list(names.items()) if isinstance(names, Mapping) else [(name, 0) for name in names]
        native, families = self._handle.for_architecture(document, tensors)
        return Policy._of(native), families

    def for_part(self, names: Iterable[str] = ()) -> Policy:
        """Returns the policy for a part of a model, which says nothing of its architecture.

        It has the rules whose names mean the same everywhere, and those by structure.

        >>> part = Policy.named("strict").for_part(["ssm.A_log", "ssm.conv1d.weight"])
        >>> part.protects("ssm.A_log").name
        'structure-a-log'
        """
        return Policy._of(self._handle.for_part(list(names)))


def _part(config: object, key: str) -> Any:  # noqa: ANN401 (a config may have anything there)
    """Returns a part of a config, which is a mapping or an object with attributes."""
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def has_gated_delta_net_fp32_checkpoint_contract(hf_config: object) -> bool:
    """Returns true if the config's architecture keeps Gated-DeltaNet parameters in f32.

    >>> has_gated_delta_net_fp32_checkpoint_contract({"architectures": ["Qwen3NextForCausalLM"]})
    True
    >>> has_gated_delta_net_fp32_checkpoint_contract({"architectures": None})
    False
    """
    architectures: list[str] = []
    for config in (hf_config, _part(hf_config, "text_config")):
        found = _part(config, "architectures") or ()
        if not isinstance(found, str):
            architectures += [a for a in found if isinstance(a, str)]
    return _native.has_contract(architectures)


def is_gated_delta_net_fp32_param_key(key: str, param_names: tuple[str, ...] = FP32_GDN_PARAM_NAMES) -> bool:
    """Returns true if `key` is a tracked parameter below `linear_attn`, bare or routed.

    >>> is_gated_delta_net_fp32_param_key("model.layers.0.linear_attn.A_log")
    True
    >>> is_gated_delta_net_fp32_param_key("model.layers.0.linear_attn.conv1d.weight")
    False
    """
    return _native.is_param_key(key, list(param_names))


def route_fp32_holder_key(key: str, param_names: tuple[str, ...] = FP32_GDN_PARAM_NAMES) -> str:
    """Maps `...linear_attn.X` to `...linear_attn._fp32_params.X`; returns other keys unchanged.

    >>> route_fp32_holder_key("model.layers.0.linear_attn.A_log")
    'model.layers.0.linear_attn._fp32_params.A_log'
    """
    return _native.route_param_key(key, list(param_names))


def strip_fp32_holder_key(key: str) -> str:
    """Removes `._fp32_params` after `.linear_attn`: the inverse of `route_fp32_holder_key`.

    >>> strip_fp32_holder_key("model.layers.0.linear_attn._fp32_params.A_log")
    'model.layers.0.linear_attn.A_log'
    """
    return _native.strip_holder_key(key)


def _is_float(tensor: object) -> bool:
    is_floating_point = getattr(tensor, "is_floating_point", None)
    return callable(is_floating_point) and bool(is_floating_point())


def upcast_gated_delta_net_fp32_state_tensor(
    key: str, tensor: _T, param_names: tuple[str, ...] = FP32_GDN_PARAM_NAMES, *, narrow_f64: bool = False
) -> _T:
    """Returns a tracked float tensor as float32; returns any other tensor unchanged.

    A float64 tensor raises `CheckFailed` unless `narrow_f64` is set.
    """
    if not is_gated_delta_net_fp32_param_key(key, param_names) or not _is_float(tensor):
        return tensor
    import torch

    dtype = tensor.dtype  # type: ignore[attr-defined]
    if dtype == torch.float32:
        return tensor
    if dtype == torch.float64 and not narrow_f64:
        message = f"{key} is float64: a cast to float32 would lose bits; narrow_f64=True allows it"
        raise CheckFailed(message, tensor=key)
    if dtype.itemsize < 2:
        raise CheckFailed(f"{key} is {dtype}: it cannot be cast without its scale", tensor=key)
    return tensor.to(dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]


def forced_gated_delta_net_fp32_dtype_mapping(
    state_dict: Mapping[str, object], param_names: tuple[str, ...] = FP32_GDN_PARAM_NAMES
) -> dict[str, str]:
    """Returns `{key: "F32"}` for the tracked float tensors of a state dict, to override dtypes on export."""
    return {
        key: "F32"
        for key, tensor in state_dict.items()
        if is_gated_delta_net_fp32_param_key(key, param_names) and _is_float(tensor)
    }
