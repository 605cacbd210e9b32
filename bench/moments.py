"""Held-out loss and accuracy with moments in fewer bits, over several seeds: on the embedded task, or on text.

    python3 bench/moments.py target/release/ballast --seeds 3 --steps 600
    python3 bench/moments.py target/release/ballast --seeds 3 --steps 600 --data train.txt --validation held-out.txt \\
        --model config.json --tokenizer FOLDER
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path


def held_out(arguments, moments, seed):
    """Loss and accuracy of the last evaluation of a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        sets = [f"seed={seed}", f"steps={arguments.steps}", f"optimizer.moments={moments}"]
        command = [arguments.binary, "train", "--quiet", "--threads", str(arguments.threads), "--out", str(out)]
        if arguments.data:
            command += ["--data", arguments.data]
            sets += [f"model.config={arguments.model}", f"model.tokenizer={arguments.tokenizer}"]
            sets += [f"data.validation={arguments.validation}", "data.sequence_length=256", "batch.sequences=8"]
            sets += ["batch.accumulation=1", "optimizer.learning_rate=1.5e-3"]
            sets += ["samples.count=0", "evaluation.batches=16"]
        command += [part for text in sets for part in ("--set", text)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        last = [line for line in lines if line["kind"] == "evaluation"][-1]
        return last["loss"], last["accuracy"]


def spread(values):
    return f"{statistics.mean(values):.4f} +- {statistics.stdev(values) if len(values) > 1 else 0:.4f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", help="text to train on, instead of the embedded task")
    parser.add_argument("--validation", help="held-out text")
    parser.add_argument("--model", help="config.json of the model for the text")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json")
    arguments = parser.parse_args()
    found = {}
    for seed in range(1, arguments.seeds + 1):
        for moments in ("f32", "bf16", "8bit"):
            found[moments, seed] = held_out(arguments, moments, seed)
            print(f"seed {seed}, {moments}: loss {found[moments, seed][0]:.4f}, accuracy {found[moments, seed][1]:.4f}", flush=True)
    print(f"{'moments':8} {'held-out loss':>20} {'against f32':>20} {'accuracy':>20}")
    seeds = range(1, arguments.seeds + 1)
    for moments in ("f32", "bf16", "8bit"):
        losses, accuracies = zip(*(found[moments, seed] for seed in seeds))
        more = [found[moments, seed][0] - found["f32", seed][0] for seed in seeds]
        print(f"{moments:8} {spread(losses):>20} {spread(more):>20} {spread(accuracies):>20}")


if __name__ == "__main__":
    main()
