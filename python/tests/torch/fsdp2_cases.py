"""Cases of FSDP2 on two gloo ranks. Each returns plain data, which rank 0 prints as one line of JSON.

The reference is the unsharded model on the batches of both ranks: protected tensors in f32, all others in
bf16, gradients averaged in f32.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch_support import ROOT, batch, bits, end_rank, is_protected, protected, tiny_model

from ballast.torch import Ledger, fully_shard, keep_fp32, mp_policy, save_pretrained

BASE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Shard = Callable[[nn.Module], object]


def own_batch() -> dict[str, torch.Tensor]:
    return {key: value[dist.get_rank()][None] for key, value in batch().items()}


def lower_rest(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not is_protected(name):
            parameter.data = parameter.data.bfloat16()


def reference() -> dict[str, torch.Tensor]:
    model = tiny_model()
    lower_rest(model)
    grads: dict[str, torch.Tensor] = {}
    for row in range(2):
        model.zero_grad()
        model(**{key: value[row][None] for key, value in batch().items()}).loss.backward()
        for name, parameter in model.named_parameters():
            grads[name] = grads.get(name, 0) + parameter.grad.float() / 2
    return grads


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def measured(model: nn.Module) -> dict[str, Any]:
    """One step: the dtypes in which the layer computes, and gradients against the reference."""
    layer = model.model.layers[0].linear_attn
    computed: dict[str, str] = {}

    def look(*_: object) -> None:
        for name in ("A_log", "dt_bias", "norm.weight", "in_proj_a.weight", "conv1d.weight"):
            computed[name] = str(layer.get_parameter(name).dtype)

    handle = layer.out_proj.register_forward_pre_hook(look)
    model(**own_batch()).loss.backward()
    handle.remove()
    expected = reference()
    worst = {"protected": 0.0, "rest": 0.0}
    for name, parameter in model.named_parameters():
        # Storage in bf16 has gradients in bf16, rounded after the reduction.
        wanted = expected[name].to(parameter.dtype).double()
        error = float((whole(parameter.grad).double() - wanted).norm() / wanted.norm())
        kind = "protected" if is_protected(name) else "rest"
        worst[kind] = max(worst[kind], error)
    return {"computed": computed, "worst": worst, "stored": stored(model)}


def stored(model: nn.Module) -> dict[str, list[str]]:
    kinds: dict[str, set[str]] = {"protected": set(), "rest": set()}
    for name, parameter in model.named_parameters():
        kinds["protected" if is_protected(name) else "rest"].add(str(parameter.dtype))
    return {kind: sorted(found) for kind, found in kinds.items()}


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def by_layer(shard: Callable[..., object], model: nn.Module, **arguments: object) -> None:
    for layer in model.model.layers:
        shard(layer, **arguments)
    shard(model, **arguments)


# What plain torch does.


def plain() -> dict[str, Any]:
    model = tiny_model()
    by_layer(torch_fully_shard, model, mp_policy=BASE)
    return measured(model)


def plain_mixed_storage() -> str:
    model = tiny_model()
    lower_rest(model)
    by_layer(torch_fully_shard, model, mp_policy=BASE)
    return error_of(lambda: model(**own_batch()))


def plain_ignored() -> dict[str, Any]:
    model = tiny_model()
    ignored = set(protected(model).values())
    by_layer(torch_fully_shard, model, mp_policy=BASE, ignored_params=ignored)
    result = measured(model)
    clip = partial(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    return {**result, "clip": error_of(clip)}


def plain_conv1d_unit() -> str:
    model = tiny_model()
    for layer in model.model.layers[:2]:
        torch_fully_shard(layer.linear_attn.conv1d, mp_policy=BASE)
    by_layer(torch_fully_shard, model, mp_policy=BASE)
    return error_of(lambda: model(**own_batch()))


def plain_list_units() -> dict[str, Any]:
    model = tiny_model()
    in_f32 = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
    for layer in model.model.layers[:2]:
        attention = layer.linear_attn
        others = [part for key, part in attention.named_children() if key != "norm"]
        torch_fully_shard(others, mp_policy=BASE)
        torch_fully_shard(attention, mp_policy=in_f32)
    by_layer(torch_fully_shard, model, mp_policy=BASE)
    layers = [layer.linear_attn.in_proj_qkv for layer in model.model.layers[:2]]
    gathered = []
    handle = model.model.norm.register_forward_hook(lambda *_: gathered.append(still_gathered(layers)))
    result = measured(model)
    handle.remove()
    return {**result, "gathered": gathered[0]}


def still_gathered(modules: list[nn.Module]) -> int:
    """The number of modules whose weight is whole."""
    return sum(not hasattr(module.weight, "full_tensor") for module in modules)


# What ballast.torch does.


def override() -> dict[str, Any]:
    model = tiny_model()
    by_layer(torch_fully_shard, model, mp_policy=mp_policy(model, BASE, "strict"))
    return measured(model)


def override_mixed_storage() -> str:
    model = tiny_model()
    lower_rest(model)
    by_layer(torch_fully_shard, model, mp_policy=mp_policy(model, BASE, "strict"))
    return error_of(lambda: model(**own_batch()))


def ours(order: str) -> dict[str, Any]:
    model = tiny_model()
    before = bits(model)
    keep_fp32(model)
    if order == "cast, then shard":
        model.bfloat16()
    fully_shard(model, mp_policy=BASE)
    if order == "shard, then cast":
        model.bfloat16()
    same = all(torch.equal(whole(p.detach()), before[name]) for name, p in protected(model).items())
    layers = [layer.linear_attn.in_proj_qkv for layer in model.model.layers[:2]]
    gathered = []
    handle = model.model.norm.register_forward_hook(lambda *_: gathered.append(still_gathered(layers)))
    result = measured(model)
    handle.remove()
    norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    return {**result, "same bits": same, "norm": float(norm), "gathered": gathered[0]}


def ours_low_reduction() -> dict[str, Any]:
    model = tiny_model()
    base = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(model, mp_policy=base)
    return measured(model)


def ours_by_layer() -> dict[str, Any]:
    model = tiny_model()
    keep_fp32(model)
    by_layer(fully_shard, model, mp_policy=BASE)
    return measured(model)


def ours_attention_alone() -> list[str]:
    """A unit that holds protected tensors itself."""
    model = tiny_model()
    for layer in model.model.layers[:2]:
        fully_shard(layer.linear_attn, mp_policy=BASE)
    fully_shard(model, mp_policy=BASE)
    result = measured(model)
    mixed = tiny_model()
    lower_rest(mixed)
    attention = mixed.model.layers[0].linear_attn
    refused = error_of(lambda: fully_shard(attention, mp_policy=BASE))
    return [str(result["worst"]), str(sorted(set(result["computed"].values()))), refused]


def ours_unkept() -> str:
    return error_of(lambda: fully_shard(tiny_model().bfloat16(), mp_policy=BASE))


def adapted() -> dict[str, Any]:
    """Adapters in f32 on a frozen base in bf16: one step moves them, and no protected tensor."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model()
    before = bits(model)
    keep_fp32(model)
    config = LoraConfig(target_modules=["in_proj_qkv", "out_proj", "q_proj"], r=2, init_lora_weights=False)
    model = get_peft_model(model.bfloat16(), config)
    fully_shard(model, mp_policy=BASE)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start = {name: whole(p.detach()).clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    model(**own_batch()).loss.backward()
    optimizer.step()
    base = model.base_model.model
    return {
        "adapters": len(trained),
        "moved": sum(not torch.equal(whole(p.detach()), start[name]) for name, p in trained.items()),
        "stored": sorted({str(p.dtype) for p in protected(base).values()}),
        "same bits": all(torch.equal(whole(p.detach()), before[name]) for name, p in protected(base).items()),
    }


def without_values() -> bool:
    """A model made on the meta device, sharded, given memory, and loaded."""
    source = tiny_model()
    with torch.device("meta"):
        model = tiny_model()
    keep_fp32(model)
    model.bfloat16()
    fully_shard(model, mp_policy=BASE)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, source.state_dict(), options=options)
    model.tie_weights()
    expected = bits(source)
    return all(torch.equal(whole(p.detach()), expected[name]) for name, p in protected(model).items())


def replicated() -> dict[str, Any]:
    """DDP takes mixed dtypes."""
    model = tiny_model()
    keep_fp32(model)
    model.bfloat16()
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(**own_batch()).loss.backward()
    expected = reference()
    worst = max(
        float((p.grad - expected[name]).norm() / expected[name].norm())
        for name, p in protected(model).items()
    )
    return {"stored": stored(model), "worst": worst}


def families() -> dict[str, Any]:
    """One step of every golden model, the rest stored in bf16: the parameters whose storage is f32."""
    import transformers

    results = {}
    for folder in sorted((ROOT / "fixtures" / "models").iterdir()):
        config = transformers.AutoConfig.from_pretrained(folder)
        model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float32)
        keep_fp32(model)
        fully_shard(model.bfloat16(), mp_policy=BASE)
        model.train()
        result = error_of(lambda model=model: model(**own_batch()).loss.backward())
        in_f32 = {name: p for name, p in model.named_parameters() if p.dtype == torch.float32}
        kinds = {name.split(".layers.")[1].split(".", 1)[1] for name in in_f32}
        grads = sum(p.grad is not None and p.grad.dtype == torch.float32 for p in in_f32.values())
        results[folder.name] = [result, sorted(kinds), len(in_f32), grads]
    return results


def training(storage: str, checkpointing: bool = False, clip: bool = True) -> nn.Module:
    model = tiny_model()
    keep_fp32(model)
    if storage == "bf16":
        model.bfloat16()
    if checkpointing:
        model.gradient_checkpointing_enable()
    fully_shard(model, mp_policy=BASE)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(**own_batch()).loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(**own_batch())
        model.train()
    model.reshard()  # the root unit stays gathered after an evaluation
    model.optimizer = optimizer
    return model


def unsharded_training() -> dict[str, torch.Tensor]:
    """Three steps of the model with f32 storage, its forward and backward on a copy in bf16."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        for row in range(2):
            lowered = copy.deepcopy(model)
            lower_rest(lowered)
            lowered.zero_grad()
            lowered(**{key: value[row][None] for key, value in batch().items()}).loss.backward()
            for parameter, low in zip(model.parameters(), lowered.parameters(), strict=True):
                grad = low.grad.float() / 2
                parameter.grad = grad if row == 0 else parameter.grad + grad
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def trained() -> dict[str, Any]:
    """Training, evaluation and activation checkpointing; the result against the unsharded one."""
    expected = unsharded_training()
    initial = bits(tiny_model())
    results = {}
    for checkpointing in (False, True):
        # A norm summed in another order would scale the gradients differently in the last bit.
        model = training("f32", checkpointing, clip=False)
        found = {name: whole(p.detach()) for name, p in model.named_parameters()}
        same = {name: torch.equal(found[name], expected[name]) for name in expected}
        moved = all(not torch.equal(found[name], initial[name]) for name in initial)
        other = [name for name in same if not same[name]]
        results[f"checkpointing {checkpointing}"] = {"other": other, "moved": moved}
    return results


def saved_and_reloaded(storage: str) -> dict[str, Any]:
    """DCP: names of model and optimizer are those of the unsharded model; values come back bit for bit."""
    model = training(storage)
    optimizer = model.optimizer
    del model.optimizer
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(state, checkpoint_id=folder[0])

    other = training(storage)
    other_optimizer = other.optimizer
    del other.optimizer
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    again = {
        "model": get_model_state_dict(other),
        "optim": get_optimizer_state_dict(other, other_optimizer),
    }
    dcp.load(again, checkpoint_id=folder[0])
    set_model_state_dict(other, again["model"])
    set_optimizer_state_dict(other, other_optimizer, again["optim"])
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    same = all(torch.equal(whole(a.detach()), whole(b.detach())) for a, b in pairs)
    state_of = [(optimizer.state[a], other_optimizer.state[b]) for a, b in pairs]
    same_state = all(torch.equal(whole(a[k]), whole(b[k])) for a, b in state_of for k in a)

    plain_model = tiny_model()
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), lr=1e-3)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    plain_keys = get_optimizer_state_dict(plain_model, plain_optimizer, options=options).keys()
    keys = get_optimizer_state_dict(model, optimizer, options=options).keys()
    state_dtypes = {str(optimizer.state[p]["exp_avg"].dtype) for p in protected(model).values()}
    return {
        "same": same,
        "same optimizer state": same_state,
        "model keys": list(state["model"]) == list(plain_model.state_dict()),
        "optimizer keys": sorted(keys) == sorted(plain_keys),
        "stored": stored(other),
        "optimizer state": sorted(state_dtypes),
    }


def saved_pretrained(folder: str) -> dict[str, list[float]]:
    model = training("bf16")
    save_pretrained(model, folder)
    return {name: whole(p.detach()).tolist() for name, p in protected(model).items()}


def ledger() -> dict[str, Any]:
    """Plain FSDP2 computes A_log in bf16: the ledger sees it. A fault on one rank stops both."""
    model = tiny_model()
    by_layer(torch_fully_shard, model, mp_policy=BASE)
    model.train()
    book = Ledger(on_fault="raise")
    book.attach(model)
    model(**own_batch()).loss.backward()
    lowered = error_of(lambda: book.step(model))
    book.close()

    model = tiny_model()
    keep_fp32(model)
    fully_shard(model, mp_policy=BASE)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    book = Ledger(on_fault="skip")
    book.attach(model)
    allowed = []
    for step in range(3):
        layer = model.model.layers[1].mlp
        poison = float("nan") if step == 1 and dist.get_rank() == 1 else 1.0
        handle = layer.down_proj.register_forward_pre_hook(lambda _, args, x=poison: (args[0] * x,))
        model(**own_batch()).loss.backward()
        handle.remove()
        allowed.append(book.step(model))
        optimizer.step()
        optimizer.zero_grad()
    book.close()
    finite = all(bool(whole(p.detach()).isfinite().all()) for p in model.parameters())
    return {
        "lowered": lowered,
        "allowed": allowed,
        "faults": book.faults,
        "finite": finite,
        "summary": book.summary(),
    }


def fsdp1() -> dict[str, Any]:
    """FSDP1 is refused before and after it wraps a model."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    results: dict[str, Any] = {}
    model = tiny_model()
    kept = keep_fp32(model)
    for original in (False, True):

        def wrap(model: nn.Module, original: bool = original) -> nn.Module:
            return FullyShardedDataParallel(
                model, mixed_precision=mixed, use_orig_params=original, device_id=torch.device("cpu")
            )

        results[f"kept, {original}"] = error_of(partial(wrap, model))
        wrapped = wrap(tiny_model())
        results[f"wrapped, {original}"] = error_of(partial(keep_fp32, wrapped))
    kept.verify()
    kept.release()
    wrapped = wrap(model)
    results["released"] = error_of(kept.verify)
    wrapped(**own_batch()).loss.backward()
    results["trained"] = error_of(kept.verify)
    return results


def accelerated() -> dict[str, Any]:
    """accelerate stores all in f32 and computes A_log in bf16; `mp_policy` corrects it.

    With mixed precision, it makes all parameters f32 before it shards.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    results = {}
    for kind in ("plain", "ours", "ours cast first"):
        model = tiny_model()
        before = bits(model)
        keep_fp32(model)
        if kind == "ours cast first":
            model.bfloat16()
        AcceleratorState._reset_state()
        mp = BASE if kind == "plain" else mp_policy(model, BASE)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Qwen3_5DecoderLayer"],
            mixed_precision_policy=mp,
            cpu_ram_efficient_loading=False,
        )
        precision = "bf16" if kind == "ours cast first" else "no"
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision)
        results["kind"] = str(accelerator.distributed_type)
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = "FSDP"
        model = fsdp2_prepare_model(accelerator, model)
        same = all(torch.equal(whole(p.detach()), before[name]) for name, p in protected(model).items())
        results[kind] = {**measured(model), "same bits": same}
    return results


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases: dict[str, Callable[[], Any]] = {
        "plain": plain,
        "plain mixed storage": plain_mixed_storage,
        "plain ignored": plain_ignored,
        "plain conv1d unit": plain_conv1d_unit,
        "plain list units": plain_list_units,
        "override": override,
        "override mixed storage": override_mixed_storage,
        "ours f32": partial(ours, "shard"),
        "ours cast first": partial(ours, "cast, then shard"),
        "ours cast last": partial(ours, "shard, then cast"),
        "ours low reduction": ours_low_reduction,
        "ours by layer": ours_by_layer,
        "ours attention alone": ours_attention_alone,
        "ours unkept": ours_unkept,
        "adapted": adapted,
        "without values": without_values,
        "replicated": replicated,
        "families": families,
        "trained": trained,
        "dcp f32": partial(saved_and_reloaded, "f32"),
        "dcp bf16": partial(saved_and_reloaded, "bf16"),
        "saved": partial(saved_pretrained, sys.argv[1]),
        "ledger": ledger,
        "fsdp1": fsdp1,
        "accelerated": accelerated,
    }
    chosen = sys.argv[2:] or list(cases)
    results = {}
    for name in chosen:
        torch.manual_seed(0)
        results[name] = cases[name]()
        print("done", name, flush=True)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(results))
    end_rank()


if __name__ == "__main__":
    main()
