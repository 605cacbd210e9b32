"""Checkpoints in safetensors: inspect, audit, convert, diff and repair.

Each function runs the command of the same name, with options as keywords. It releases the GIL and calls
`progress` with the phase, the amount done and the total. An interrupt before the result is renamed into place
leaves nothing behind; one during the rename is raised after the call has completed. Results are frozen
dataclasses; `to_json()` returns the document of the command line. A non-finite number is null there and nan
here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from os import fspath
from typing import Literal

from ballast._command import Path, Progress, Report, run
from ballast.contract import Policy
from ballast.errors import CheckFailed

__all__ = [
    "AdapterConversion",
    "Amount",
    "Architecture",
    "Audit",
    "Conversion",
    "DecayCost",
    "Diff",
    "DtypeChange",
    "FileSummary",
    "Finding",
    "Inspection",
    "Layout",
    "LeftOut",
    "MovedValues",
    "ProtectedSummary",
    "Publication",
    "RemoteSummary",
    "Repair",
    "RepairedTensor",
    "TensorDiff",
    "TensorSummary",
    "Verification",
    "audit",
    "convert",
    "convert_adapter",
    "diff",
    "inspect",
    "repair",
]


@dataclass(frozen=True)
class Architecture:
    """Architecture of a checkpoint, as far as known."""

    name: str | None
    families: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Layout:
    """Layout of a checkpoint: naming, ranks, and whether projections and experts are split or fused."""

    naming: str
    projections: str | None
    experts: str | None
    ranks: int
    expert_ranks: int
    zero_centered_gamma: bool
    prefix: str


@dataclass(frozen=True)
class Amount:
    """Number of tensors, parameters and bytes."""

    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class FileSummary:
    """One safetensors file."""

    file: str
    bytes: int
    tensors: int


@dataclass(frozen=True)
class ProtectedSummary:
    """Tensors protected by one rule: their number by dtype, and the first one."""

    rule: str
    stored: dict[str, int]
    first: str


@dataclass(frozen=True)
class TensorSummary:
    """One tensor, and the rule that protects it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    role: str
    file: str
    rule: str | None


@dataclass(frozen=True)
class LeftOut:
    """Values of one kind in a torch file that are not tensors, with the first names."""

    kind: str
    count: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class RemoteSummary:
    """Data read from a server: the address with its commit, and the number of bytes and requests."""

    address: str
    bytes: int
    requests: int
    note: str | None = None


@dataclass(frozen=True)
class Inspection(Report):
    """Summary of a checkpoint. `tensors` is empty unless requested.

    `state` is optimizer state; `left_out` has all other values that are not tensors. `remote` is None for a
    checkpoint on disk.
    """

    architecture: Architecture
    layout: Layout
    files: tuple[FileSummary, ...]
    total: Amount
    by_dtype: dict[str, Amount]
    by_role: tuple[tuple[str, str, Amount], ...]
    protected: tuple[ProtectedSummary, ...]
    metadata: dict[str, str]
    sidecars: tuple[str, ...]
    issues: tuple[str, ...]
    tensors: tuple[TensorSummary, ...]
    unknown_config_keys: tuple[str, ...] = ()
    state: dict[str, Amount] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    remote: RemoteSummary | None = None


def inspect(path: Path, *, tensors: bool = False, policy: Path | Policy = "strict") -> Inspection:
    """Returns a checkpoint's architecture, layout, files, dtypes and protected tensors.

    A path may be `hf://ORG/NAME[@REVISION]`, as in all functions of this module.

    >>> report = inspect("fixtures/release/qwen3_5")
    >>> report.architecture.name, report.layout.naming
    ('Qwen3_5ForConditionalGeneration', 'hf')
    >>> [(p.rule, p.stored) for p in report.protected][0]
    ('gdn-a-log', {'F32': 3})
    """
    return run(Inspection, "inspect", path, tensors=tensors, policy=policy)


@dataclass(frozen=True)
class Finding:
    """One kind of finding and its tensors. A violation fails the audit, a warning or a note does not."""

    kind: str
    severity: Literal["violation", "warning", "note"]
    rule: str | None
    required: str | None
    stored: str | None
    tensors: tuple[str, ...]
    reason: str
    fix: str


@dataclass(frozen=True)
class DecayCost:
    """Relative error of the decay rate exp(A_log) in bf16.

    `tense` is "would" for tensors with full f32 precision, "has" for those already rounded.
    """

    tense: str
    tensors: int
    heads: int
    mean: float
    worst: float


@dataclass(frozen=True)
class Publication:
    """The source of the published form of the tensors: the original, or the name of a release."""

    name: str
    source: str


@dataclass(frozen=True)
class Audit(Report):
    """Result of an audit. `values` tells whether the values of all or only of protected tensors were read."""

    architecture: Architecture
    policy: str
    layout: Layout
    tensors: int
    bytes: int
    values: Literal["all", "protected"]
    protected: int
    findings: tuple[Finding, ...]
    decay: tuple[DecayCost, ...]
    notes: tuple[str, ...]
    passed: bool
    unknown_config_keys: tuple[str, ...] = ()
    released: Publication | None = None
    remote: RemoteSummary | None = None

    @property
    def ok(self) -> bool:
        """True if there is no violation."""
        return self.passed

    @property
    def violations(self) -> tuple[Finding, ...]:
        """Findings that fail the audit."""
        return tuple(finding for finding in self.findings if finding.severity == "violation")

    def raise_if_failed(self) -> None:
        """Raises `CheckFailed`, with every violation in its message, if the audit failed."""
        if self.ok:
            return
        lines = [f"audit failed under policy {self.policy}"]
        for found in self.violations:
            what = found.kind if found.rule is None else f"{found.kind} ({found.rule})"
            more = f" and {len(found.tensors) - 1} more" if len(found.tensors) > 1 else ""
            lines.append(f"{what}: {found.tensors[0]}{more}: {found.reason} -> {found.fix}")
        raise CheckFailed("\n".join(lines), tensor=self.violations[0].tensors[0])


def audit(
    path: Path,
    *,
    policy: Path | Policy | None = None,
    original: Path | None = None,
    full: bool = False,
    progress: Progress | None = None,
) -> Audit:
    """Checks a checkpoint's dtypes, index and values against the precision contract.

    Without a `policy` every tensor of the table is protected (`strict`), and a tensor that is as its authors
    published it is a note: by `original`, their checkpoint, or by the name of the model. A policy that is
    given accepts F32 only. On a hub, only the values of protected tensors are read, unless `full` is set.

    >>> audit("fixtures/release/qwen3_5", original="fixtures/release/qwen3_5").findings[0].kind
    'as-released'
    >>> report = audit("fixtures/release/qwen3_5", policy="megatron")
    >>> report.ok, report.findings
    (True, ())
    >>> report.raise_if_failed()
    """
    return run(Audit, "audit", path, policy=policy, original=original, full=full, progress=progress)


@dataclass(frozen=True)
class MovedValues:
    """Values changed by the shift to zero-centered gamma."""

    tensor: str
    values: int
    elements: int
    max_abs: float


@dataclass(frozen=True)
class Verification:
    """Number of tensors by result of the comparison with the source, after the files were read back."""

    same_bits: int
    same_values: int
    rounded: int
    moved: tuple[MovedValues, ...]


@dataclass(frozen=True)
class DtypeChange:
    """Tensors whose dtype changes, with the reason."""

    from_: str
    to: str
    reason: str
    lossy: bool
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Conversion(Report):
    """Result of a conversion. After a dry run, `files`, `sidecars` and `verification` are None."""

    from_: Layout
    to: Layout
    tensors: int
    bytes: int
    protected: tuple[str, ...]
    dtype_changes: tuple[DtypeChange, ...]
    shifted: tuple[str, ...]
    carried: tuple[str, ...]
    left_alone: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]
    files: int | None = None
    sidecars: int | None = None
    verification: Verification | None = None


def convert(
    source: Path,
    destination: Path,
    *,
    layout: Literal["hf", "nemo", "megatron"] | None = None,
    dtype: Literal["keep", "bf16", "f16", "f32", "fp8", "q8_0"] = "keep",
    format: Literal["safetensors", "torch_dist", "torch", "dcp"] = "safetensors",
    policy: Path | Policy = "strict",
    projections: Literal["split", "fused"] | None = None,
    experts: Literal["split", "fused"] | None = None,
    tp: int | None = None,
    ep: int | None = None,
    zero_centered_gamma: bool | None = None,
    max_shard_size: int | str | None = None,
    narrow_f64: bool = False,
    dry_run: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Converts a checkpoint's layout, dtype or shards; protected tensors stay or become F32.

    `destination` is a folder, or a file ending in .safetensors or .gguf (for llama.cpp); it appears
    complete or not at all. The dtype q8_0 is for .gguf only. `tp` and `ep` are the numbers of Megatron's
    tensor- and expert-parallel ranks.

    >>> plan = convert("fixtures/release/qwen3_5", "unused", dtype="f16", dry_run=True)
    >>> [(change.from_, change.to) for change in plan.dtype_changes]
    [('BF16', 'F16'), ('BF16', 'F32')]
    >>> plan.verification is None
    True
    """
    return run(
        Conversion,
        "convert",
        source,
        destination,
        layout=layout,
        dtype=dtype,
        format=format,
        policy=policy,
        projections=projections,
        experts=experts,
        tp=tp,
        ep=ep,
        zero_centered_gamma=None if zero_centered_gamma is None else str(zero_centered_gamma).lower(),
        max_shard_size=max_shard_size,
        narrow_f64=narrow_f64,
        dry_run=dry_run,
        force=force,
        progress=progress,
    )


@dataclass(frozen=True)
class AdapterConversion(Report):
    """Result of the conversion of a LoRA adapter to GGUF."""

    architecture: str
    modules: int
    bytes: int
    verification: Verification


def convert_adapter(
    adapter: Path,
    destination: Path,
    *,
    base: Path,
    dtype: Literal["keep", "bf16", "f16", "f32"] = "keep",
    force: bool = False,
    progress: Progress | None = None,
) -> AdapterConversion:
    """Converts a LoRA adapter of the model `base` for llama.cpp.

    `adapter` is a folder written by PEFT or `ballast train`; `destination` ends in .gguf.

    >>> model = "fixtures/release/qwen3_5"
    >>> convert_adapter(model, "unused.gguf", base=model)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ballast.errors.InputError: ...adapter_config.json...
    """
    return run(
        AdapterConversion,
        "convert",
        adapter,
        destination,
        base=base,
        dtype=dtype,
        force=force,
        progress=progress,
    )


@dataclass(frozen=True)
class TensorDiff:
    """One tensor of a comparison; a measure that does not apply to its verdict is None.

    Verdicts are same-bits, same-values, same-after-rounding, different, other-shape, only-in-a and only-in-b.
    """

    tensor: str
    rank: int
    role: str
    a: str | None
    b: str | None
    verdict: str
    differing: int | None = None
    max_abs: float | None = None
    max_ulp: int | None = None
    relative_rms: float | None = None


@dataclass(frozen=True)
class Diff(Report):
    """Result of a comparison; `differing` is the number of tensors that differ."""

    equal: bool
    differing: int
    a: Layout
    b: Layout
    elements: int
    tensors: tuple[TensorDiff, ...]
    remote: tuple[RemoteSummary, ...] = ()


def diff(
    a: Path,
    b: Path,
    *,
    tolerance: float = 0.0,
    strict_dtype: bool = False,
    progress: Progress | None = None,
) -> Diff:
    """Compares two checkpoints across layouts and dtypes.

    Tensors are equal up to a relative RMS difference of `tolerance`. With `strict_dtype`, equal values in
    another dtype differ.

    >>> diff("fixtures/release/qwen3_5", "fixtures/release/qwen3_5").equal
    True
    """
    return run(Diff, "diff", a, b, tolerance=tolerance, strict_dtype=strict_dtype, progress=progress)


@dataclass(frozen=True)
class RepairedTensor:
    """One protected tensor; its outcome is restored, restored-from-master, intact, trained or no-original."""

    tensor: str
    was: str
    outcome: str
    trained_values: int
    elements: int


@dataclass(frozen=True)
class Repair(Report):
    """Result of a repair."""

    tensors: tuple[RepairedTensor, ...]
    warnings: tuple[str, ...]
    verification: Verification
    remote: RemoteSummary | None = None


def repair(
    checkpoint: Path,
    destination: Path,
    *,
    original: Path,
    policy: Path | Policy = "strict",
    dry_run: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Repair:
    """Restores the f32 bits of rounded protected tensors from the original checkpoint.

    >>> folder = "fixtures/release/qwen3_5"
    >>> plan = repair(folder, "unused", original=folder, dry_run=True)
    >>> {tensor.outcome for tensor in plan.tensors if tensor.was == "F32"}
    {'intact'}
    """
    return run(
        Repair,
        "repair",
        checkpoint,
        destination,
        original=fspath(original),
        policy=policy,
        dry_run=dry_run,
        force=force,
        progress=progress,
    )
