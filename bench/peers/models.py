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

# 570 M parameters with the widths of Qwen3.5-0.8B
LARGE = dict(
    CONFIG,
    vocab_size=151936,
    hidden_size=1024,
    num_hidden_layers=20,
    intermediate_size=3584,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
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


def torch_step(folder, tokens, dtype, compiled, repetitions, kind="step"):
    """Seconds and memory of loss and gradients; of a training step with clipping and AdamW ("train"), or one of
    adapters on all linear layers ("lora"). Run in a process of its own."""
    import torch
    from transformers import AutoModelForCausalLM

    before, update = peak_bytes(), kind != "step"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        model.train()
    if compiled:
        model = torch.compile(model)
    ids = torch.tensor([[t * 7919 % CONFIG["vocab_size"] for t in range(tokens)]])
    loss = []
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.1) if update else None

    def step():
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        loss.append(out.loss.item())
        if optimizer:
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
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


def run_f32(arguments, folder):
    threads = ["--threads", arguments.threads]
    mine = ballast("step", folder, "--tokens", 1024, *threads)
    peer = child(arguments, "step", folder, 1024, "float32", 0, 5)
    assert abs(peer["loss"] - mine["loss"]) < 1e-3 * peer["loss"], (peer["loss"], mine["loss"])
    row("forward+backward f32, T 1024", milliseconds(peer), milliseconds(mine), peer["seconds"] / mine["seconds"], "1.7x")
    row("  peak memory", mebibytes(peer), mebibytes(mine), peer["memory"] / mine["memory"], "2x")
    for recompute in ("selective", "full"):
        result = ballast("step", folder, "--tokens", 1024, "--recompute", recompute, *threads)
        row(f"  recompute {recompute}, time", milliseconds(mine), milliseconds(result), mine["seconds"] / result["seconds"], "-")
        row(f"  recompute {recompute}, memory", mebibytes(peer), mebibytes(result), peer["memory"] / result["memory"], "-")
    against_compiled(arguments, "step", folder, 1024, "float32", mine, "1.4x")


def run_bf16(arguments, folder):
    threads = ["--threads", arguments.threads, "--precision", "bf16"]
    for tokens, targets in [(1024, ("2x", "1.5x")), (256, ("1.6x", "1.3x"))]:
        mine = ballast("step", folder, "--tokens", tokens, *threads)
        peer = child(arguments, "step", folder, tokens, "bfloat16", 0, 5)
        row(f"forward+backward bf16, T {tokens}", milliseconds(peer), milliseconds(mine), peer["seconds"] / mine["seconds"], "-")
        row("  peak memory", mebibytes(peer), mebibytes(mine), peer["memory"] / mine["memory"], "2x")
        # torch keeps its moments in the parameters' type and has no masters; ours have f32 masters beside bf16 weights.
        peer = child(arguments, "train", folder, tokens, "bfloat16", 0, 5)
        for moments in ("f32", "bf16"):
            mine = ballast("step", folder, "--tokens", tokens, *threads, "--update", "--moments", moments)
            ratio = peer["seconds"] / mine["seconds"]
            row(f"training step bf16, {moments} moments, T {tokens}", milliseconds(peer), milliseconds(mine), ratio, targets[0])
            row("  peak memory", mebibytes(peer), mebibytes(mine), peer["memory"] / mine["memory"], "-")
            print(f"    planned {mine['planned'] / 2**20:.0f} MiB, measured {mebibytes(mine)}")
            if moments == "f32":
                against_compiled(arguments, "train", folder, tokens, "bfloat16", mine, targets[1])


def against_compiled(arguments, kind, folder, tokens, dtype, mine, target):
    if arguments.no_compile:
        return
    compiled = child(arguments, kind, folder, tokens, dtype, 1, 5)
    if compiled:
        row("  against torch.compile", milliseconds(compiled), milliseconds(mine), compiled["seconds"] / mine["seconds"], target)
        row("  its peak memory", mebibytes(compiled), mebibytes(mine), compiled["memory"] / mine["memory"], "-")
    else:
        print("  torch.compile failed")


def run_length(arguments, folder):
    for precision in ("f32", "bf16"):
        per_token = {}
        for tokens in (1024, 8192):
            result = ballast("step", folder, "--tokens", tokens, "--precision", precision, "--threads", arguments.threads, "--repetitions", 3)
            per_token[tokens] = result["seconds"] / tokens
        print(f"    {precision}: time per token at T 8192 is {per_token[8192] / per_token[1024]:.2f} of that at T 1024 (at most 1.3)")


def run_decode(arguments, folder):
    decode = ballast("decode", folder, "--precision", "bf16", "--threads", arguments.threads)
    peer = child(arguments, "decode", folder, 32)
    row("decoding bf16, one token", milliseconds(peer), milliseconds(decode), peer["seconds"] / decode["seconds"], "-")
    share, rate = 100 * decode["share_of_limit"], decode["bandwidth"] / 1e9
    print(f"    {decode['tokens_per_second']:.0f} tokens/s, {share:.0f} % of the limit of {rate:.1f} GB/s (at least 85 %)")


def run_lora(arguments, folder):
    mine = ballast("step", folder, "--precision", "bf16", "--update", "--lora", 8, "--threads", arguments.threads, "--repetitions", 3)
    peer = child(arguments, "lora", folder, 1024, "bfloat16", 0, 3)
    assert abs(peer["loss"] - mine["loss"]) < 1e-2 * peer["loss"], (peer["loss"], mine["loss"])
    row("LoRA step bf16, 570 M, rank 8, T 1024", milliseconds(peer), milliseconds(mine), peer["seconds"] / mine["seconds"], "2x")
    row("  peak memory", mebibytes(peer), mebibytes(mine), peer["memory"] / mine["memory"], "1.67x")


CASES = {"f32": run_f32, "bf16": run_bf16, "length": run_length, "decode": run_decode, "lora": run_lora}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--python", help="a python that has the requirements")
    parser.add_argument("--case", choices=CASES, action="append", help="only these cases")
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
        # What is preloaded here (tile_sizes.c) would break the compiler that torch.compile calls.
        os.environ.pop("LD_PRELOAD", None)
        kind, folder, *options = arguments.child
        if kind != "decode":
            tokens, dtype, compiled, repetitions = options
            result = torch_step(folder, int(tokens), dtype, compiled == "1", int(repetitions), kind)
        else:
            result = torch_decode(folder, int(options[0]))
        print(json.dumps(result))
        return
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    print(f"{'case':58} {'peer':>12} {'ballast':>12} {'ratio':>7} {'target':>7}")
    for case in arguments.case or CASES:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(1)
            config = Qwen3_5TextConfig(**(LARGE if case == "lora" else CONFIG))
            dtype = torch.bfloat16 if case == "lora" else torch.float32
            AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
            CASES[case](arguments, folder)


if __name__ == "__main__":
    main()
