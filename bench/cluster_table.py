#!/usr/bin/env python3
"""Makes the table of docs/cluster.md: the fewest machines of each size on which a run fits.

    cargo build --release && python3 bench/cluster_table.py

The planner starts with one rank and prints the first settings that fit; a rank is a machine."""

import json
import subprocess
import sys

BALLAST = sys.argv[1] if len(sys.argv) > 1 else "target/release/ballast"
MODELS = ["qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.5-397b-a17b"]
SIZES = [64, 256, 1024]
FLOPS = 5000


def command(model, lora, tokens, memory):
    settings = [f"data.sequence_length={tokens}", "batch.accumulation=1"] + (["lora.rank=16"] if lora else [])
    args = ["train", "--dry-run", "--ranks", "1", "--memory", str(memory), "--flops", str(FLOPS), "--threads", "32"]
    return args + ["--model", f"examples/models/{model}"] + [a for s in settings for a in ("--set", s)]


def seconds(value):
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min" if value < 36000 else f"{value / 3600:.0f} h"


def cell(plan):
    if plan["fits"]:
        return f"1 ({seconds(plan['time']['total'])})", "none"
    if not plan["alternatives"]:
        return "more than 256", "nothing fits"
    best = plan["alternatives"][0]
    return f"{best['ranks']} ({seconds(best['seconds'])})", " ".join(best["settings"])


for model in MODELS:
    for lora in (False, True):
        for tokens in (8192, 131072):
            cells, settings = [], ""
            for memory in SIZES:
                done = subprocess.run([BALLAST, "--json", *command(model, lora, tokens, memory)],
                                      capture_output=True, text=True, check=True)
                text, chosen = cell(json.loads(done.stdout))
                cells.append(text)
                settings += f"{memory}: {chosen}; "
            kind = "LoRA" if lora else "full"
            print(f"| {model} | {kind} | {tokens // 1024}K | {' | '.join(cells)} |", flush=True)
            print(f"    {settings}", file=sys.stderr, flush=True)
