#!/usr/bin/env python3
"""The Python package: transformers with and without the patch, the delta rule under torch, and the import."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from environment import ROOT, median, own_environment
from models import CONFIG


def step(folder, tokens, dtype, patched, compiled, repetitions):
    """Loss and gradients of the model; wall and processor seconds."""
    import torch
    from transformers import AutoModelForCausalLM

    import ballast

    if patched:
        ballast.patch_transformers()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    if compiled:
        model = torch.compile(model)
    ids = torch.tensor([[t * 7919 % CONFIG["vocab_size"] for t in range(tokens)]])
    loss = []

    def work():
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        loss.append(out.loss.item())

    work()
    begin, processor = time.perf_counter(), time.process_time()
    seconds = median(work, repetitions)
    busy = (time.process_time() - processor) / (time.perf_counter() - begin)
    return {"seconds": seconds, "busy": busy, "loss": loss[-1]}


def rule(tokens, repetitions):
    """The gated delta rule of ballast.ops, forward and backward, 16 heads of 128."""
    import torch

    from ballast.ops import chunk_gated_delta_rule

    shape = (1, tokens, 16, 128)
    q, k, v, d_o = (torch.randn(shape) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v, -0.1 * torch.rand(shape[:3]), torch.rand(shape[:3]))]

    def work():
        o, _ = chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
        o.backward(d_o)
        for x in inputs:
            x.grad = None

    return {"seconds": median(work, repetitions)}


def child(arguments, *options):
    command = [sys.executable, __file__, "--threads", str(arguments.threads), "--child", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "BALLAST_PEERS": "1"})
    if done.returncode != 0:
        print(done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(case, peer, ours, target):
    print(f"{case:58} {1e3 * peer:9.0f} ms {1e3 * ours:9.0f} ms {peer / ours:6.2f}x {target:>7}", flush=True)


def run_model(arguments, folder):
    repetitions = arguments.repetitions
    for dtype, targets in [("float32", ("1.3x", "1.1x")), ("bfloat16", ("-", "-"))]:
        if dtype == "bfloat16" and arguments.quick:
            continue
        label = f"forward+backward {dtype}, T {arguments.tokens}"
        results = {}
        for name, patched, compiled in [("plain", 0, 0), ("patched", 1, 0), ("compiled", 0, 1), ("both", 1, 1)]:
            if not (compiled and arguments.no_compile):
                results[name] = child(arguments, "step", folder, arguments.tokens, dtype, patched, compiled, repetitions)
        patched = results["patched"]
        spread = 1e-3 if dtype == "float32" else 2e-2
        for result in filter(None, results.values()):
            assert abs(result["loss"] - patched["loss"]) < spread * patched["loss"], results
        row(f"{label}, transformers", results["plain"]["seconds"], patched["seconds"], targets[0])
        if results.get("compiled"):
            row(f"{label}, torch.compile", results["compiled"]["seconds"], patched["seconds"], targets[1])
        if results.get("compiled") and results.get("both"):
            row("  both compiled", results["compiled"]["seconds"], results["both"]["seconds"], "-")
        print(f"    processors busy: {patched['busy']:.2f} of {arguments.threads} (without the patch {results['plain']['busy']:.2f})")


def run_rule(arguments):
    """In turn, because the clock of a processor drifts."""
    binary, ours, theirs = ROOT / "target/release/bench-kernels", [], []
    command = [binary, "gdn", "--backward", "--tokens", 2048, "--threads", arguments.threads, "--repetitions", arguments.repetitions]
    for _ in range(1 if arguments.quick else 3):
        ours.append(child(arguments, "rule", 2048, arguments.repetitions)["seconds"])
        line = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout
        theirs.append(json.loads(line)["seconds"])
    row("gated delta rule, both, T 2048, 16 x 128, against Rust", statistics.median(theirs), statistics.median(ours), "0.95x")


def run_import():
    """`import ballast` beyond the start of Python."""
    def seconds(code):
        return median(lambda: subprocess.run([sys.executable, "-c", code], check=True), 9)

    took = seconds("import ballast") - seconds("pass")
    print(f"import ballast: {1e3 * took:.0f} ms (at most 100)")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--python", help="a python that has the requirements and ballast, built with --release")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--quick", action="store_true", help="f32 only, one round")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "BALLAST_PEERS" not in os.environ:
        python = arguments.python or own_environment()
        if not arguments.python:
            subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", ROOT], check=True)
        subprocess.run(["cargo", "build", "--release", "-p", "ballast-bench"], cwd=ROOT, check=True)
        os.execve(python, [str(python), *sys.argv], {**os.environ, "BALLAST_PEERS": "1"})
    import torch

    torch.set_num_threads(arguments.threads)
    if arguments.child:
        kind, *options = arguments.child
        if kind == "step":
            folder, tokens, dtype, *numbers = options
            result = step(folder, int(tokens), dtype, *map(int, numbers))
        else:
            result = rule(*map(int, options))
        print(json.dumps(result))
        return
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(1)
    print(f"{'case':58} {'peer':>12} {'ballast':>12} {'ratio':>7} {'target':>7}")
    run_import()
    run_rule(arguments)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**CONFIG)).save_pretrained(folder)
        run_model(arguments, folder)


if __name__ == "__main__":
    main()
