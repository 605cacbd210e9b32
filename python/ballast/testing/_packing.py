"""Calls of a model with sequences packed into one row, and with one sequence alone."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ballast._torch import torch
from ballast.errors import UsageError

Pack = Callable[[list[torch.Tensor]], Any]


def _numbers(lengths: Sequence[int]) -> torch.Tensor:
    """Number of the sequence of every token."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def _position_ids(lengths: Sequence[int], _: torch.dtype) -> dict[str, Any]:
    return {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}


def _cu_seqlens(lengths: Sequence[int], _: torch.dtype) -> dict[str, Any]:
    return {"cu_seqlens": _offsets(lengths)}


def _cu_seq_lens(lengths: Sequence[int], _: torch.dtype) -> dict[str, Any]:
    offsets, longest = _offsets(lengths), max(lengths)
    return {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _seq_idx(lengths: Sequence[int], _: torch.dtype) -> dict[str, Any]:
    return {"seq_idx": _numbers(lengths)[None].int()}


def _mask_2d(lengths: Sequence[int], _: torch.dtype) -> dict[str, Any]:
    return {"attention_mask": _numbers(lengths)[None] + 1}


def _mask_4d(lengths: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    numbers = _numbers(lengths)
    later = torch.ones(len(numbers), len(numbers), dtype=torch.bool).triu(1)
    hidden = (numbers[:, None] != numbers[None, :]) | later
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    return {"attention_mask": mask[None, None]}


PACKINGS: dict[str, Callable[[Sequence[int], torch.dtype], dict[str, Any]]] = {
    "none": lambda lengths, dtype: {},
    "position_ids": _position_ids,
    "cu_seqlens": _cu_seqlens,
    "cu_seq_lens": _cu_seq_lens,
    "seq_idx": _seq_idx,
    "mask_2d": _mask_2d,
    "mask_4d": _mask_4d,
}


@dataclass
class Runner:
    """Calls a model with packed sequences or with one alone, and returns its output as [tokens, features]."""

    model: torch.nn.Module
    sequences: list[torch.Tensor]
    pack: str | Sequence[str] | Pack
    alone: Callable[[torch.Tensor], Mapping[str, Any]] | None
    select: Callable[[Any], torch.Tensor] | None
    options: dict[str, Any]
    places: list[tuple[int, int]] = field(init=False, default_factory=list)
    """Row and first token of every sequence in the packed batch."""
    rows: int = field(init=False, default=1)
    width: int = field(init=False, default=0)
    probes: list[torch.Tensor] | None = field(init=False, default=None)
    """Where the zeros that are added to packed floating-point inputs go, for their gradients."""

    def __post_init__(self) -> None:
        parameters = list(self.model.parameters())
        first = next((p for p in parameters if p.is_floating_point()), None)
        self.device = torch.device("cpu") if first is None else first.device
        self.dtype = torch.float32 if first is None else first.dtype
        names = inspect.signature(self.model.forward).parameters
        self.by_keyword = "input_ids" in names
        self.required = {name for name, p in names.items() if p.default is p.empty}
        if not callable(self.pack):
            for name in [self.pack] if isinstance(self.pack, str) else self.pack:
                if name not in PACKINGS:
                    raise UsageError(
                        f"unknown packing {name!r}; use one or several of {', '.join(PACKINGS)}, or a "
                        "function that takes the sequences and returns the keywords of the model"
                    )

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        return [len(x) for x in self.sequences]

    def run_packed(self, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the output of every sequence, packed together."""
        keywords, places = self._packed(sequences)
        tokens = None if callable(self.pack) else torch.cat(sequences)[None].to(self.device)
        if self.probes is not None and tokens is not None and tokens.is_floating_point():
            self.probes.append(torch.zeros_like(tokens, requires_grad=True))
            tokens = tokens + self.probes[-1]
        out = self._output(self._call(tokens, keywords))
        if places is None:
            if out.shape[0] * out.shape[1] < sum(self.lengths):
                raise UsageError(f"the output has the shape {list(out.shape)} for {sum(self.lengths)} tokens")
            places = [divmod(start, out.shape[1]) for start in _offsets(self.lengths)[:-1].tolist()]
        self.places, (self.rows, self.width) = places, out.shape[:2]
        for (row, start), length in zip(places, self.lengths, strict=True):
            if row >= self.rows or start + length > self.width:
                raise UsageError(
                    f"a sequence of {length} tokens at row {row}, token {start} is not in the output "
                    f"{list(out.shape)}; let pack return (keywords, [(row, first token), ...])"
                )
        return [
            out[row, start : start + n].flatten(1)
            for (row, start), n in zip(places, self.lengths, strict=True)
        ]

    def run_alone(self, sequence: torch.Tensor) -> torch.Tensor:
        """Returns the output of one sequence."""
        if self.alone is not None or callable(self.pack):
            made = {"input_ids": sequence[None]} if self.alone is None else self.alone(sequence)
            out = self._output(self._call(None, {**made, **self.options}))
        else:
            given = self._named([len(sequence)])
            given = {name: x for name, x in given.items() if name in self.required}
            out = self._output(self._call(sequence[None], {**given, **self.options}))
        return out[0, : len(sequence)].flatten(1)

    def tokens_of(self, sequence: int) -> torch.Tensor:
        """Indices of the tokens of a sequence among all rows * width tokens of the batch."""
        row, start = self.places[sequence]
        return row * self.width + start + torch.arange(self.lengths[sequence], device=self.device)

    def _packed(self, sequences: list[torch.Tensor]) -> tuple[dict[str, Any], list[tuple[int, int]] | None]:
        if callable(self.pack):
            made = self.pack(sequences)
            keywords, places = made if isinstance(made, tuple) else (made, None)
            return {**keywords, **self.options}, places
        return {**self._named(self.lengths), **self.options}, None

    def _named(self, lengths: Sequence[int]) -> dict[str, Any]:
        """Keywords of the named packings."""
        keywords = {}
        for name in [self.pack] if isinstance(self.pack, str) else self.pack:
            keywords |= PACKINGS[name](lengths, self.dtype)
        return keywords

    def _call(self, tokens: torch.Tensor | None, keywords: dict[str, Any]) -> Any:  # noqa: ANN401
        on_device = {n: x.to(self.device) if isinstance(x, torch.Tensor) else x for n, x in keywords.items()}
        if tokens is None:
            return self.model(**on_device)
        tokens = tokens.to(self.device)
        if self.by_keyword:
            return self.model(input_ids=tokens, **on_device)
        return self.model(tokens, **on_device)

    def _output(self, result: Any) -> torch.Tensor:  # noqa: ANN401
        out = _main_output(result) if self.select is None else self.select(result)
        if not isinstance(out, torch.Tensor) or out.ndim < 2:
            raise UsageError("no output [batch, tokens, ...] found; pass output=, a function that returns it")
        return out


def _main_output(result: Any) -> torch.Tensor | None:  # noqa: ANN401
    if isinstance(result, torch.Tensor):
        return result
    for name in ("logits", "last_hidden_state"):
        found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(found, torch.Tensor):
            return found
    parts = result.values() if isinstance(result, Mapping) else result
    tensors = (x for x in parts if isinstance(x, torch.Tensor)) if isinstance(parts, tuple | list) else ()
    return next((x for x in tensors if x.is_floating_point() and x.ndim >= 2), None)


def random_sequences(model: torch.nn.Module, lengths: Sequence[int], seed: int) -> list[torch.Tensor]:
    """Returns sequences of random tokens of the model's vocabulary, without its special tokens."""
    size, special = _vocabulary(model)
    generator = torch.Generator().manual_seed(seed)
    return [_drawn(generator, (length,), size, special) for length in lengths]


def changed(sequence: torch.Tensor, model: torch.nn.Module, seed: int) -> torch.Tensor:
    """Returns a sequence of the same length with other tokens."""
    generator = torch.Generator().manual_seed(seed)
    if sequence.is_floating_point():
        noise = torch.randn(sequence.shape, generator=generator)
        return (noise * sequence.float().std().cpu().clamp(min=1e-3)).to(sequence)
    size, special = _vocabulary(model)
    drawn = _drawn(generator, tuple(sequence.shape), size, special).to(sequence)
    return torch.where(drawn == sequence, _drawn(generator, (1,), size, special).to(sequence), drawn)


def _drawn(
    generator: torch.Generator, shape: tuple[int, ...], size: int, special: Sequence[int]
) -> torch.Tensor:
    drawn = torch.randint(0, size, shape, generator=generator)
    for _ in range(20):
        again = torch.isin(drawn, torch.tensor(special, dtype=drawn.dtype))
        if not again.any():
            break
        drawn = torch.where(again, torch.randint(0, size, shape, generator=generator), drawn)
    return drawn


def _vocabulary(model: torch.nn.Module) -> tuple[int, list[int]]:
    """Size of the vocabulary and the special tokens."""
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    special = [getattr(config, name, None) for name in names]
    flat = itertools.chain.from_iterable(x if isinstance(x, list | tuple) else [x] for x in special)
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
        if not tables:
            raise UsageError("the model has no vocabulary: pass sequences, as tensors [tokens, features]")
        size = tables[0].num_embeddings
    return size, [token for token in flat if isinstance(token, int)]
