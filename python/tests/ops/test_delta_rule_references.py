"""The f64 delta rules of `ballast.testing` against golden values from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors import safe_open

from ballast import testing

FIXTURES = sorted(path for folder in ("gdn", "kda") for path in (ROOT / "fixtures" / folder).glob("*"))


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_outputs_and_every_gradient_are_the_golden_ones(path: Path) -> None:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        golden = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    names = ("q", "k", "v", "g", "beta", "h0")
    leaves = {name: golden[name].double().requires_grad_() for name in names}
    given: dict[str, Any] = {"initial_state" if name == "h0" else name: x for name, x in leaves.items()}
    rule = testing.kda_reference if golden["g"].ndim == 4 else testing.gated_delta_rule_reference
    o, ht = rule(
        **given,
        scale=float(metadata["scale"]),
        output_final_state=True,
        use_qk_l2norm_in_kernel=metadata["l2norm"] == "true",
        cu_seqlens=golden.get("cu_seqlens"),
    )
    gradients = torch.autograd.grad((o, ht), list(leaves.values()), (golden["do"], golden["dht"]))
    found = {"o": o, "ht": ht} | {f"d{name}": x for name, x in zip(names, gradients, strict=True)}
    assert len(found) == 8
    for name, x in found.items():
        testing.assert_close(x, golden[name], rms=3e-7, name=name)  # they are stored in F32


def test_a_decay_per_channel_that_is_the_same_in_all_is_the_gated_rule() -> None:
    case = testing.golden("chunk_gated_delta_rule", tokens=9, value_heads=4, initial_state=True)
    wide = {**case.arguments, "g": case.arguments["g"][..., None].expand(-1, -1, -1, 16)}
    o, state = testing.kda_reference(**wide)
    expected = case.expected()
    testing.assert_close(o, expected["o"], rms=1e-12)
    testing.assert_close(state, expected["final_state"], rms=1e-12)
    assert testing.golden("chunk_kda", tokens=9).arguments["g"].shape == (1, 9, 2, 16)
