#!/usr/bin/env python3
"""A whole hybrid model in Ballast beside transformers on torch: the same weights, one run, ratios."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from environment import ROOT, median, own_environment

# 58 M parameters
CONFIG = dict(
    vocab_size=32768,
    hidden_size=512,
    num_hidden_layers=8,
    intermediate_size=1792,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    linear_num_key_heads=8,
    linear_num_value_heads=8,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    tie_word_embeddings=True,
)


def ballast(*arguments):
    """What bench-model measures."""
    binary = ROOT / "target/release/bench-model"
    line = subprocess.run([binary, *map(str, arguments)], check=True, capture_output=True, text=True).stdout
    return json.loads(line)


def peak_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def torch_step(folder, tokens, dtype, compiled, repetitions, update=False):
    """Seconds and memory of loss and gradients, and of clipping and AdamW too; run in a process of its own."""
    import torch
    from transformers import AutoModelForCausalLM

    before = peak_bytes()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    if compiled:
        model = torch.compile(model)
    ids = torch.tensor([[t * 7919 % CONFIG["vocab_size"] for t in range(tokens)]])
    loss = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.1) if update else None

    def step():
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        loss.append(out.loss.item())
        if optimizer:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    seconds = median(step, repetitions)
    return {"seconds": seconds, "memory": peak_bytes() - before, "loss": loss[-1]}


def torch_decode(folder, tokens):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        out = model(torch.tensor([[1, 2, 3]]), use_cache=True)
        times = []
        for _ in range(tokens):
            begin = time.perf_counter()
            out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
            times.append(time.perf_counter() - begin)
    times.sort()
    return {"seconds": times[len(times) // 2]}


def child(arguments, *options):
    """A measurement of torch in a process of its own, so that its memory is its own."""
    command = [sys.executable, __file__, "--threads", str(arguments.threads), "--child", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "BALLAST_PEERS": "1"})
    if done.returncode != 0:
        print(done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(case, peer, ours, ratio, target):
    print(f"{case:58} {peer:>12} {ours:>12} {ratio:6.2f}x {target:>7}", flush=True)


def milliseconds(result):
    return f"{1e3 * result['seconds']:.0f} ms"


def mebibytes(result):
    return f"{result['memory'] / 2**20:.0f} MiB"


def run(arguments, folder):
    threads = ["--threads", arguments.threads]
    print(f"{'case':58} {'peer':>12} {'ballast':>12} {'ratio':>7} {'target':>7}")
    ours = {}
    for tokens, precision in [(1024, "f32"), (1024, "bf16"), (256, "bf16"), (8192, "f32"), (8192, "bf16")]:
        repetitions = ["--repetitions", 3 if tokens > 1024 else 7]
        ours[tokens, precision] = ballast("step", folder, "--tokens", tokens, "--precision", precision, *threads, *repetitions)
    mine = ours[1024, "f32"]
    peer = child(arguments, "step", folder, 1024, "float32", 0, 5)
    assert abs(peer["loss"] - mine["loss"]) < 1e-3 * peer["loss"], (peer["loss"], mine["loss"])
    row("forward+backward f32, T 1024", milliseconds(peer), milliseconds(mine), peer["seconds"] / mine["seconds"], "2x")
    row("  peak memory", mebibytes(peer), mebibytes(mine), peer["memory"] / mine["memory"], "2x")
    for recompute in ("selective", "full"):
        result = ballast("step", folder, "--tokens", 1024, "--recompute", recompute, *threads)
        row(f"  recompute {recompute}, time", milliseconds(mine), milliseconds(result), mine["seconds"] / result["seconds"], "-")
        row(f"  recompute {recompute}, memory", mebibytes(peer), mebibytes(result), peer["memory"] / result["memory"], "-")
    if not arguments.no_compile:
        compiled = child(arguments, "step", folder, 1024, "float32", 1, 5)
        if compiled:
            row("  against torch.compile", milliseconds(compiled), milliseconds(mine), compiled["seconds"] / mine["seconds"], "-")
            row("  its peak memory", mebibytes(compiled), mebibytes(mine), compiled["memory"] / mine["memory"], "-")
        else:
            print("  torch.compile failed")
    narrow = ours[1024, "bf16"]
    row("forward+backward bf16 against our f32, T 1024", milliseconds(mine), milliseconds(narrow), mine["seconds"] / narrow["seconds"], "0.87x")
    row("  peak memory", mebibytes(mine), mebibytes(narrow), mine["memory"] / narrow["memory"], "-")
    short = ours[256, "bf16"]
    peer = child(arguments, "step", folder, 256, "bfloat16", 0, 1)
    row("forward+backward bf16, T 256", milliseconds(peer), milliseconds(short), peer["seconds"] / short["seconds"], "30x")
    row("  peak memory", mebibytes(peer), mebibytes(short), peer["memory"] / short["memory"], "2x")
    # torch keeps its moments in the parameters' type and has no masters; ours have f32 masters beside bf16 weights.
    steps = [(1024, "f32", "float32", "f32", "2x"), (256, "bf16", "bfloat16", "f32", "30x"), (256, "bf16", "bfloat16", "bf16", "30x")]
    for tokens, precision, dtype, moments, target in steps:
        mine = ballast("step", folder, "--tokens", tokens, "--precision", precision, "--update", "--moments", moments, *threads)
        peer = child(arguments, "train", folder, tokens, dtype, 0, 5)
        row(f"training step {precision}, {moments} moments, T {tokens}", milliseconds(peer), milliseconds(mine), peer["seconds"] / mine["seconds"], target)
        row("  peak memory", mebibytes(peer), mebibytes(mine), peer["memory"] / mine["memory"], "2x")
        print(f"    planned {mine['planned'] / 2**20:.0f} MiB, measured {mebibytes(mine)}")
    for precision in ("f32", "bf16"):
        long, base = ours[8192, precision], ours[1024, precision]
        growth = long["seconds"] / 8192 / (base["seconds"] / 1024)
        print(f"    {precision}: time per token at T 8192 is {growth:.2f} of that at T 1024 (at most 1.3); {mebibytes(long)}")
    decode = ballast("decode", folder, "--precision", "bf16", *threads)
    peer = child(arguments, "decode", folder, 32)
    row("decoding bf16, one token", milliseconds(peer), milliseconds(decode), peer["seconds"] / decode["seconds"], "-")
    share, rate = 100 * decode["share_of_limit"], decode["bandwidth"] / 1e9
    print(f"    {decode['tokens_per_second']:.0f} tokens/s, {share:.0f} % of the limit of {rate:.1f} GB/s (at least 80 %)")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--python", help="a python that has the requirements")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "BALLAST_PEERS" not in os.environ:
        python = arguments.python or own_environment()
        subprocess.run(["cargo", "build", "--release", "-p", "ballast-bench"], cwd=ROOT, check=True)
        os.execve(python, [str(python), *sys.argv], {**os.environ, "BALLAST_PEERS": "1"})
    import torch

    torch.set_num_threads(arguments.threads)
    if arguments.child:
        kind, folder, *options = arguments.child
        if kind in ("step", "train"):
            tokens, dtype, compiled, repetitions = options
            result = torch_step(folder, int(tokens), dtype, compiled == "1", int(repetitions), kind == "train")
        else:
            result = torch_decode(folder, int(options[0]))
        print(json.dumps(result))
        return
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**CONFIG)).save_pretrained(folder)
        run(arguments, folder)


if __name__ == "__main__":
    main()
