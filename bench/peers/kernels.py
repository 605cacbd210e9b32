#!/usr/bin/env python3
"""Kernels of Ballast beside torch and transformers: the same shapes, one run, ratios."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from environment import ROOT, median, own_environment

# torch's types by the names of ours.
TORCH = {"f32": "float32", "bf16": "bfloat16"}


def ballast(*arguments):
    """What bench-kernels measures."""
    binary = ROOT / "target/release/bench-kernels"
    line = subprocess.run([binary, *map(str, arguments)], check=True, capture_output=True, text=True).stdout
    return json.loads(line)


def rounds(peer, *arguments, count=3, each=3):
    """Medians of the peer's seconds and of what bench-kernels measures, in turn, the order changing."""
    theirs, ours = [], []
    for i in range(count):
        steps = [lambda: theirs.append(median(peer, each)), lambda: ours.append(ballast(*arguments, "--repetitions", each))]
        for step in steps if i % 2 == 0 else reversed(steps):
            step()
    return statistics.median(theirs), statistics.median(result["seconds"] for result in ours)


def rounded(dtype):
    """The factors of products that the preset `bf16` rounds; torch rounds these and more."""
    return ["--rounded"] if dtype == "bf16" else []


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
        print(f"{'case':54} {'peer':>11} {'ballast':>11} {'ratio':>7} {'target':>7}")

    def row(self, case, peer, ours, target=None, scale=1e3, unit="ms"):
        """Seconds unless told otherwise; without a target the ratio is a finding, not a claim."""
        target = "" if target is None else f"{target}x"
        figures = f"{scale * peer:7.1f} {unit:3} {scale * ours:7.1f} {unit:3} {peer / ours:6.2f}x"
        print(f"{case:54} {figures} {target:>7}", flush=True)


def run_gdn(table, arguments):
    threads = ["--threads", arguments.threads]
    per_token = {}
    for tokens in (2048, 16384):
        forward = ballast("gdn", "--tokens", tokens, *threads)
        both = ballast("gdn", "--tokens", tokens, "--backward", *threads)
        narrow = ["--storage", "bf16", *threads]
        forward_bf16 = ballast("gdn", "--tokens", tokens, *narrow)
        both_bf16 = ballast("gdn", "--tokens", tokens, "--backward", *narrow)
        per_token[tokens] = (forward["seconds"] / tokens, both["seconds"] / tokens)
        eager = gated_delta_rule(tokens, compiled=False)
        label = f"gated delta rule, f32, T {tokens}"
        table.row(f"{label}, forward, eager", eager[0], forward["seconds"], 6)
        table.row(f"{label}, forward+backward, eager", eager[1], both["seconds"], 7.5)
        if not arguments.no_compile:
            compiled = gated_delta_rule(tokens, compiled=True)
            table.row(f"{label}, forward, compiled", compiled[0], forward["seconds"], 4)
            table.row(f"{label}, forward+backward, compiled", compiled[1], both["seconds"], 4.2)
        table.row(f"{label}, forward, bf16 against our f32", forward["seconds"], forward_bf16["seconds"], 1.4)
        table.row(f"{label}, both, bf16 against our f32", both["seconds"], both_bf16["seconds"], 1.4)
        if tokens == 2048:
            peak = ballast("peak", *threads)["gflops"]
            share = 100 * forward["gflops"] / peak
            print(f"{'':4}forward: {forward['gflops']:.0f} GFLOP/s, {share:.0f} % of a large product's {peak:.0f}")
    for i, name in enumerate(("forward", "forward+backward")):
        growth = per_token[16384][i] / per_token[2048][i]
        print(f"{'':4}{name}: time per token at T 16384 is {growth:.2f} of that at T 2048 (at most 1.15)")


def run_linear(table, arguments):
    """1024 tokens, 1024 -> 3584: y, dx and dw."""
    import torch

    threads = ["--threads", arguments.threads]
    x, w, dy = torch.randn(1024, 1024), torch.randn(3584, 1024), torch.randn(1024, 3584)
    narrow = [t.bfloat16() for t in (x, w, dy)]
    products = {
        "forward": lambda x, w, dy: x @ w.T,
        "input": lambda x, w, dy: dy @ w,
        "weight": lambda x, w, dy: dy.T @ x,
    }
    for name, product in products.items():
        case = ["linear", "--product", name, *threads]
        wide = rounds(lambda: product(x, w, dy), *case, each=15)
        table.row(f"linear 1024x1024x3584, f32, {name}", *wide, 0.9)
        mixed = rounds(lambda: product(x, w, dy), *case, "--weights", "bf16", each=15)
        table.row(f"linear, bf16 weight, {name}, against torch f32", *mixed, 0.9)
        both = rounds(lambda: product(*narrow), *case, "--weights", "bf16", "--storage", "bf16", each=15)
        table.row(f"linear, all bf16, {name}, against torch bf16", *both, 1)


def run_gemv(table, arguments):
    import torch

    x, w = torch.randn(1, 1024).bfloat16(), torch.randn(3584, 1024).bfloat16()
    linear = torch.nn.functional.linear

    def many():
        for _ in range(100):
            linear(x, w)

    case = ["linear", "--tokens", 1, "--weights", "bf16", "--storage", "bf16", "--threads", arguments.threads]
    peers, ours = [], []
    for _ in range(3):
        peers.append(median(many, 3) / 100)
        ours.append(ballast(*case, "--repetitions", 301)["seconds"])
    table.row("gemv 1x1024x3584, bf16", statistics.median(peers), statistics.median(ours), None, 1e6, "us")


def run_attention(table, arguments):
    """Causal, 8 query heads on 2 kv heads of 256."""
    for dtype, tokens, target in [("f32", 2048, 1), ("bf16", 2048, 1.2), ("bf16", 8192, 1.2)]:
        forward, both = attention(dtype, tokens)
        case = ["attention", "--tokens", tokens, "--storage", dtype, "--threads", arguments.threads, *rounded(dtype)]
        label = f"attention, {dtype}, T {tokens}, 8/2 heads of 256"
        table.row(f"{label}, forward", *rounds(forward, *case), target)
        table.row(f"{label}, both", *rounds(both, *case, "--backward"), target)


def attention(dtype, tokens):
    """Forward, and forward+backward, of torch."""
    import torch

    def tensor(heads):
        return torch.randn(1, heads, tokens, 256).to(getattr(torch, TORCH[dtype])).requires_grad_()

    inputs, d_o = [tensor(8), tensor(2), tensor(2)], tensor(8).detach()

    def run():
        return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

    def forward():
        with torch.no_grad():
            run()

    def both():
        run().backward(d_o)
        for x in inputs:
            x.grad = None

    return forward, both


def loss_step(dtype, vocabulary):
    """Logits, cross entropy and both gradients, 2048 tokens of 1024."""
    import torch

    hidden = torch.randn(2048, 1024).to(getattr(torch, TORCH[dtype])).requires_grad_()
    # Logits of a usual size: larger ones make subnormal probabilities, which take torch many times as long.
    w = (torch.randn(vocabulary, 1024) / 32).to(getattr(torch, TORCH[dtype])).requires_grad_()
    targets = torch.randint(0, vocabulary, (2048,))

    def step():
        torch.nn.functional.cross_entropy(hidden @ w.T, targets).backward()
        hidden.grad = w.grad = None

    return step


def grown(work):
    """Bytes that this process grows by at most while the work runs for the first time."""
    peak = lambda: 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    # Sets the peak to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    work()
    return peak() - before


def run_linear_cross_entropy(table, arguments):
    for dtype, vocabulary, target in [("f32", 32768, 1), ("bf16", 32768, 1.5), ("bf16", 151936, 1.5)]:
        case = ["linear-cross-entropy", "--vocabulary", vocabulary, "--storage", dtype, "--threads", arguments.threads]
        case += rounded(dtype)
        label = f"linear_cross_entropy, {dtype}, T 2048, H 1024, V {vocabulary}"
        table.row(label, *rounds(loss_step(dtype, vocabulary), *case), target)
        # A process of its own for each: inputs are there before, gradients count.
        own = [sys.executable, __file__, "--peak-of-loss", dtype, str(vocabulary), "--threads", str(arguments.threads)]
        theirs = int(subprocess.run(own, check=True, capture_output=True, text=True).stdout)
        ours = ballast(*case, "--repetitions", 1)["bytes"]
        table.row("  peak memory", theirs, ours, 4, 2**-20, "MiB")


CASES = {
    "gdn": run_gdn,
    "attention": run_attention,
    "linear": run_linear,
    "linear_cross_entropy": run_linear_cross_entropy,
    "gemv": run_gemv,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="only these cases")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--python", help="a python that has the requirements")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--peak-of-loss", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "BALLAST_PEERS" not in os.environ:
        python = arguments.python or own_environment()
        subprocess.run(["cargo", "build", "--release", "-p", "ballast-bench"], cwd=ROOT, check=True)
        os.execve(python, [str(python), *sys.argv], {**os.environ, "BALLAST_PEERS": "1"})
    import torch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    if arguments.peak_of_loss:
        dtype, vocabulary = arguments.peak_of_loss
        return print(grown(loss_step(dtype, int(vocabulary))))
    table = Table()
    for case in arguments.case or CASES:
        CASES[case](table, arguments)


if __name__ == "__main__":
    main()
