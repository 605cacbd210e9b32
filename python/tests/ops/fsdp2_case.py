"""Two gloo ranks: a patched model under FSDP2 has the gradients of the unsharded one."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_transformers import model_of
from torch.distributed.fsdp import fully_shard

import ballast


def rank_main(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    ballast.patch_transformers()
    ids = torch.arange(2 * 60).reshape(2, 60) * 7 % 64
    whole = model_of("Qwen3_5")
    whole(ids, use_cache=False).logits.square().mean().backward()
    sharded = model_of("Qwen3_5")
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    sharded(ids[rank : rank + 1], use_cache=False).logits.square().mean().backward()
    expected = dict(whole.named_parameters())
    for name, parameter in sharded.named_parameters():
        gradient = parameter.grad.full_tensor()
        far = (gradient - expected[name].grad).norm() / expected[name].grad.norm()
        assert far < 1e-4, f"{name}: {far:.1e}"
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # for the reason in `end_rank` of torch_support.py


if __name__ == "__main__":
    mp.spawn(rank_main, args=(sys.argv[1],), nprocs=2)
