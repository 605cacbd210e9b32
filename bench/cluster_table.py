#!/usr/bin/env python3
"""Makes the figures of docs/cluster.md that come from the planner: the fewest machines on which a run fits, and
what experts need.

    cargo build --release && python3 bench/cluster_table.py            # compare the page with the program
    cargo build --release && python3 bench/cluster_table.py --write    # replace the figures of the page

They stand between `<!-- NAME: cluster_table.py -->` and `<!-- end -->`. The planner starts with one rank and prints
the settings that fit; a rank is a machine. Exits with 1 if page and program differ."""

import argparse
import concurrent.futures
import difflib
import json
import os
import re
import subprocess
import sys

PAGE = "docs/cluster.md"
MODELS = {"qwen3.5-0.8b": "Qwen3.5-0.8B", "qwen3.5-4b": "Qwen3.5-4B", "qwen3.5-27b": "Qwen3.5-27B",
          "qwen3.5-35b-a3b": "Qwen3.5-35B-A3B", "qwen3.5-397b-a17b": "Qwen3.5-397B-A17B"}
SIZES = [64, 256, 1024]
EXAMPLE = ("qwen3.5-35b-a3b", False, 8192, 64)
GIB = 1 << 30


def plan(model, ranks, memory, settings):
    """The plan of a run as JSON."""
    command = [ARGS.ballast, "--json", "train", "--dry-run", "--ranks", ranks, "--memory", memory, "--flops", 5000,
               "--threads", 32, "--model", f"examples/models/{model}"]
    command += [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


def seconds(value):
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min" if value < 36000 else f"{value / 3600:.0f} h"


def cell(model, lora, tokens, memory):
    """Text of a cell of the table of machines, and the settings."""
    settings = [f"data.sequence_length={tokens}", "batch.accumulation=1"] + (["lora.rank=16"] if lora else [])
    found = plan(model, 1, memory, settings)
    if found["fits"]:
        return f"1 ({seconds(found['time']['total'])})", []
    if not found["alternatives"]:
        return "more than 256", []
    best = found["alternatives"][0]
    moments = [setting.split("=")[1] for setting in best["settings"] if setting.startswith("optimizer.moments=")]
    note = f", {moments[0]}" if moments else ""
    return f"{best['ranks']} ({seconds(best['seconds'])}{note})", best["settings"]


def machines():
    """The table of machines, and the settings of one cell."""
    rows = [(model, lora, tokens) for model in MODELS for lora in (False, True) for tokens in (8192, 131072)]
    keys = [(*row, memory) for row in rows for memory in SIZES]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        cells = dict(zip(keys, pool.map(lambda key: cell(*key), keys)))
    text = "| model | training | tokens | " + " | ".join(f"{size} GiB" for size in SIZES) + " |\n"
    text += "|---|---|---|" + "---|" * len(SIZES) + "\n"
    for model, lora, tokens in rows:
        kind = "LoRA" if lora else "full"
        shown = [cells[model, lora, tokens, memory] for memory in SIZES]
        text += f"| {MODELS[model]} | {kind} | {tokens // 1024}K | {' | '.join(text for text, _ in shown)} |\n"
        settings = [f"{memory}: {' '.join(settings) or '-'}" for memory, (_, settings) in zip(SIZES, shown)]
        print(f"{model} {kind} {tokens}: {'; '.join(settings)}", file=sys.stderr)
    machines_of, settings = cells[EXAMPLE]
    text += (f"\nA cell comes from one command, which also prints its settings: here {machines_of.split(' ')[0]} machines "
             f"of {EXAMPLE[3]} GiB with `{' '.join(settings)}`.\n")
    return text


def experts():
    """What a model with experts needs on a few machines."""
    def of(ranks, lora):
        given = ["data.sequence_length=8192", f"batch.groups={ranks}", f"batch.accumulation={ranks}",
                 "cluster.shard=weights", "precision.recompute=full"] + (["lora.rank=16"] if lora else [])
        return plan("qwen3.5-35b-a3b", ranks, 64, given)

    def total(found, *names):
        rows = found["memory"]
        return sum(row["bytes"] for row in rows if not names or row["what"].startswith(names)) / GIB

    def line(kind, cells):
        told = [f"{total(found):.0f} GiB{'' if found['fits'] else ': does not fit'}" for found in cells]
        return f"| {kind} | {' | '.join(told)} |\n"

    ranks = [4, 8, 16]
    lora, full = [[of(count, lora) for count in ranks] for lora in (True, False)]
    text = ("| Qwen3.5-35B-A3B, 8K tokens, `cluster.shard=weights`, `precision.recompute=full` | "
            + " | ".join(f"{count} machines" for count in ranks) + " |\n|---|" + "---|" * len(ranks) + "\n")
    text += line("LoRA", lora) + line("all parameters", full)
    eight = full[1]
    own = total(eight, "weights, own", "masters", "moments", "gradient sums")
    passing, time = total(eight, "weights gathered", "messages"), eight["time"]
    hidden = 100 * (1 - time["waiting"] / time["messages"])
    text += (f"\nFor all parameters on 8 machines, a rank owns {own:.0f} GiB (weights, masters, moments, gradient sums); "
             f"gathered layers and messages in flight take {passing:.0f} GiB. Computation hides {hidden:.0f} % of the "
             "communication.\n")
    return text


def replaced(page, name, text):
    """The page with another text between the marks of a name."""
    pattern = re.compile(rf"(<!-- {name}: cluster_table\.py -->\n).*?(<!-- end -->)", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        sys.exit(f"{PAGE} needs one `<!-- {name}: cluster_table.py -->` with an end")
    return pattern.sub(lambda found: found[1] + text + found[2], page)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("ballast", nargs="?", default="target/release/ballast", help="the program")
parser.add_argument("--write", action="store_true", help="replace the figures of the page")
ARGS = parser.parse_args()

with open(PAGE, encoding="utf-8") as file:
    before = file.read()
after = replaced(replaced(before, "machines", machines()), "experts", experts())
if ARGS.write:
    with open(PAGE, "w", encoding="utf-8") as file:
        file.write(after)
elif before != after:
    sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), after.splitlines(True), PAGE, "the program"))
    sys.exit(1)
