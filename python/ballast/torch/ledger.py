"""Protected-tensor checks and detection of non-finite values for training loops in PyTorch.

The ledger holds the dtype and a checksum of every protected tensor. A hook updates them after each optimizer
step, for the tensors of that optimizer, and after `load_state_dict`. Any other change is a fault. Before an
update the ledger looks for non-finite values (`sites.py`), and drops the gradients of a step that has one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ballast.errors import BallastError, CheckFailed, NonFiniteError, UsageError
from ballast.torch.measure import Counter, Norms, gradient_norms, over_ranks, peak_memory, rank
from ballast.torch.metrics import Checksums, Evaluation, Event, MetricsWriter, Step
from ballast.torch.sites import Fault, Sites
from ballast.torch.tensors import PolicyLike, Protected, dtype_word, local, protected_tensors

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

try:
    from transformers import TrainerCallback
except ImportError:  # without the extra `hf`, for other loops

    class TrainerCallback:  # type: ignore[no-redef]
        """Stands in for the base class of transformers."""


OnFault = Literal["stop", "skip", "raise"]


@dataclass
class Entry:
    """One protected tensor."""

    name: str
    """Name, as in the checkpoint."""
    dtype: str
    """Storage type: `f32`, or another one after a fault."""
    first: int
    """Checksum when the run began."""
    last: int
    """Checksum after the last update."""
    checks: int = 0
    """Number of passed checks."""
    live: int = 0
    """Number of checks before which forward read the tensor in f32."""
    saved: int = 0
    """Number of checks that read bits and type back from a file; this ledger makes none."""
    beyond_bf16: float = 0.0
    """Fraction of values that bf16 cannot represent."""


class Ledger(TrainerCallback):
    """Checks protected tensors at every step, and stops a non-finite value before the update.

    As a callback: `Trainer(..., callbacks=[Ledger("run")])`. In another loop:

    ```python
    ledger = Ledger("run")
    ledger.attach(model)
    for batch in batches:
        model(**batch).loss.backward()
        ledger.step(model)        # after a fault there are no gradients, and the next line does nothing
        optimizer.step()
        optimizer.zero_grad()
        if ledger.stopped:
            break
    ledger.close()
    ```

    `folder` gets metrics.jsonl, in the format of `ballast train`, ledger.json with the record of every
    tensor, and checksums.jsonl with dtype and checksum of every tensor by step. On a fault, `on_fault`
    decides: `stop` ends the run before the update, `skip` skips the update, `raise` raises `NonFiniteError`
    or `CheckFailed`. With `sites=False`, only gradients are checked for non-finite values.
    """

    def __init__(
        self,
        folder: str | PathLike[str] | None = None,
        policy: PolicyLike = "strict",
        *,
        on_fault: OnFault = "stop",
        sites: bool = True,
    ) -> None:
        """Creates the ledger of one run."""
        if on_fault not in get_args(OnFault):
            raise UsageError(f"on_fault must be one of {', '.join(get_args(OnFault))}, got {on_fault!r}")
        self.on_fault = on_fault
        self.entries: list[Entry] = []
        self.faults: list[str] = []
        """Messages of all faults."""
        self.stopped = False
        """True after a fault that ends the run."""
        self.steps = 0
        self.clean_steps = 0
        self.occasions: dict[str, int] = {}
        self._folder = None if folder is None else Path(folder)
        self._policy = policy
        self._wants_sites = sites
        self._tensors: list[Protected] = []
        self._sites: Sites | None = None
        self._counter: Counter | None = None
        self._release: list[Callable[[], None]] = []
        self._writer: MetricsWriter | None = None
        self._checksums: MetricsWriter | None = None
        self._pending: Step | None = None
        self._step = 0
        self._begun = time.perf_counter()

    # For any training loop.

    def attach(self, model: nn.Module) -> None:
        """Records the protected tensors of a model, and adds the hooks. A second call does nothing."""
        if self._counter is not None:
            return
        self._tensors = protected_tensors(model, self._policy, warn=True)
        self.entries = [
            Entry(tensor.name, _dtype(tensor), checksum, checksum)
            for tensor, checksum in zip(self._tensors, _checksums(self._tensors), strict=True)
        ]
        self._counter = Counter(model)
        self._release.append(self._counter.remove)
        if self._wants_sites:
            self._sites = Sites(model, self._tensors)
            self._release.append(self._sites.remove)
        ledger = weakref.ref(self)

        def updated(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if (this := ledger()) is not None:
                this._note_update(optimizer)

        def loaded(*_: object) -> None:
            if (this := ledger()) is not None:
                this.note()

        self._release.append(register_optimizer_step_post_hook(updated).remove)
        self._release.append(model.register_load_state_dict_post_hook(loaded).remove)
        if self._folder is not None and rank() == 0:
            self._writer = MetricsWriter(self._folder / "metrics.jsonl")
            self._checksums = MetricsWriter(self._folder / "checksums.jsonl")
        self._begun = time.perf_counter()
        self._handle(self._check("build"))

    def step(self, model: nn.Module, *, number: int | None = None) -> bool:
        """Checks a step between backward and update. Returns false if the update must not happen.

        `number` is the step number, from 1; by default steps are counted.
        """
        self.attach(model)
        if self.stopped:
            _drop_gradients(model)
            return False
        assert self._counter is not None
        self._write_pending()
        self._step = self._step + 1 if number is None else number
        counts = self._counter.take()
        norms = gradient_norms(model)
        faults = self._check("step") + self._non_finite(norms)
        if self._sites is not None:
            self._sites.clear()
        faulty = self._handle(faults, model)
        if not faulty:
            self._pending = Step(
                step=self._step,
                loss=counts.loss,
                learning_rate=0.0,
                gradient_norm=norms.total,
                group_norms=norms.groups,
                tokens=counts.tokens,
                trained_tokens=counts.trained,
            )
        return not faulty

    def note(self) -> None:
        """Records the present protected tensors, after an update by an optimizer that is not torch's.

        `load_state_dict` calls it.
        """
        for entry, checksum, tensor in zip(
            self.entries, _checksums(self._tensors), self._tensors, strict=True
        ):
            entry.last, entry.dtype = checksum, _dtype(tensor)

    def close(self) -> None:
        """Checks the tensors once more, writes the files, and removes the hooks."""
        if self._counter is None:
            return
        problems = [] if self.stopped else self._check("end")
        for release in self._release:
            release()
        self._release.clear()
        self._counter = self._sites = None
        self._write_pending()
        try:
            self._handle(problems)
        finally:
            if self._writer is not None and self._folder is not None:
                (self._folder / "ledger.json").write_text(json.dumps(self._document(), indent=1) + "\n")
                for writer in filter(None, (self._writer, self._checksums)):
                    writer.close()
                self._writer = self._checksums = None

    def summary(self) -> str:
        """Returns the result in one line: `9 protected tensors: f32 for 3/3 steps`."""
        f32 = sum(entry.dtype == "f32" for entry in self.entries)
        steps = f"for {self.clean_steps}/{self.steps} steps"
        if f32 == len(self.entries):
            return f"{f32} protected tensors: f32 {steps}"
        return f"{len(self.entries)} protected tensors: {f32} f32 {steps}, {len(self.entries) - f32} lowered"

    # Checks.

    def _check(self, occasion: str) -> list[Fault]:
        """Compares the tensors with the record, updates the record, and returns the differences."""
        problems = []
        for entry, tensor, checksum in zip(
            self.entries, self._tensors, _checksums(self._tensors), strict=True
        ):
            dtype = _dtype(tensor)
            read = None if self._sites is None else self._sites.read.pop(entry.name, None)
            if dtype != "f32" and (dtype != entry.dtype or occasion == "build"):
                problems.append(f"{entry.name} is {dtype}, expected f32")
            elif checksum != entry.last:
                problems.append(
                    f"{entry.name} changed outside the optimizer: checksum {checksum:016x}, "
                    f"expected {entry.last:016x}"
                )
            elif read is not None and read != torch.float32 and dtype == "f32":
                problems.append(f"forward read {entry.name} as {dtype_word(read)}, expected f32")
            else:
                entry.checks += 1
                entry.live += read == torch.float32
            entry.dtype, entry.last = dtype, checksum
        self.occasions[occasion] = self.occasions.get(occasion, 0) + 1
        if not problems:
            self.clean_steps = self.steps
        return [Fault(0, f"protected-tensor check failed at {occasion}: {problem}") for problem in problems]

    def _non_finite(self, norms: Norms) -> list[Fault]:
        """Returns the first non-finite site, or else the first parameter with a non-finite gradient."""
        found = None if self._sites is None else self._sites.first_fault()
        if found is None and norms.non_finite is not None:
            found = Fault(3, f"grad.{norms.non_finite} is the first non-finite gradient of a parameter")
        return [] if found is None else [found]

    def _handle(self, faults: list[Fault], model: nn.Module | None = None) -> bool:
        """Handles the faults of all ranks in the same way on each rank. Returns true if there are any.

        Drops the gradients of `model`, if given.
        """
        faults = over_ranks(faults)
        if not faults:
            return False
        self.faults += [f"step {self._step}: {fault.text}" for fault in faults]
        for fault in faults:
            self._write(Event(self._step, "fault", fault.text))
        if model is not None:
            _drop_gradients(model)
        if self.on_fault == "raise":
            kind: type[BallastError] = NonFiniteError if faults[0].order else CheckFailed
            raise kind(f"step {self._step}: {faults[0].text}")
        if model is not None:
            self._write(Event(self._step, self.on_fault, "update skipped"))
        self.stopped = self.on_fault == "stop"
        return True

    def _note_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Records the tensors that an optimizer has updated."""
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for entry, tensor, checksum in zip(
            self.entries, self._tensors, _checksums(self._tensors), strict=True
        ):
            if id(tensor.tensor) in updated and _dtype(tensor) == entry.dtype:
                entry.last = checksum
                entry.beyond_bf16 = _beyond_bf16(tensor)
        if self._pending is not None and optimizer.param_groups:
            self._pending.learning_rate = float(optimizer.param_groups[0]["lr"])
            self._pending.seconds = time.perf_counter() - self._begun
            self._pending.peak_memory = peak_memory()
            self._begun = time.perf_counter()
            self.steps += 1
            if self._checksums is not None:
                tensors = {entry.name: f"{entry.dtype} {entry.last:016x}" for entry in self.entries}
                self._checksums.write(Checksums(self._step, tensors))

    # Files.

    def _write(self, entry: Step | Evaluation | Event) -> None:
        if self._writer is not None:
            self._writer.write(entry)

    def _write_pending(self) -> None:
        if self._pending is not None:
            self._write(self._pending)
            self._pending = None

    def _document(self) -> dict[str, Any]:
        entries = [asdict(entry) for entry in self.entries]
        return {
            "entries": entries,
            "clean_steps": self.clean_steps,
            "steps": self.steps,
            "escalations": [],
            "occasions": self.occasions,
        }

    # Events of transformers' Trainer.

    def on_train_begin(
        self, args: object, state: TrainerState, control: TrainerControl, model: nn.Module, **_: object
    ) -> TrainerControl:
        """Attaches the ledger."""
        self.attach(model)
        self._step = state.global_step
        return self._ends(control)

    def on_pre_optimizer_step(
        self, args: object, state: TrainerState, control: TrainerControl, model: nn.Module, **_: object
    ) -> TrainerControl:
        """Checks the step before its update."""
        self.step(model, number=state.global_step + 1)
        return self._ends(control)

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **_: object,
    ) -> None:
        """Takes the norm from before clipping, because the Trainer clips before `on_pre_optimizer_step`."""
        pending = self._pending
        if pending is not None and pending.step == state.global_step and "grad_norm" in logs:
            clipped, pending.gradient_norm = pending.gradient_norm, float(logs["grad_norm"])
            scale = pending.gradient_norm / clipped if clipped else 1.0
            pending.group_norms = {group: norm * scale for group, norm in pending.group_norms.items()}

    def on_evaluate(
        self,
        args: object,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **_: object,
    ) -> TrainerControl:
        """Records an evaluation, and checks that it changed no tensor."""
        if self._counter is not None:
            self._write_pending()
            loss = float(metrics.get("eval_loss", math.nan))
            accuracy = float(metrics.get("eval_accuracy", math.nan))
            tokens = self._counter.take_evaluated()
            self._write(Evaluation(state.global_step, loss, accuracy, tokens))
            self._handle(self._check("evaluation"))
        return self._ends(control)

    def on_save(
        self, args: object, state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        """Checks that saving changed no tensor."""
        if self._counter is not None:
            self._handle(self._check("save"))
        return self._ends(control)

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Closes the ledger."""
        self.close()

    def _ends(self, control: TrainerControl) -> TrainerControl:
        control.should_training_stop = control.should_training_stop or self.stopped
        return control


def _drop_gradients(model: nn.Module) -> None:
    """Turns the next update into a no-op: an optimizer skips parameters without a gradient."""
    for parameter in model.parameters():
        parameter.grad = None


def _dtype(tensor: Protected) -> str:
    return "removed" if tensor.tensor is None else dtype_word(tensor.tensor.dtype)


def _checksums(tensors: list[Protected]) -> list[int]:
    """Returns the checksum of every tensor's bytes on this rank, with one copy from each device."""
    sums = [0] * len(tensors)
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    parts = [None if t.tensor is None or t.tensor.is_meta else local(t.tensor).reshape(-1) for t in tensors]
    for index, part in enumerate(parts):
        if part is not None and part.numel():
            places.setdefault((part.device, part.dtype), []).append(index)
    for indices in places.values():
        together = torch.cat([parts[i] for i in indices]).cpu()
        data = ctypes.string_at(together.data_ptr(), together.nbytes)
        at = 0
        for i in indices:
            size = parts[i].nbytes  # type: ignore[union-attr]
            digest = hashlib.blake2b(data[at : at + size], digest_size=8).digest()
            sums[i] = int.from_bytes(digest, "little")
            at += size
    return sums


def _beyond_bf16(tensor: Protected) -> float:
    """Returns the fraction of values that bf16 cannot represent."""
    if tensor.tensor is None or tensor.tensor.is_meta:
        return 0.0
    values = local(tensor.tensor)
    return float((values != values.bfloat16().to(values.dtype)).float().mean()) if values.numel() else 0.0
