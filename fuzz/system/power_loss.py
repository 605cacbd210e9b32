#!/usr/bin/env python3
"""Cuts the power in the middle of the commands of scenarios.py, and looks at what a disk may then hold.

    fuzz/system/power_loss.py [--seconds 60] [--seed N] [--only NAME] [--ballast PATH]

Needs strace. The calls of a run that change files are recorded with their data, then replayed up to a point. What
fsync has not reached may be lost: of a file's later writes any subset is kept, of a folder's later changes any number
of the first ones, each folder on its own. From this state the result must be the old or the new one, its sources
unchanged, and the command that a user would run next must reach the expected result. After the last call of a
successful run nothing that fsync has not reached is kept, and the result must be the new one.
"""

import argparse
import collections
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from inject import recovers
from scenarios import ROOT, Scenario, digest, execute, fresh, learn, scenarios

CALLS = (
    "openat,write,pwrite64,lseek,ftruncate,fallocate,copy_file_range,fsync,fdatasync,fcntl,close,"
    "rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,link,linkat,symlink,symlinkat"
)
CALL = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+)")
UNFINISHED = re.compile(r"^(\d+) +(\w+)\((.*) <unfinished \.\.\.>$")
RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)$")


@dataclass
class File:
    """Content now, what fsync has reached, and the writes since then: (offset, bytes) or (length, None)."""

    data: bytearray
    durable: bytes = b""
    pending: list = field(default_factory=list)

    def write(self, at: int, data: bytes) -> None:
        apply(self.data, at, data)
        self.pending.append((at, data))

    def resize(self, length: int) -> None:
        apply(self.data, length, None)
        self.pending.append((length, None))

    def sync(self, writes: int) -> None:
        """Makes the first of the pending writes durable."""
        kept = bytearray(self.durable)
        for at, data in self.pending[:writes]:
            apply(kept, at, data)
        self.durable, self.pending = bytes(kept), self.pending[writes:]


@dataclass
class Link:
    """A symbolic link."""

    target: str


@dataclass
class Folder:
    """Entries now, those that fsync has reached, and the changes since then: {name: node or None}, by number."""

    entries: dict = field(default_factory=dict)
    durable: dict = field(default_factory=dict)
    pending: list = field(default_factory=list)

    def change(self, number: int, changes: dict) -> None:
        update(self.entries, changes)
        self.pending.append((number, changes))

    def sync(self, changes: int) -> None:
        """Makes the first of the pending changes durable."""
        for _, change in self.pending[:changes]:
            update(self.durable, change)
        self.pending = self.pending[changes:]


def apply(content: bytearray, at: int, data: bytes | None) -> None:
    if data is None:
        del content[at:]
        data = b""
    content.extend(bytes(max(0, at - len(content))))
    content[at : at + len(data)] = data


def update(entries: dict, changes: dict) -> None:
    for name, node in changes.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def loaded(path: Path) -> File | Link | Folder:
    """Reads what is on disk, all of it durable."""
    if path.is_symlink():
        return Link(os.readlink(path))
    if path.is_dir():
        entries = {entry.name: loaded(entry) for entry in path.iterdir()}
        return Folder(entries, dict(entries))
    content = path.read_bytes()
    return File(bytearray(content), content)


@dataclass
class Opened:
    """An open file or folder, with the position of its next write."""

    node: File | Folder
    position: int = 0


class Disk:
    """The files below `root`, changed by one recorded call after the other."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, loaded(root)
        self.opened: dict[int, Opened] = {}
        self.calls = 0

    def parent(self, folder: str, path: str) -> tuple[Folder, str] | None:
        """Folder and name of a path; None outside of the root."""
        at = self.top
        if os.path.isabs(path):
            if not Path(path).is_relative_to(self.root):
                return None
            path = str(Path(path).relative_to(self.root))
        elif folder != "AT_FDCWD":
            opened = self.opened.get(int(folder))
            if opened is None or not isinstance(opened.node, Folder):
                return None
            at = opened.node
        parts = [part for part in path.split("/") if part not in ("", ".")]
        trail = []
        for part in parts[:-1]:
            trail.append(at)
            at = trail[-2] if part == ".." and len(trail) > 1 else at.entries.get(part)
            if not isinstance(at, Folder):
                return None
        return at, parts[-1] if parts else "."

    def find(self, folder: str, path: str) -> File | Folder | Link | None:
        place = self.parent(folder, path)
        if place is None:
            return None
        found = place[0] if place[1] == "." else place[0].entries.get(place[1])
        if isinstance(found, Link):
            inside = os.path.normpath(os.path.join(os.path.dirname(path), found.target))
            return self.find(folder, found.target if os.path.isabs(found.target) else inside)
        return found

    def put(self, place: tuple[Folder, str] | None, node: File | Folder | Link | None) -> None:
        if place is not None:
            place[0].change(self.calls, {place[1]: node})

    def extent(self, call: str, arguments: list[str]) -> int:
        """Number of changes that an fsync finds when it begins."""
        if call not in ("fsync", "fdatasync") or int(arguments[0]) not in self.opened:
            return 0
        return len(self.opened[int(arguments[0])].node.pending)

    def run(self, call: str, a: list[str], result: int, extent: int) -> None:
        """Carries out a call that succeeded."""
        self.calls += 1
        match call:
            case "openat":
                self.open(a[0], text(a[1]), a[2], result)
            case "close":
                self.opened.pop(int(a[0]), None)
            case "fcntl":
                if "F_DUPFD" in a[1] and int(a[0]) in self.opened:
                    self.opened[result] = self.opened[int(a[0])]
            case "mkdir" | "mkdirat":
                folder, path = at_path(call, a)
                self.put(self.parent(folder, path), Folder())
            case "rename" | "renameat" | "renameat2":
                self.rename(a if call != "rename" else ["AT_FDCWD", a[0], "AT_FDCWD", a[1], ""])
            case "unlink" | "unlinkat" | "rmdir":
                folder, path = at_path(call, a)
                self.put(self.parent(folder, path), None)
            case "link" | "linkat":
                a = a if call == "linkat" else ["AT_FDCWD", a[0], "AT_FDCWD", a[1]]
                self.put(self.parent(a[2], text(a[3])), self.find(a[0], text(a[1])))
            case "symlink" | "symlinkat":
                folder, path = ("AT_FDCWD", a[1]) if call == "symlink" else (a[1], a[2])
                self.put(self.parent(folder, text(path)), Link(text(a[0])))
            case _ if int(a[2 if call == "copy_file_range" else 0]) in self.opened:
                self.change(call, a, result, extent)

    def open(self, folder: str, path: str, flags: str, number: int) -> None:
        found = self.find(folder, path)
        if found is None and "O_CREAT" in flags and (place := self.parent(folder, path)):
            found = File(bytearray())
            self.put(place, found)
        self.opened.pop(number, None)
        if found is None:
            return
        if "O_TRUNC" in flags:
            found.resize(0)
        self.opened[number] = Opened(found, len(found.data) if "O_APPEND" in flags else 0)

    def rename(self, a: list[str]) -> None:
        source, target = self.parent(a[0], text(a[1])), self.parent(a[2], text(a[3]))
        if source is None or target is None:
            return
        node = source[0].entries.get(source[1])
        back = target[0].entries.get(target[1]) if "RENAME_EXCHANGE" in (a[4] if len(a) > 4 else "") else None
        if source[0] is target[0]:
            source[0].change(self.calls, {source[1]: back, target[1]: node})
        else:
            target[0].change(self.calls, {target[1]: node})
            source[0].change(self.calls, {source[1]: back})

    def change(self, call: str, a: list[str], result: int, extent: int) -> None:
        opened = self.opened[int(a[2 if call == "copy_file_range" else 0])]
        node = opened.node
        if call in ("fsync", "fdatasync"):
            node.sync(extent)
        elif call == "lseek":
            opened.position = result
        elif call == "write":
            node.write(opened.position, string(a[1])[:result])
            opened.position += result
        elif call == "pwrite64":
            node.write(int(a[3]), string(a[1])[:result])
        elif call == "ftruncate":
            self.truncate(node, int(a[1]))
        elif call == "fallocate":
            self.truncate(node, max(len(node.data), int(a[2]) + int(a[3])))
        elif call == "copy_file_range" and result > 0:
            source = self.opened[int(a[0])]
            begin, place = offset(a[1], source), offset(a[3], opened)
            node.write(place, bytes(source.node.data[begin : begin + result]))

    def truncate(self, node: File, length: int) -> None:
        if length <= len(node.data):
            node.resize(length)
        else:
            node.write(len(node.data), bytes(length - len(node.data)))

    def left(self, folder: Path, random: random.Random | None) -> None:
        """Writes what the disk may hold; without `random`, what it holds at least."""
        kept: dict[int, set[int]] = collections.defaultdict(set)
        folders: list[tuple[Folder, dict]] = []
        seen: dict[int, dict] = {}

        def settle(node: Folder) -> dict:
            """The entries of a folder, and in `kept` the changes that it keeps."""
            if id(node) not in seen:
                count = 0 if random is None else random.randint(0, len(node.pending))
                seen[id(node)] = {"node": node, "count": count}
                for number, _ in node.pending[:count]:
                    kept[number].add(id(node))
            return seen[id(node)]

        def visit(node: Folder) -> None:
            settle(node)
            folders.append((node, {}))
            for entries in [node.durable, *[change for _, change in node.pending]]:
                for child in entries.values():
                    if isinstance(child, Folder) and id(child) not in seen:
                        visit(child)

        visit(self.top)
        # A file that was moved is in one of the two folders: it leaves the first when it is in the second.
        moved = collections.defaultdict(set)
        for node, _ in folders:
            for number, change in node.pending:
                for child in change.values():
                    if child is not None:
                        moved[number].add(id(node))

        def entries_of(node: Folder) -> dict:
            entries = dict(node.durable)
            for number, change in node.pending[: seen[id(node)]["count"]]:
                arrives = moved[number] - {id(node)}
                leaves = all(child is None for child in change.values())
                if leaves and arrives and not arrives <= kept[number]:
                    continue
                update(entries, change)
            return entries

        def write(node: File | Folder | Link, path: Path) -> None:
            if isinstance(node, Folder):
                path.mkdir()
                for name, child in entries_of(node).items():
                    write(child, path / name)
            elif isinstance(node, Link):
                path.symlink_to(node.target)
            else:
                content = bytearray(node.durable)
                for at, data in node.pending:
                    if random is not None and random.random() < 0.6:
                        apply(content, at, data)
                path.write_bytes(content)

        shutil.rmtree(folder, ignore_errors=True)
        write(self.top, folder)


def string(argument: str) -> bytes:
    """The bytes of an argument in quotes, as strace -xx writes them."""
    if argument.endswith("..."):
        raise SystemExit("a write was too long for the record")
    return bytes.fromhex(argument.strip('"').replace("\\x", ""))


def text(argument: str) -> str:
    return os.fsdecode(string(argument))


def at_path(call: str, a: list[str]) -> tuple[str, str]:
    return (a[0], text(a[1])) if call.endswith("at") else ("AT_FDCWD", text(a[0]))


def offset(argument: str, opened: Opened) -> int:
    return opened.position if argument == "NULL" else int(argument.strip("[]").split(" ")[0])


def arguments(joined: str) -> list[str]:
    """Arguments of a call; in -xx, no string has a comma in it."""
    return [part.strip() for part in joined.split(", ")]


def steps(log: Path) -> list[tuple[str, list[str], int | None, int]]:
    """The recorded calls in order: name, arguments, result, and a key. A result of None is the begin of an fsync."""
    found, waiting = [], {}
    for key, line in enumerate(log.read_text(errors="replace").splitlines()):
        if begun := UNFINISHED.match(line):
            waiting[begun[1]] = (begun[3], key)
            if begun[2] in ("fsync", "fdatasync"):
                found.append((begun[2], arguments(begun[3]), None, key))
            continue
        if resumed := RESUMED.match(line):
            before, key = waiting.pop(resumed[1])
            line = f"{resumed[1]} {resumed[2]}({before}{resumed[3]}"
        if (whole := CALL.match(line)) and int(whole[4]) >= 0:
            found.append((whole[2], arguments(whole[3]), int(whole[4]), key))
    return found


def replay(base: Path, root: Path, calls: list, count: int) -> Disk:
    """The disk after the first `count` calls of a run in `root`, which began as `base`."""
    disk = Disk(base)
    disk.root, extents = root, {}
    for call, a, result, key in calls[:count]:
        if result is None:
            extents[key] = disk.extent(call, a)
        else:
            extent = extents.pop(key) if key in extents else disk.extent(call, a)
            disk.run(call, a, result, extent)
    return disk


def wrong(scenario: Scenario, ballast: Path, folder: Path, finished: bool) -> str:
    """Says what is wrong with what the disk holds; empty if nothing is."""
    for name in ["src", "rounded", "lora"]:
        if digest(folder / name) != digest(scenario.base / name):
            return f"changed {name}"
    found = scenario.digest(folder, "")
    if finished and found != scenario.expected:
        return "the result of a successful run is not durable"
    if found not in (scenario.before, scenario.expected):
        return "a damaged result"
    return recovers(scenario, ballast, folder)


def record(scenario: Scenario, ballast: Path, folder: Path, log: Path) -> list:
    fresh(scenario, folder)
    prefix = ["strace", "-f", "-qq", "-xx", "-s", str(1 << 26), "-o", str(log), "-e", f"trace={CALLS}"]
    run = execute(scenario, ballast, folder, scenario.command, tuple(prefix))
    if run.returncode != 0 or scenario.digest(folder, run.stdout) != scenario.expected:
        raise SystemExit(f"{scenario.name}: exit code {run.returncode} under strace: {run.stderr}")
    calls = steps(log)
    # The replay must end where the run has ended; else it would prove nothing.
    disk = replay(scenario.base, folder, calls, len(calls))
    for node in walk(disk.top):
        node.sync(len(node.pending))
    disk.left(folder.with_name("replayed"), None)
    if scenario.digest(folder.with_name("replayed"), run.stdout) != scenario.expected:
        raise SystemExit(f"{scenario.name}: the replay of the recorded calls has another result")
    return calls


def walk(top: Folder) -> list:
    found, waiting = {}, [top]
    while waiting:
        node = waiting.pop()
        if id(node) in found or isinstance(node, Link):
            continue
        found[id(node)] = node
        if isinstance(node, Folder):
            waiting += node.entries.values()
    return list(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="stop after this time [default: 60]")
    parser.add_argument("--seed", type=int, default=0, help="choice of the states [default: 0]")
    parser.add_argument("--only", help="one scenario")
    parser.add_argument("--ballast", type=Path, default=ROOT / "target/debug/ballast")
    options = parser.parse_args()
    ballast = options.ballast.resolve()
    if shutil.which("strace") is None:
        raise SystemExit("strace is missing; install the package strace")
    rng = random.Random(options.seed)

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folder, recorded = work / "try", {}
        chosen = [s for s in scenarios(ballast, work) if options.only in (None, s.name) and s.result]
        if not chosen:
            raise SystemExit(f"no scenario that writes is called {options.only!r}")
        for scenario in chosen:
            learn(scenario, ballast, folder)
            recorded[scenario.name] = record(scenario, ballast, folder, work / "log")

        counts, problems, start = collections.Counter(), 0, time.monotonic()
        # The end of each run first, then points of all runs by turns.
        while time.monotonic() - start < options.seconds:
            for scenario in chosen:
                calls = recorded[scenario.name]
                finished = counts[scenario.name] == 0
                count = len(calls) if finished else rng.randint(0, len(calls))
                disk = replay(scenario.base, folder, calls, count)
                disk.left(folder, None if finished or rng.random() < 0.2 else rng)
                counts[scenario.name] += 1
                try:
                    problem = wrong(scenario, ballast, folder, finished)
                except subprocess.TimeoutExpired:
                    problem = "hung"
                if problem:
                    problems += 1
                    at = f"after call {count} ({calls[count - 1][0]})" if count else "at the begin"
                    print(f"WRONG {scenario.name} {at}: {problem}", file=sys.stderr, flush=True)
        print(f"{'scenario':<18}{'calls':>8}{'states':>8}")
        for scenario in chosen:
            print(f"{scenario.name:<18}{len(recorded[scenario.name]):>8}{counts[scenario.name]:>8}")
        print(f"{sum(counts.values())} states after a loss of power, seed {options.seed}, {problems} wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
