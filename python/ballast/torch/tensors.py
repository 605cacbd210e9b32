"""Protected tensors of a model, by their names without wrappers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike

import torch
from torch import nn

from ballast.contract import Policy, Rule
from ballast.errors import BallastWarning

PolicyLike = str | PathLike[str] | Policy
"""A policy: a name, a file (.toml) or a `Policy`."""

# Segments that wrappers add: DDP, Float16Module and FSDP1's inner module, torch.compile, activation
# checkpointing, PEFT.
_WRAPPERS = frozenset(
    {
        "module",
        "_orig_mod",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "_forward_module",
        "base_model",
        "base_layer",
        "modules_to_save",
        "original_module",
    }
)


def plain_name(name: str) -> str:
    """Returns the name of a parameter or module in a checkpoint, without the segments of wrappers.

    >>> plain_name("module._orig_mod.model.layers.0.linear_attn.A_log")
    'model.layers.0.linear_attn.A_log'
    >>> plain_name("base_model.model.model.layers.0.linear_attn.norm.modules_to_save.default.weight")
    'model.layers.0.linear_attn.norm.weight'
    """
    plain: list[str] = []
    before = ""
    for position, segment in enumerate(name.split(".")):
        is_adapter = before == "modules_to_save"
        is_peft_model = before == "base_model" and position == 1 and segment == "model"
        if segment not in _WRAPPERS and not is_adapter and not is_peft_model:
            plain.append(segment)
        before = segment
    return ".".join(plain)


@dataclass(frozen=True)
class Protected:
    """A protected tensor of a model, by module and key, because casts and sharding replace the tensor."""

    name: str
    """Name in a checkpoint."""
    module: nn.Module
    """Module that holds it."""
    key: str
    """Name in the module."""
    rule: Rule

    @property
    def tensor(self) -> torch.Tensor | None:
        """Tensor that the module holds now."""
        return _tensor(self.module, self.key)


def protected_tensors(
    model: nn.Module, policy: PolicyLike = "strict", *, warn: bool = False
) -> list[Protected]:
    """Returns the protected parameters and buffers of a model, in its order.

    The rules are those of the architecture that `model.config` or, where the table lacks it, the names belong
    to; other models have the rules by structure. With `warn`, a model without such tensors is a warning that
    says why.

    >>> layer = nn.Module()
    >>> layer.linear_attn = nn.Module()
    >>> layer.linear_attn.A_log = nn.Parameter(torch.zeros(4))
    >>> [tensor.name for tensor in protected_tensors(layer)]
    ['linear_attn.A_log']
    """
    places = list(_places(model))
    sizes: dict[str, int] = {}
    for module, key, alike in places:
        tensor = _tensor(module, key)
        sizes |= dict.fromkeys(alike, 0 if tensor is None else tensor.numel())
    loaded = Policy.load(policy)
    rules, why = _for_model(loaded, model, sizes)
    found = []
    for module, key, alike in places:
        rule = next(filter(None, map(rules.protects, alike)), None)
        if rule is not None:
            found.append(Protected(alike[0], module, key, rule))
    if warn and not found and loaded.rules:
        warnings.warn(f"no tensor is protected: {why}", BallastWarning, stacklevel=3)
    return found


def _tensor(module: nn.Module, key: str) -> torch.Tensor | None:
    """Returns the parameter or buffer that a module holds now."""
    found = module._parameters.get(key)
    return module._buffers.get(key) if found is None else found


def _for_model(policy: Policy, model: nn.Module, sizes: dict[str, int]) -> tuple[Policy, str]:
    """Reduces a policy to the rules of a model, and says why it may protect nothing."""
    config = next((c for m in model.modules() if _names_architecture(c := getattr(m, "config", None))), None)
    reduced, families = policy._reduced(config, sizes)
    known = f"the model ({', '.join(families)}) has no tensor that policy {policy.name} names"
    if config is None and not families:
        # A part of a model has too few names to be recognized.
        return policy.for_part(
            sizes
        ), "the model has no config, and no tensor looks like one that must be f32"
    name = (getattr(config, "architectures", None) or [getattr(config, "model_type", None)])[0]
    unknown = (
        f"{name} is not in the table of architectures (ballast audit --rules), and no tensor looks like one "
        "that must be f32"
    )
    return reduced, known if families else unknown


def _names_architecture(config: object) -> bool:
    return bool(getattr(config, "architectures", None) or getattr(config, "model_type", None))


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, list[str]]]:
    """Yields every parameter and buffer: its module, its key there, and its names for rules."""
    mixers: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).__name__.endswith("GatedDeltaNet"):
            mixers.append(path)
        tensors = {**module._parameters, **module._buffers}
        for key in (key for key, tensor in tensors.items() if tensor is not None):
            name = f"{path}.{key}" if path else key
            alike = [plain_name(name)]
            mixer = next((m for m in mixers if not m or name.startswith(m + ".")), None)
            if mixer is not None:
                # The mixer alone, or under a name of its own (`mixer`): as both layouts would name it.
                inner = plain_name(name[len(mixer) :].lstrip("."))
                alike += [f"linear_attn.{inner}", f"self_attention.{inner}"]
            yield module, key, alike


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or this rank's shard of a distributed one."""
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def rounded_to(tensor: torch.Tensor) -> str | None:
    """Returns the narrower type that an f32 tensor was rounded to: bf16, f16, tf32 or None.

    That type represents every value. A constant tensor, such as the ones of a new norm, has no bits to lose.
    Values of 8-bit types are bf16 values too.

    >>> rounded_to(torch.tensor([0.5, 1.25])), rounded_to(torch.tensor([0.5, 1 + 2**-10]))
    ('bf16', 'f16')
    >>> rounded_to(torch.tensor([0.1, 0.2])), rounded_to(torch.tensor([1.0, 1.0]))
    (None, None)
    """
    values = local(tensor)
    if values.is_meta:
        return None
    values = values[~values.isnan()]
    if values.numel() == 0 or bool((values == values[0]).all()):
        return None
    for dtype in (torch.bfloat16, torch.float16):
        if bool((values == values.to(dtype).to(values.dtype)).all()):
            return dtype_word(dtype)
    is_tf32 = values.dtype == torch.float32 and bool((values.view(torch.int32) & 0x1FFF == 0).all())
    return "tf32" if is_tf32 else None


def dtype_word(dtype: torch.dtype) -> str:
    """Returns Ballast's name of a dtype.

    >>> dtype_word(torch.float32), dtype_word(torch.bfloat16)
    ('f32', 'bf16')
    """
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f")
