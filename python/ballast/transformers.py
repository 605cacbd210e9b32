"""Linear-attention layers of transformers on Ballast's kernels.

`patch_transformers` replaces the gated delta rule, its decode step and the causal convolution of Qwen3-Next,
Qwen3.5 and Qwen3.5-MoE, all three together: with one of them alone, packed documents leak into each other.
Sequences may then be packed without flash-linear-attention, marked by `position_ids` or by `cu_seq_lens_q`.
GPU tensors and dtypes other than f32 and bf16 still run in transformers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from ballast import ops
from ballast._extras import missing
from ballast._torch import torch
from ballast.errors import UsageError
from ballast.ops.packing import offsets_of_positions, offsets_of_sequence_ids

__all__ = ["VERSIONS", "Patch", "patch_transformers"]

VERSIONS: tuple[str, ...] = ("5.22", "5.23")
"""Versions of transformers that the patch is tested with."""

_MODELS = {
    "qwen3_next": "Qwen3NextModel",
    "qwen3_5": "Qwen3_5TextModel",
    "qwen3_5_moe": "Qwen3_5MoeTextModel",
}

_active: Patch | None = None


class Patch:
    """A patch of transformers; `undo` and the end of a `with` block revert it."""

    def __init__(self) -> None:
        """Creates an empty patch."""
        self._replaced: list[tuple[object, str, object, object]] = []

    def replace(self, owner: object, name: str, made: Callable[..., Any]) -> None:
        """Replaces an attribute with `made`."""
        self._replaced.append((owner, name, getattr(owner, name), made))
        setattr(owner, name, made)

    def undo(self) -> None:
        """Restores the functions of transformers, except those that something else has replaced since."""
        global _active
        for owner, name, original, made in self._replaced:
            if getattr(owner, name) is made:
                setattr(owner, name, original)
        self._replaced.clear()
        if _active is self:
            _active = None

    def __enter__(self) -> Patch:
        """Returns the patch."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Reverts the patch."""
        self.undo()


def patch_transformers() -> Patch:
    """Runs the linear attention of Qwen3-Next, Qwen3.5 and Qwen3.5-MoE on Ballast's kernels, on the CPU.

    A second call returns the same patch. Versions of transformers other than `VERSIONS` are refused, because
    the replaced functions are not a public interface.

    >>> import ballast
    >>> patch = ballast.patch_transformers()
    >>> patch is ballast.patch_transformers()
    True
    >>> patch.undo()
    """
    global _active
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise missing(error) from None

    if _active is not None:
        return _active
    version = transformers.__version__
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise UsageError(
            f"ballast.patch_transformers supports transformers {', '.join(VERSIONS)}, found {version}"
        )
    patch = Patch()
    for name, model in _MODELS.items():
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for function in (_chunk_rule, _recurrent_rule, _conv, _conv_update):
            patch.replace(module, *function(module))
        patch.replace(getattr(module, model), "forward", _forward(getattr(module, model).forward))
    _active = patch
    return patch


def _runs(*tensors: torch.Tensor) -> bool:
    """Returns true if the kernels support the tensors."""
    return all(x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) for x in tensors)


def _offsets(cu_seqlens: torch.Tensor | None, options: dict[str, Any]) -> torch.Tensor | None:
    """Returns the offsets of the packed sequences, from whichever argument marks them."""
    cu_seqlens = options.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens
    if cu_seqlens is None and options.get("seq_idx") is not None:
        cu_seqlens = offsets_of_sequence_ids(options["seq_idx"])
    return cu_seqlens


def _rule(
    kernel: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    tensors: tuple[torch.Tensor, ...],
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    l2norm: bool,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calls a rule; the packed rows of a batch become one row."""
    shape = tensors[2].shape
    if cu_seqlens is not None:
        tensors = tuple(x.flatten(0, 1).unsqueeze(0) for x in tensors)
    q, k, v, g, beta = tensors
    o, state = kernel(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=l2norm,
        cu_seqlens=cu_seqlens,
    )
    return o.reshape(shape), state


def _chunk_rule(module: ModuleType) -> tuple[str, Callable[..., Any]]:
    original = module.torch_chunk_gated_delta_rule

    @functools.wraps(original)
    def torch_chunk_gated_delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        **options: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        settings = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
        if _runs(query, key, value):
            tensors = (query, key, value, g, beta)
            return _rule(ops.chunk_gated_delta_rule, tensors, *settings, _offsets(cu_seqlens, options))
        return original(query, key, value, g, beta, chunk_size, *settings, cu_seqlens=cu_seqlens, **options)

    return "torch_chunk_gated_delta_rule", torch_chunk_gated_delta_rule


def _recurrent_rule(module: ModuleType) -> tuple[str, Callable[..., Any]]:
    original = module.torch_recurrent_gated_delta_rule

    @functools.wraps(original)
    def torch_recurrent_gated_delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        **options: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        settings = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
        if _runs(query, key, value):
            tensors = (query, key, value, g, beta)
            return _rule(
                ops.fused_recurrent_gated_delta_rule, tensors, *settings, _offsets(cu_seqlens, options)
            )
        return original(query, key, value, g, beta, *settings, cu_seqlens=cu_seqlens, **options)

    return "torch_recurrent_gated_delta_rule", torch_recurrent_gated_delta_rule


def _conv(module: ModuleType) -> tuple[str, Callable[..., Any]]:
    original = module.causal_conv1d_fn

    @functools.wraps(original)
    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **options: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        if _runs(hidden_states, weight) and bias is None and activation in ("silu", "swish"):
            cu_seqlens = _offsets(None, options)
            return ops.causal_conv1d_fn(hidden_states, weight, activation=activation, cu_seqlens=cu_seqlens)
        return original(hidden_states, weight, bias, activation=activation, **options)

    return "causal_conv1d_fn", causal_conv1d_fn


def _conv_update(module: ModuleType) -> tuple[str, Callable[..., Any]]:
    original = module.causal_conv1d_update

    @functools.wraps(original)
    def causal_conv1d_update(
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        if _runs(hidden_states, conv_state, weight) and bias is None and activation in ("silu", "swish"):
            return ops.causal_conv1d_update(hidden_states, conv_state, weight, activation=activation)
        return original(hidden_states, conv_state, weight, bias, activation)

    return "causal_conv1d_update", causal_conv1d_update


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward of a text model that finds the offsets of sequences marked by `position_ids` alone.

    It does so when transformers separates such sequences in softmax attention.
    """

    @functools.wraps(original)
    def forward(
        self: Any,  # noqa: ANN401
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,  # noqa: ANN401
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        cached = past_key_values is not None or (self.config.use_cache if use_cache is None else use_cache)
        marked = options.get("cu_seq_lens_q") is not None or options.get("seq_idx") is not None
        if position_ids is not None and attention_mask is None and not cached and not marked:
            tokens = input_ids.shape if inputs_embeds is None else inputs_embeds.shape[:2]
            positions = (
                position_ids[0] if position_ids.ndim == 3 and position_ids.shape[0] == 4 else position_ids
            )
            if positions.ndim == 2 and positions.device.type == "cpu":
                options["cu_seq_lens_q"] = offsets_of_positions(positions.expand(*tokens))
        return original(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **options,
        )

    return forward
