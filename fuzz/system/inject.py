#!/usr/bin/env python3
"""Fails the n-th system call of a kind, once, for every n, in the commands of scenarios.py.

    fuzz/system/inject.py [--seconds 60] [--seed N] [--only NAME] [--ballast PATH]

Needs strace. After each run: exit code 0 means the expected result; any other means an error message, and the old
result or the whole new one. A run that can go on must then reach the expected result. Nothing may die by a signal,
panic or hang. Without --seconds, every call of every kind fails once; that takes hours.
"""

import argparse
import collections
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scenarios import ROOT, Scenario, digest, execute, fresh, learn, scenarios

# Calls that are counted together, and the errors that they get.
KINDS = {
    "open": ("openat", ["EIO", "EMFILE"]),
    "stat": ("statx,newfstatat,fstat", ["EIO"]),
    "list": ("getdents64", ["EIO"]),
    "read": ("read,pread64", ["EIO"]),
    "write": ("write,pwrite64,copy_file_range", ["ENOSPC", "EIO"]),
    "truncate": ("ftruncate,fallocate", ["ENOSPC"]),
    "flush": ("fsync,fdatasync", ["EIO"]),
    "rename": ("rename,renameat,renameat2", ["EIO"]),
    "folder": ("mkdir,mkdirat", ["EACCES"]),
    "remove": ("unlink,unlinkat,rmdir", ["EIO"]),
    "lock": ("flock", ["ENOLCK"]),
    "thread": ("clone,clone3", ["EAGAIN"]),
    "memory": ("mmap", ["ENOMEM"]),
    "network": ("socket,connect,sendto,recvfrom", ["ECONNRESET"]),
}


def strace(calls: str, log: Path, inject: str = "") -> list[str]:
    return ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={calls}", *(["-e", inject] if inject else [])]


def calls_by_thread(log: Path) -> list[int]:
    """Counts calls of each thread; strace counts so too when it injects."""
    lines = log.read_text(errors="replace").splitlines()
    started = [line.split()[0] for line in lines if re.match(r"\d+ +\w+\(", line)]
    return sorted(collections.Counter(started).values())


def judge(scenario: Scenario, folder: Path, run: subprocess.CompletedProcess) -> str:
    """Returns "done" or "refused" for an outcome that is right, else what is wrong."""
    if run.returncode < 0 or run.returncode > 128:
        return f"died by a signal ({run.returncode})"
    if run.returncode == 101 or "panicked at" in run.stderr:
        return "panicked"
    for name in ["src", "rounded", "lora"]:
        if digest(folder / name) != digest(scenario.base / name):
            return f"changed {name}"
    found = scenario.digest(folder, run.stdout)
    if run.returncode == 0:
        return "done" if found == scenario.expected else "exit code 0 with another result"
    if not run.stderr.strip():
        return f"exit code {run.returncode} without a message"
    if scenario.result and found not in (scenario.before, scenario.expected):
        return f"exit code {run.returncode} with a damaged result"
    return "refused"


def recovers(scenario: Scenario, ballast: Path, folder: Path) -> str:
    """Runs what a user would run next, without failures; returns what is wrong. A whole result needs nothing."""
    if scenario.result is None or scenario.digest(folder, "") == scenario.expected:
        return ""
    command = scenario.again or scenario.command
    if command[1] == "--resume" and not (folder / command[2] / "config.toml").is_file():
        command = scenario.command
    run = execute(scenario, ballast, folder, command)
    if "no checkpoint to resume from" in run.stderr:
        # Nothing was saved before the failure. A checkpoint that is there and cannot be read is wrong.
        shutil.rmtree(folder / command[2], ignore_errors=True)
        run = execute(scenario, ballast, folder, scenario.command)
    if run.returncode != 0:
        return f"then exit code {run.returncode}: {run.stderr.strip()}"
    return "" if scenario.digest(folder, run.stdout) == scenario.expected else "then another result"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="stop after this time [default: when every call has failed once]")
    parser.add_argument("--seed", type=int, default=0, help="order of the failures [default: 0]")
    parser.add_argument("--only", help="one scenario")
    parser.add_argument("--kind", choices=KINDS, help="one kind of call")
    parser.add_argument("--ballast", type=Path, default=ROOT / "target/debug/ballast")
    options = parser.parse_args()
    ballast = options.ballast.resolve()
    if shutil.which("strace") is None:
        raise SystemExit("strace is missing; install the package strace")

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folder, log = work / "try", work / "log"
        chosen = [s for s in scenarios(ballast, work) if options.only in (None, s.name)]
        if not chosen:
            raise SystemExit(f"no scenario is called {options.only!r}")
        cases = []
        for scenario in chosen:
            learn(scenario, ballast, folder)
            for kind, (calls, errors) in KINDS.items():
                if options.kind not in (None, kind):
                    continue
                # What the loader needs before the program starts is not ours to answer for.
                subprocess.run([*strace(calls, log), ballast, "--version"], stdout=subprocess.DEVNULL, check=True)
                loader = max(calls_by_thread(log), default=0)
                fresh(scenario, folder)
                execute(scenario, ballast, folder, scenario.command, strace(calls, log))
                most = max(calls_by_thread(log), default=0)
                first = 1 if kind in ("thread", "network") else loader + 1
                cases += [(scenario, kind, error, n) for n in range(first, most + 1) for error in errors]
        random.Random(options.seed).shuffle(cases)

        counts, start = collections.Counter(), time.monotonic()
        for scenario, kind, error, n in cases:
            if options.seconds and time.monotonic() - start > options.seconds:
                break
            fresh(scenario, folder)
            prefix = strace(KINDS[kind][0], log, f"inject={KINDS[kind][0]}:error={error}:when={n}")
            try:
                run = execute(scenario, ballast, folder, scenario.command, prefix)
                outcome = judge(scenario, folder, run)
                if outcome == "refused":
                    outcome = recovers(scenario, ballast, folder) or outcome
            except subprocess.TimeoutExpired:
                run, outcome = None, "hung"
            counts[scenario.name, outcome if outcome in ("done", "refused") else "wrong"] += 1
            if outcome not in ("done", "refused"):
                print(f"WRONG {scenario.name}: {kind} {n} with {error}: {outcome}", file=sys.stderr)
                print("    " + (run.stderr.strip()[-600:] if run else ""), file=sys.stderr, flush=True)
        print(f"{'scenario':<18}{'done':>7}{'refused':>9}{'wrong':>7}")
        for scenario in chosen:
            row = [counts[scenario.name, outcome] for outcome in ("done", "refused", "wrong")]
            print(f"{scenario.name:<18}{row[0]:>7}{row[1]:>9}{row[2]:>7}")
        tried = sum(counts.values())
        wrong = sum(count for (_, outcome), count in counts.items() if outcome == "wrong")
        print(f"{tried} of {len(cases)} failures injected, seed {options.seed}, {wrong} wrong")
    if tried == 0:
        raise SystemExit("no failure was injected; can strace trace a process here?")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
