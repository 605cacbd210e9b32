#!/usr/bin/env python3
"""Training steps on two ranks of one thread: Ballast under mpirun beside one process, and beside DDP and FSDP2 on gloo.

The 58 M hybrid of models.py, 1,024 tokens a rank, AdamW with f32 masters; medians of whole steps, in one run.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from environment import ROOT, own_environment
from models import CONFIG, peak_bytes

TOKENS = 1024
BINARY = ROOT / "target/release/ballast"


def ballast_steps(binary, folder, text, name, precision, ranks, threads, shard, steps, more={}):
    """Median seconds of a step, the largest memory of a rank and its plan, the share of the time spent waiting, and bytes sent."""
    out = folder / name
    settings = {
        "model.checkpoint": f'"{folder / "model"}"',
        "data.files": f'[{{path="{text}"}}]',
        "data.sequence_length": TOKENS,
        "data.validation_fraction": 0.0,
        "data.add_eos": "false",
        "batch.sequences": 1,
        "batch.accumulation": 2,
        "batch.groups": 2,
        "cluster.shard": shard,
        "precision.preset": precision,
        "evaluation.batches": 0,
        "samples.count": 0,
        "checkpoints.every": 0,
        "ledger.every": 0,
        "steps": steps,
        **more,
    }
    command = [binary, "--threads", threads, "--quiet", "train", "--out", out]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    as_text = lambda command: [str(part) for part in command]
    plan = as_text(command + ["--dry-run", "--ranks", ranks, "--flops", 100, "--json"])
    plan = json.loads(subprocess.run(plan, check=True, capture_output=True, text=True).stdout)
    if ranks > 1:
        command = ["mpirun", "--allow-run-as-root", "--bind-to", "core", "-n", ranks, *command]
    subprocess.run(as_text(command), check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(out)
    taken = [line for line in lines if line["kind"] == "step"]
    # The first step touches all memory for the first time; a single one is long enough not to mind.
    taken = taken[1:] or taken
    memory = max(max(step.get("ranks", {}).get("peak_memory", [step["peak_memory"]])) for step in taken)
    waiting = [statistics.mean(step["ranks"]["waiting"]) for step in taken if "ranks" in step]
    sent = taken[-1].get("ranks", {}).get("sent", {})
    return {
        "seconds": statistics.median(step["seconds"] for step in taken),
        "memory": memory,
        "plan": max(plan["memory_total_bytes"], plan["memory_loading_bytes"]),
        "waiting": statistics.median(waiting) if waiting else 0.0,
        "sent": sent,
    }


def memory_of(run):
    return f"{run['memory'] / 2**30:.2f} GiB ({run['memory'] / run['plan']:.2f} of the plan)"


def torch_rank(folder, dtype, mode, steps):
    """One rank of torch, started with RANK and WORLD_SIZE set; rank 0 prints JSON."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    if mode == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif mode == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.1)
    ids = torch.tensor([[(t + dist.get_rank()) * 7919 % CONFIG["vocab_size"] for t in range(TOKENS)]])
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - begin)
    peaks = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_bytes())
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": statistics.median(times[1:]), "memory": max(peaks)}))
    dist.destroy_process_group()


def torch_steps(folder, dtype, mode, steps):
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--torch-rank", str(folder), dtype, mode, "--steps", str(steps)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"torch {mode} in {dtype} failed")
    return json.loads(outputs[0].strip().splitlines()[-1])


def context_steps(args, folder, text, precision):
    """One long sequence on one process with two threads, and on two ranks of one thread that share it."""
    more = {
        "data.sequence_length": args.context_tokens,
        "batch.accumulation": 1,
        "batch.groups": 1,
        "precision.recompute": "selective",
    }
    run = lambda name, *rest: ballast_steps(args.binary, folder, text, f"{precision}-context-{name}", precision, *rest)
    one = run("one", 1, 2, "none", args.steps, more)
    tokens = f"{args.context_tokens:,} tokens"
    print(f"{precision}, {tokens}: one process, two threads: {one['seconds']:.1f} s, {memory_of(one)}")
    for shard in ["none", "gradients"]:
        two = run(shard, 2, 1, shard, args.steps, more | {"cluster.context": 2})
        print(
            f"  two ranks, one thread, context 2, {shard:9}: {two['seconds']:.1f} s, {two['seconds'] / one['seconds']:.2f} of "
            f"the time, {memory_of(two)} a rank, {two['memory'] / one['memory']:.2f} of the memory, "
            f"{100 * two['waiting']:.1f} % waiting"
        )


def make_model(folder):
    """The hybrid with random weights, a tokenizer of bytes, and a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**CONFIG))
    model.save_pretrained(folder / "model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    text = folder / "text.txt"
    text.write_text("".join(chr(97 + t * 7919 % 26) for t in range(400_000)))
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="an environment with torch and transformers")
    parser.add_argument("--binary", default=BINARY, help="built with --features mpi")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--precision", nargs="*", default=["f32", "bf16"])
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--context", action="store_true", help="only sequences that two ranks share")
    parser.add_argument("--context-tokens", type=int, default=32768)
    parser.add_argument("--torch-rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch_rank:
        return torch_rank(*args.torch_rank, args.steps)
    if "BALLAST_PEERS" not in os.environ:
        python = args.python or own_environment()
        command = ["cargo", "build", "--release", "--features", "mpi"]
        if args.binary == BINARY:
            subprocess.run(command, cwd=ROOT, check=True)
        os.execve(python, [str(python), *sys.argv], {**os.environ, "BALLAST_PEERS": "1"})
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        text = make_model(folder)
        if args.context:
            for precision in args.precision:
                context_steps(args, folder, text, precision)
            return
        for precision in args.precision:
            dtype = {"f32": "float32", "bf16": "bfloat16"}[precision]
            run = lambda *rest, more={}: ballast_steps(args.binary, folder, text, *rest, args.steps, more)
            one = run(f"{precision}-one", precision, 1, 2, "none")
            print(f"{precision}: one process, two threads: {one['seconds']:.2f} s, {memory_of(one)}")
            best = {}
            for shard in ["none", "optimizer", "gradients", "weights"]:
                two = run(f"{precision}-{shard}", precision, 2, 1, shard)
                blocking = run(f"{precision}-{shard}-blocking", precision, 2, 1, shard, more={"cluster.window": 0})
                best[shard] = two
                print(
                    f"  two ranks, one thread, {shard:9}: {two['seconds']:.2f} s, {one['seconds'] / two['seconds']:.2f}x of "
                    f"one process, {memory_of(two)} a rank, {100 * two['waiting']:.1f} % waiting "
                    f"({100 * blocking['waiting']:.1f} % without overlap), {sum(two['sent'].values()) / 2**20:.0f} MiB sent"
                )
            if args.no_torch:
                continue
            for mode, shard in [("ddp", "gradients"), ("fsdp2", "weights")]:
                torch = torch_steps(folder / "model", dtype, mode, args.steps)
                ours = best[shard]
                print(
                    f"  torch {mode:5}: {torch['seconds']:.2f} s, {torch['memory'] / 2**30:.2f} GiB a rank; Ballast with "
                    f"{shard}: {torch['seconds'] / ours['seconds']:.2f}x as fast, {ours['memory'] / torch['memory']:.2f} of "
                    "the memory"
                )


if __name__ == "__main__":
    main()
