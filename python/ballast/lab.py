"""Cost of each precision choice on a model, measured against f64.

The results are those of lab.json. A non-finite number is null there and nan here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ballast._command import Path, Progress, Report
from ballast._command import run as _run

__all__ = [
    "Answer",
    "AttentionError",
    "Decay",
    "DecayError",
    "DecodingRun",
    "Findings",
    "GradientError",
    "IndexerError",
    "Input",
    "L2NormBytes",
    "LayerError",
    "LogitRange",
    "NotFinite",
    "PositionDivergence",
    "PositionError",
    "ProtectedTensor",
    "Reference",
    "Run",
    "SiteError",
    "Spread",
    "Training",
    "TrainingRun",
    "run",
]


@dataclass(frozen=True)
class Input:
    """Input of a study."""

    source: str
    tokens: int
    sequences: int
    longest: int
    predicted: int


@dataclass(frozen=True)
class Reference:
    """Reference run."""

    arithmetic: str
    loss: float
    perplexity: float


@dataclass(frozen=True)
class Run:
    """Results of one policy relative to the reference.

    `kl` is KL(reference || this) per token in nats; `first_difference` is the first tensor whose bits differ
    from the f32 run, or whose error exceeds the tolerance for another checkpoint or a dump.
    """

    name: str
    what: str
    kind: str
    loss: float
    perplexity: float
    loss_difference: float
    kl: Spread
    top1_agreement: float
    first_difference: str | None
    not_finite: NotFinite | None
    by_layer: tuple[LayerError, ...]
    sites: tuple[SiteError, ...]
    by_position: tuple[PositionError, ...]
    decay: tuple[DecayError, ...]
    attention: tuple[AttentionError, ...]
    indexer: tuple[IndexerError, ...]
    gradients: tuple[GradientError, ...]
    gradient_error: float | None
    indexer_gradient_error: float | None


@dataclass(frozen=True)
class Spread:
    """Mean, 99th percentile and maximum."""

    mean: float
    p99: float
    max: float


@dataclass(frozen=True)
class NotFinite:
    """Non-finite values of a tensor."""

    site: str
    count: int
    dtype: str


@dataclass(frozen=True)
class LayerError:
    """Error after a layer."""

    layer: int
    error: float


@dataclass(frozen=True)
class SiteError:
    """Error of a named tensor, such as `layers.3.linear_attn.g`."""

    site: str
    dtype: str
    error: float
    max_abs: float
    largest: float


@dataclass(frozen=True)
class PositionError:
    """Errors of tokens at positions `from..to` of their sequence."""

    from_: int
    to: int
    hidden: float
    recurrence: float | None
    kl: float


@dataclass(frozen=True)
class Decay:
    """Decay of a head in the reference: rate exp(A_log), nats per token, and half-life in tokens."""

    layer: int
    head: int
    rate: float
    per_token: float
    half_life: float


@dataclass(frozen=True)
class DecayError:
    """Error of a head's decay under a policy."""

    layer: int
    head: int
    rate_error: float
    per_token_error: float
    half_life: float


@dataclass(frozen=True)
class LogitRange:
    """Range of a layer's attention logits in the reference."""

    layer: int
    min: float
    max: float
    largest: float
    bf16_ulp: float
    f16_ulp: float | None
    histogram: tuple[tuple[float, int], ...]
    rows: int


@dataclass(frozen=True)
class AttentionError:
    """Error of a layer's attention logits under a policy."""

    layer: int
    largest: float
    max_abs: float
    top_key_changed: float
    ties: float


@dataclass(frozen=True)
class IndexerError:
    """Error of an indexer's choice under a policy."""

    layer: int
    overlap: float
    same: float
    queries: int


@dataclass(frozen=True)
class GradientError:
    """Error of a parameter's gradient."""

    tensor: str
    error: float
    cosine: float


@dataclass(frozen=True)
class ProtectedTensor:
    """A protected tensor in the checkpoint."""

    name: str
    dtype: str
    elements: int
    beyond_bf16: int
    bf16_error: float


@dataclass(frozen=True)
class L2NormBytes:
    """Bytes saved for backward for q, k and their norm, over all layers with linear attention."""

    tokens: int
    inside: int
    outside: int


@dataclass(frozen=True)
class Training:
    """A few training steps in f32 and under each policy."""

    steps: int
    learning_rate: float
    reference: tuple[float, ...]
    runs: tuple[TrainingRun, ...]


@dataclass(frozen=True)
class TrainingRun:
    """Training under a policy.

    `drift` is |a - b| / |b - start| of the parameters a from those of the f32 run b; `not_finite` is the step
    with the first non-finite loss or gradient.
    """

    name: str
    losses: tuple[float, ...]
    drift: float
    protected_drift: float | None
    not_finite: int | None


@dataclass(frozen=True)
class DecodingRun:
    """Decoding under a policy, compared with decoding in f32."""

    name: str
    kl: Spread
    top1_agreement: float
    by_position: tuple[PositionDivergence, ...]


@dataclass(frozen=True)
class PositionDivergence:
    """Mean KL divergence of tokens at positions `from..to` of their sequence."""

    from_: int
    to: int
    kl: float


@dataclass(frozen=True)
class Answer:
    """Answer to a published question for this model."""

    question: str
    short: str
    text: str


@dataclass(frozen=True)
class Findings(Report):
    """Results of a study.

    Errors are RMS(a - b) / RMS(b) with b the reference's. `runs` has the largest mean KL first; the run `f32`
    is the floor, the cost of f32 arithmetic itself. Results that were not measured are empty or None.
    """

    model: str
    model_type: str
    parameters: int
    layers: int
    input: Input
    reference: Reference
    runs: tuple[Run, ...]
    protected: tuple[ProtectedTensor, ...]
    decays: tuple[Decay, ...]
    attention: tuple[LogitRange, ...]
    l2norm: tuple[L2NormBytes, ...]
    training: Training | None
    decoding: tuple[DecodingRun, ...]
    answers: tuple[Answer, ...]
    notes: tuple[str, ...]
    seconds: float
    peak_memory_bytes: int | None
    unknown_config_keys: tuple[str, ...] = ()


def run(
    model: Path | None = None,
    *,
    data: Path | None = None,
    ids: Path | None = None,
    task: bool = False,
    tokens: int | None = None,
    sequences: int | None = None,
    policies: Sequence[str] = (),
    reference: Literal["f64", "f32"] = "f64",
    no_gradients: bool = False,
    steps: int | None = None,
    learning_rate: float | None = None,
    decode: bool = False,
    compare: tuple[Path, Path] | None = None,
    dump: Path | None = None,
    tolerance: float | None = None,
    out: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Findings:
    """Runs an input through an f64 reference and under each policy, and compares the results.

    Without a model, the embedded one is used. In place of policies, `compare` takes two checkpoints of one
    model, and `dump` a folder with another framework's tensors. Only with `out` are lab.json and lab.html
    written.

    >>> findings = run(policies=["f32", "A_log"], tokens=16, no_gradients=True)
    >>> {run.name: run.first_difference for run in findings.runs}
    {'A_log': 'layers.0.linear_attn.g', 'f32': None}
    """
    return _run(
        Findings,
        "lab",
        model,
        progress=progress,
        may_leave=True,
        data=data,
        ids=ids,
        task=task,
        tokens=tokens,
        sequences=sequences,
        policies=",".join(policies) or None,
        reference=reference,
        no_gradients=no_gradients,
        steps=steps,
        learning_rate=learning_rate,
        decode=decode,
        compare=compare,
        dump=dump,
        tolerance=tolerance,
        out=out,
        force=force,
    )
