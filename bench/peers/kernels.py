#!/usr/bin/env python3
"""Kernels of Ballast beside torch and transformers: the same shapes, one run, ratios."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def own_environment():
    """The python of a virtual environment with the pinned requirements; made when it is not there."""
    folder = HERE / ".venv"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print("installing torch and transformers into bench/peers/.venv", file=sys.stderr)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", HERE / "requirements.txt"], check=True)
        (folder / "ready").touch()
    return python


def ballast(*arguments):
    """What bench-kernels measures."""
    binary = ROOT / "target/release/bench-kernels"
    line = subprocess.run([binary, *map(str, arguments)], check=True, capture_output=True, text=True).stdout
    return json.loads(line)


def median(work, repetitions):
    work()
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def gated_delta_rule(tokens, compiled):
    """Forward, and forward+backward, of transformers' chunk fallback; 16 heads of 128."""
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule

    rule = getattr(rule, "__wrapped__", rule)
    if compiled:
        rule = torch.compile(rule)
    shape = (1, tokens, 16, 128)
    q, k, v, d_o = (torch.randn(shape) for _ in range(4))
    g, beta = -0.1 * torch.rand(shape[:3]), torch.rand(shape[:3])
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]

    def run(*inputs):
        out = rule(*inputs[:3], g=inputs[3], beta=inputs[4], use_qk_l2norm_in_kernel=True)
        return out[0] if isinstance(out, tuple) else out

    def forward():
        with torch.no_grad():
            run(*inputs)

    def both():
        run(*inputs).backward(d_o)
        for x in inputs:
            x.grad = None

    repetitions = 5 if tokens <= 4096 else 1
    return median(forward, repetitions), median(both, repetitions)


class Table:
    def __init__(self):
        print(f"{'case':52} {'peer':>10} {'ballast':>10} {'ratio':>7} {'target':>7}")

    def row(self, case, peer, ours, target):
        target = f"{target}x" if isinstance(target, (int, float)) else target
        print(f"{case:52} {1e3 * peer:7.1f} ms {1e3 * ours:7.1f} ms {peer / ours:6.2f}x {target:>7}", flush=True)


def run_gdn(table, arguments):
    threads = ["--threads", arguments.threads]
    per_token = {}
    for tokens in (2048, 16384):
        forward = ballast("gdn", "--tokens", tokens, *threads)
        both = ballast("gdn", "--tokens", tokens, "--backward", *threads)
        bf16 = ballast("gdn", "--tokens", tokens, "--backward", "--storage", "bf16", *threads)
        per_token[tokens] = (forward["seconds"] / tokens, both["seconds"] / tokens)
        eager = gated_delta_rule(tokens, compiled=False)
        label = f"gated delta rule, f32, T {tokens}"
        table.row(f"{label}, forward, eager", eager[0], forward["seconds"], 6)
        table.row(f"{label}, forward+backward, eager", eager[1], both["seconds"], 12)
        if not arguments.no_compile and tokens == 2048:
            compiled = gated_delta_rule(tokens, compiled=True)
            table.row(f"{label}, forward, compiled", compiled[0], forward["seconds"], 4)
            table.row(f"{label}, forward+backward, compiled", compiled[1], both["seconds"], 4)
        table.row(f"{label}, forward+backward, bf16 against our f32", both["seconds"], bf16["seconds"], 0.9)
        if tokens == 2048:
            peak = ballast("peak", *threads)["gflops"]
            share = 100 * forward["gflops"] / peak
            print(f"{'':4}forward: {forward['gflops']:.0f} GFLOP/s, {share:.0f} % of a large product's {peak:.0f}")
    for i, name in enumerate(("forward", "forward+backward")):
        growth = per_token[16384][i] / per_token[2048][i]
        print(f"{'':4}{name}: time per token at T 16384 is {growth:.2f} of that at T 2048 (at most 1.15)")


CASES = {"gdn": run_gdn}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="only these cases")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--python", help="a python that has the requirements")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    arguments = parser.parse_args()
    if "BALLAST_PEERS" not in os.environ:
        python = arguments.python or own_environment()
        subprocess.run(["cargo", "build", "--release", "-p", "ballast-bench"], cwd=ROOT, check=True)
        os.execve(python, [str(python), *sys.argv], {**os.environ, "BALLAST_PEERS": "1"})
    import torch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    table = Table()
    for case in arguments.case or CASES:
        CASES[case](table, arguments)


if __name__ == "__main__":
    main()
