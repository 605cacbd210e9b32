"""GatedDeltaNet of megatron-core in Float16Module, with and without keep_fp32. Prints one line of JSON."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from megatron_cpu import Decoder, configuration, gated_delta_net, initialize
from torch import nn
from torch_support import RELEASE, end_rank, free_port, release_tensors

from ballast.checkpoint import convert
from ballast.torch import Ledger, RoundedWarning, keep_fp32

HF = json.loads((RELEASE / "config.json").read_text())["text_config"]
LAYERS = 3


def converted() -> dict[str, torch.Tensor]:
    """The linear-attention layers of the released file in Megatron's layout."""
    file = release_tensors()
    state = {}
    for layer in range(LAYERS):
        hf = {
            name.split("linear_attn.")[1]: tensor
            for name, tensor in file.items()
            if f"language_model.layers.{layer}.linear_attn." in name
        }
        projections = [hf[f"in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")]
        megatron = {
            "A_log": hf["A_log"],
            "dt_bias": hf["dt_bias"],
            "out_norm.weight": hf["norm.weight"] - 1,
            "conv1d.weight": hf["conv1d.weight"],
            "in_proj.weight": torch.cat(projections),
            "out_proj.weight": hf["out_proj.weight"],
        }
        prefix = f"decoder.layers.{layer}.self_attention."
        state.update({prefix + name: tensor for name, tensor in megatron.items()})
    return state


def load(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    target = model.module if hasattr(model, "float16_convertor") else model
    result = target.load_state_dict(state, strict=False)
    assert not result.unexpected_keys, result


def dtypes(model: nn.Module) -> list[str]:
    """dtypes of A_log, dt_bias, out_norm of the first layer."""
    found = {name.split("self_attention.")[-1]: p.dtype for name, p in model.named_parameters()}
    return [str(found[key]).removeprefix("torch.") for key in ("A_log", "dt_bias", "out_norm.weight")]


def errors(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference to the converted file, by tensor."""
    worst: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        key = name.split("self_attention.")[1]
        difference = float((parameter.detach().float() - state[name].float()).abs().max())
        worst[key] = max(worst.get(key, 0.0), difference)
    return worst


def plain(before: bool) -> dict[str, Any]:
    from megatron.core.transformer.module import Float16Module

    config, state = configuration(HF), converted()
    model = Decoder(config, LAYERS)
    result = {"constructed": dtypes(model)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if before:
            load(model, state)
        model = Float16Module(config, model)
        if not before:
            load(model, state)
    rounded = [w for w in caught if issubclass(w.category, RoundedWarning) or "bf" in str(w.message)]
    return {**result, "wrapped": dtypes(model), "errors": errors(model, state), "warnings": len(rounded)}


def published_change() -> list[str]:
    """A_log and out_norm constructed in f32, as the published change has it, then wrapped."""
    from megatron.core.transformer.module import Float16Module

    config = configuration(HF)
    model = Decoder(config, 1)
    layer = model.decoder.layers[0].self_attention
    for parameter in (layer.A_log, layer.out_norm.weight):
        parameter.data = parameter.data.float()
    constructed = dtypes(model)
    return [*constructed, *dtypes(Float16Module(config, model))]


def dtype_restored(before: bool) -> dict[str, Any]:
    """The published change with the dtype restored after wrapping, as Megatron does for the router's bias."""
    from megatron.core.transformer.module import Float16Module

    config, state = configuration(HF), converted()
    model = Decoder(config, LAYERS)
    islands = [p for name, p in model.named_parameters() if name.endswith(("A_log", "out_norm.weight"))]
    for parameter in islands:
        parameter.data = parameter.data.float()
    if before:
        load(model, state)
    model = Float16Module(config, model)
    for parameter in islands:
        parameter.data = parameter.data.float()
    if not before:
        load(model, state)
    return {"wrapped": dtypes(model), "errors": errors(model, state)}


def kept(before: bool, policy: str) -> dict[str, Any]:
    from megatron.core.transformer.module import Float16Module

    config, state = configuration(HF), converted()
    model = Decoder(config, LAYERS)
    with warnings.catch_warnings():
        # Megatron draws A_log in bf16; the checkpoint has the bits.
        warnings.simplefilter("ignore", RoundedWarning)
        handle = keep_fp32(model, policy)
    if before:
        load(model, state)
    model = Float16Module(config, model)
    wrapped = dtypes(model)
    if not before:
        load(model, state)
    loaded = errors(model, state)
    sharded = model.module.state_dict()
    same_keys = sorted(sharded) == sorted(Decoder(config, LAYERS).state_dict())

    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ledger = Ledger(policy=policy, on_fault="raise")
    ledger.attach(model)
    model.train()
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(12, 1, HF["hidden_size"], dtype=torch.bfloat16)
        model.module(x).float().pow(2).mean().backward()
        ledger.step(model)
        optimizer.step()
        optimizer.zero_grad()
    ledger.close()
    moved, beyond = {}, {}
    for key in ("A_log", "out_norm.weight"):
        found = {name: p.detach() for name, p in model.named_parameters() if name.endswith(key)}
        moved[key] = all(not torch.equal(p, start[name]) for name, p in found.items())
        beyond[key] = all(bool((p != p.bfloat16().float()).any()) for p in found.values())
    if policy == "strict":
        handle.verify()
    return {
        "wrapped": wrapped,
        "errors": loaded,
        "same keys": same_keys,
        "trained": dtypes(model),
        "moved": moved,
        "beyond bf16": beyond,
        "ledger": ledger.summary(),
    }


def layer_alone() -> list[str]:
    """The layer itself, whose parameters have no module in their names."""
    from megatron.core.transformer.module import Float16Module

    config = configuration(HF)
    layer = gated_delta_net(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundedWarning)
        keep_fp32(layer)
    exact = torch.rand_like(layer.A_log)
    layer.load_state_dict({"A_log": exact}, strict=False)
    wrapped = Float16Module(config, layer)
    assert torch.equal(wrapped.module.A_log, exact)
    return dtypes(wrapped.module)


def distributed() -> dict[str, int]:
    """Tensors of a torch_dist checkpoint of Ballast that Megatron loads, and those with the file's bits."""
    from megatron.core import dist_checkpointing

    state = converted()
    model = Decoder(configuration(HF), LAYERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keep_fp32(model)
        with tempfile.TemporaryDirectory() as folder:
            convert(RELEASE, Path(folder) / "dist", layout="megatron", format="torch_dist")
            wanted = {}
            for number, layer in enumerate(model.decoder.layers):
                prefix = f"decoder.layers.{number}.self_attention."
                wanted.update(layer.self_attention.sharded_state_dict(prefix=prefix))
            loaded = dist_checkpointing.load(wanted, str(Path(folder) / "dist" / "release"))
    equal = [name for name, tensor in state.items() if torch.equal(loaded[name], tensor)]
    return {"loaded": len(state), "equal": len(equal)}


def main() -> None:
    torch.set_num_threads(1)
    initialize(free_port())
    results = {
        "plain, loaded after": plain(before=False),
        "plain, loaded before": plain(before=True),
        "published change": published_change(),
        "restored, loaded after": dtype_restored(before=False),
        "restored, loaded before": dtype_restored(before=True),
        "strict, loaded after": kept(before=False, policy="strict"),
        "strict, loaded before": kept(before=True, policy="strict"),
        "megatron, loaded after": kept(before=False, policy="megatron"),
        "layer alone": layer_alone(),
        "distributed": distributed(),
    }
    print("RESULT " + json.dumps(results))
    end_rank()


if __name__ == "__main__":
    main()
