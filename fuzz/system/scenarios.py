"""What the system may fail under: a folder, a command that changes it, and the states it may leave.

A scenario is prepared once by running `ballast` itself; `inject.py` runs its command on copies.
"""

import hashlib
import http.server
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "fixtures/release/qwen3_5"
RUN = [
    f"--set={key}" for key in ("checkpoints.every=1", "batch.sequences=2", "evaluation.batches=0", "samples.count=0")
]


@dataclass
class Scenario:
    """A command, run in a copy of `base`."""

    name: str
    base: Path
    command: list[str]
    # The folder that the command replaces; None if its answer on stdout is the result.
    result: str | None
    # A command that must lead to the expected result, also after the first one has failed.
    again: list[str] | None = None
    env: dict[str, str] = field(default_factory=dict)
    # Digest of the result of a good run, and of the folder before.
    expected: str = ""
    before: str = ""

    def digest(self, folder: Path, stdout: str) -> str:
        """Identifies the result. A run's report and metrics have times in them, so its model stands for it."""
        if self.result is None:
            return hashlib.sha256(stdout.encode()).hexdigest()
        return digest(folder / self.result)


def digest(path: Path) -> str:
    """Hashes names and contents below a folder; "absent" if there is none. Ranks' folders and links included."""
    if not os.path.lexists(path):
        return "absent"
    hashed = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        hashed.update(str(file.relative_to(path)).encode() + b"\0")
        if file.is_file():
            hashed.update(file.read_bytes())
    return hashed.hexdigest()


def scenarios(ballast: Path, work: Path) -> list[Scenario]:
    """Prepares all scenarios below `work`."""
    base = work / "base"
    base.mkdir(parents=True)

    def run(*args: str) -> None:
        subprocess.run([ballast, *args, "-q", "--threads", "2"], cwd=base, check=True, stdout=subprocess.DEVNULL)

    run("convert", str(MODEL), "src")
    (base / "src/tokenizer.json").write_bytes((ROOT / "fixtures/text/qwen3_5/tokenizer.json").read_bytes())
    run("convert", "src", "old", "--dtype", "f32")
    run("convert", "src", "rounded", "--dtype", "bf16", "--policy", "none")
    run("train", "--steps", "2", "--out", "run", *RUN)
    run("train", "--steps", "1", "--out", "lora", "--model", "run/model", "--set", "lora.rank=2", *RUN)
    hub = serve(base / "src")
    return [
        Scenario("convert", base, ["convert", "src", "old", "--layout", "megatron", "--tp", "2", "--force"], "old"),
        Scenario("convert to torch", base, ["convert", "src", "new", "--format", "dcp"], "new"),
        Scenario("convert to gguf", base, ["convert", "run/model", "new.gguf"], "new.gguf"),
        Scenario("audit", base, ["audit", "src", "--json"], None),
        Scenario("repair", base, ["repair", "rounded", "new", "--original", "src"], "new"),
        Scenario("merge", base, ["merge", "run/model", "lora/adapter", "--out", "new"], "new"),
        Scenario("train", base, ["train", "--steps", "2", "--out", "new", *RUN], "new/model",
                 ["train", "--resume", "new", "--steps", "2"]),
        Scenario("resume", base, ["train", "--resume", "run", "--steps", "4"], "run/model",
                 ["train", "--resume", "run", "--steps", "4"]),
        Scenario("download", base, ["convert", "hf://org/model", "new"], "new", None,
                 {"HF_ENDPOINT": hub, "HF_HUB_CACHE": "cache"}),
    ]  # fmt: skip


def execute(
    scenario: Scenario, ballast: Path, folder: Path, command: list[str], prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    """Runs a command of a scenario in `folder`. A signal is a negative exit code, a hang is `TimeoutExpired`."""
    env = {**os.environ, "NO_PROXY": "127.0.0.1", "RUST_BACKTRACE": "0", **scenario.env}
    line = [*prefix, ballast, *command, "-q", "--threads", "2"]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, errors="replace", timeout=120)


def fresh(scenario: Scenario, folder: Path) -> None:
    """Makes `folder` a copy of what the scenario starts from."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(scenario.base, folder, symlinks=True)


def learn(scenario: Scenario, ballast: Path, folder: Path) -> None:
    """Fills in the digests before and after a run without failures."""
    fresh(scenario, folder)
    scenario.before = scenario.digest(folder, "")
    done = execute(scenario, ballast, folder, scenario.command)
    if done.returncode != 0:
        raise SystemExit(f"{scenario.name}: exit code {done.returncode} without a failure: {done.stderr}")
    scenario.expected = scenario.digest(folder, done.stdout)


def serve(folder: Path) -> str:
    """Serves a folder as the model org/model of a hub on the loopback, until this process ends."""
    commit = "0123456789abcdef0123456789abcdef01234567"

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.split("?")[0]
            headers = {"x-repo-commit": commit}
            status, body = 404, b""
            if path.startswith("/api/models/org/model/revision/"):
                names = ", ".join(f'{{"rfilename": "{file.name}"}}' for file in sorted(folder.iterdir()))
                status, body = 200, f'{{"sha": "{commit}", "siblings": [{names}]}}'.encode()
            elif (file := folder / path.removeprefix(f"/org/model/resolve/{commit}/")).is_file():
                status, body = 200, file.read_bytes()
                headers |= {"etag": f'"{file.name}"', "accept-ranges": "bytes"}
                if span := self.headers.get("Range"):
                    first, last = span.removeprefix("bytes=").split("-")
                    last = min(int(last or len(body)), len(body) - 1)
                    headers["content-range"] = f"bytes {first}-{last}/{len(body)}"
                    status, body = 206, body[int(first) : last + 1]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"
