"""Compares logits and greedy tokens of llama.cpp with those of `ballast trace`; see docs/gguf.md."""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import tempfile
from pathlib import Path

import numpy as np

PROMPT = "97,81,107,84,99,88,63,107,84,97,81,107,84,99,88"
"""aQkTcX?kTaQkTcX in bytes, a document of the embedded task."""


def write_ids(path: Path, ids: list[int]) -> None:
    """Writes token ids as `ballast trace` reads them."""
    data = np.array([ids], dtype=np.int64).tobytes()
    entry = {"dtype": "I64", "shape": [1, len(ids)], "data_offsets": [0, len(data)]}
    header = json.dumps({"input_ids": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def read_logits(path: Path) -> np.ndarray:
    """Reads the logits that `ballast trace` wrote."""
    file = path.read_bytes()
    start = 8 + struct.unpack("<Q", file[:8])[0]
    entry = json.loads(file[8:start])["logits"]
    begin, end = entry["data_offsets"]
    return np.frombuffer(file[start + begin : start + end], dtype=np.float32).reshape(entry["shape"])[0]


def main() -> None:
    """Prints the difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="checkpoint for ballast")
    parser.add_argument("gguf", help="the same for llama.cpp")
    parser.add_argument("--program", default="./llama_logits")
    parser.add_argument("--ballast", default="ballast")
    parser.add_argument("--prompt", default=PROMPT, help="token ids, separated by commas")
    parser.add_argument("--new", type=int, default=300, help="number of greedy tokens, at least 1")
    parser.add_argument("--adapter", help="LoRA adapter for llama.cpp; the model is then the merged one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        theirs_file, ids_file, ours_file = (Path(folder) / n for n in ["theirs", "ids", "ours.safetensors"])
        command = [args.program, args.gguf, args.prompt, str(args.new), str(theirs_file)]
        command += [args.adapter] if args.adapter else []
        new = [int(x) for x in subprocess.run(command, capture_output=True, check=True).stdout.split(b",")]
        prompt = [int(x) for x in args.prompt.split(",")]
        write_ids(ids_file, prompt + new)
        trace = [args.ballast, "trace", args.model, "--ids", str(ids_file), "--out", str(ours_file), "-q"]
        subprocess.run([*trace, "--topk-ties", "earliest"], check=True, stdout=subprocess.DEVNULL)
        ours = read_logits(ours_file)
        theirs = np.fromfile(theirs_file, dtype=np.float32).reshape(ours.shape)
    rms = np.sqrt(np.mean((ours - theirs) ** 2)) / np.sqrt(np.mean(ours**2))
    same = int(np.sum(ours[len(prompt) - 1 : -1].argmax(1) == np.array(new)))
    print(f"relative RMS difference {rms:.2e}; the same greedy token {same} of {len(new)} times")


if __name__ == "__main__":
    main()
