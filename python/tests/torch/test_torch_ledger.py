"""Ledger: changes that no optimizer made, non-finite values before the update, and the files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch_support import ROOT, Texts, batch, bits, tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from ballast.errors import CheckFailed, NonFiniteError, UsageError
from ballast.torch import Ledger, keep_fp32
from ballast.torch.metrics import Event, MetricsWriter
from ballast.torch.sites import Sites

LAYER = "model.layers.1.linear_attn"


def entries(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train(
    ledger: Ledger, steps: int = 3, before: Callable[[int, nn.Module], None] = lambda step, model: None
) -> nn.Module:
    """A loop of its own, as in the documentation; `before` may damage a step."""
    model = tiny_model().train()
    keep_fp32(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ledger.attach(model)
    for step in range(1, steps + 1):
        before(step, model)
        model(**batch()).loss.backward()
        ledger.step(model)
        optimizer.step()
        optimizer.zero_grad()
        if ledger.stopped:
            break
    ledger.close()
    return model


def test_a_clean_run_is_recorded_step_by_step(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    model = train(ledger)
    assert ledger.faults == []
    assert ledger.summary() == "7 protected tensors: f32 for 3/3 steps"
    steps = entries(tmp_path)
    assert [(entry["kind"], entry["step"]) for entry in steps] == [("step", 1), ("step", 2), ("step", 3)]
    fields = {
        "kind", "step", "loss", "learning_rate", "gradient_norm", "group_norms", "tokens", "trained_tokens",
        "seconds", "peak_memory",
    }  # fmt: skip
    assert all(entry.keys() == fields for entry in steps)
    assert {entry["tokens"] for entry in steps} == {16}
    assert {entry["trained_tokens"] for entry in steps} == {14}
    assert {entry["learning_rate"] for entry in steps} == {1e-3}
    assert steps[0]["loss"] > steps[2]["loss"] > 0
    groups = {"embedding", "linear attention", "attention", "norms", "feed-forward"}
    assert steps[0]["group_norms"].keys() == groups
    total = sum(norm**2 for norm in steps[0]["group_norms"].values()) ** 0.5
    assert steps[0]["gradient_norm"] == pytest.approx(total, rel=1e-6)
    assert not model._forward_hooks and not model._forward_pre_hooks, "no hook is left"


def test_the_record_has_dtype_and_checksums_of_every_protected_tensor(tmp_path: Path) -> None:
    train(Ledger(tmp_path))
    record = json.loads((tmp_path / "ledger.json").read_text())
    assert (record["steps"], record["clean_steps"]) == (3, 3)
    assert record["occasions"] == {"build": 1, "step": 3, "end": 1}
    parameters = [entry for entry in record["entries"] if "linear_attn" in entry["name"]]
    assert len(parameters) == 6
    for entry in parameters:
        assert entry["dtype"] == "f32"
        assert entry["first"] != entry["last"], "trained"
        assert (entry["checks"], entry["live"]) == (5, 3)
        assert entry["beyond_bf16"] > 0


def test_every_step_has_the_checksums_of_its_tensors(tmp_path: Path) -> None:
    train(Ledger(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "checksums.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    name = f"{LAYER}.A_log"
    values = [line["tensors"][name] for line in lines]
    assert len(set(values)) == 3 and all(value.startswith("f32 ") for value in values)
    record = json.loads((tmp_path / "ledger.json").read_text())
    last = next(entry["last"] for entry in record["entries"] if entry["name"] == name)
    assert values[-1] == f"f32 {last:016x}"


def damage(step: int, model: nn.Module) -> None:
    """What no hook can catch: a value changed, then a tensor cast through `.data`."""
    a_log = model.get_parameter(f"{LAYER}.A_log")
    if step == 2:
        a_log.data.view(torch.int32)[0] ^= 1
    if step == 3:
        a_log.data = a_log.data.bfloat16()


def test_a_change_of_one_bit_outside_the_optimizer_is_caught(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, on_fault="skip")
    train(ledger, before=damage)
    assert len(ledger.faults) == 2
    start = f"step 2: protected-tensor check failed at step: {LAYER}.A_log changed outside the optimizer: "
    assert ledger.faults[0].startswith(start)
    assert (
        ledger.faults[1]
        == f"step 3: protected-tensor check failed at step: {LAYER}.A_log is bf16, expected f32"
    )
    kinds = [(entry["kind"], entry["step"], entry.get("what")) for entry in entries(tmp_path)]
    events = [("event", 2, "fault"), ("event", 2, "skip"), ("event", 3, "fault"), ("event", 3, "skip")]
    assert kinds == [("step", 1, None), *events]


@pytest.mark.parametrize("on_fault", ["stop", "raise"])
def test_a_fault_ends_the_run(on_fault: str) -> None:
    ledger = Ledger(on_fault=on_fault)
    if on_fault == "raise":
        with pytest.raises(CheckFailed, match=r"step 2: .*A_log changed outside the optimizer"):
            train(ledger, before=damage)
    else:
        model = train(ledger, before=damage)
        assert ledger.stopped
        model(**batch()).loss.backward()
        assert not ledger.step(model), "a stopped run takes no further step"
        assert all(p.grad is None for p in model.parameters())
    assert len(ledger.faults) == 1


@pytest.mark.parametrize("way", ["load_state_dict", "note"])
def test_a_load_and_a_noted_change_are_accepted(way: str) -> None:
    ledger = Ledger(on_fault="raise")

    def load(step: int, model: nn.Module) -> None:
        if step == 2 and way == "load_state_dict":
            model.load_state_dict(tiny_model(1).state_dict())
        elif step == 2:
            model.get_parameter(f"{LAYER}.A_log").data += 0.01
            ledger.note()

    train(ledger, before=load)
    assert ledger.faults == []


def test_the_best_model_at_the_end_is_a_load(tmp_path: Path) -> None:
    ledger = Ledger(on_fault="raise")
    more = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    more |= {"learning_rate": 1e-2, "metric_for_best_model": "loss", "greater_is_better": True}
    run = trainer(ledger, tmp_path, max_steps=4, **more)
    run.train()
    assert run.state.best_global_step == 2, "the loss falls, so the first save counts as the best"
    assert ledger.occasions == {"build": 1, "step": 4, "evaluation": 2, "save": 2, "end": 1}
    assert ledger.faults == []


def poisoned(name: str, value: float) -> Callable[[int, nn.Module], None]:
    """Sets one element of a parameter in step 2."""

    def before(step: int, model: nn.Module) -> None:
        if step == 2:
            model.get_parameter(name).data.view(-1)[0] = value

    return before


SITES = {
    "model.embed_tokens.weight": "model.embed_tokens",
    "model.layers.0.mlp.gate_proj.weight": "model.layers.0.mlp.gate_proj",
    f"{LAYER}.in_proj_qkv.weight": f"{LAYER}.in_proj_qkv",
    f"{LAYER}.in_proj_a.weight": f"{LAYER}.in_proj_a",
    f"{LAYER}.conv1d.weight": f"{LAYER}.o",
    f"{LAYER}.out_proj.weight": f"{LAYER}.out_proj",
    "model.layers.2.self_attn.q_norm.weight": "model.layers.2.self_attn.q_norm",
}


@pytest.mark.parametrize("name", SITES)
def test_the_first_site_is_named_and_the_update_left_out(name: str) -> None:
    ledger = Ledger(on_fault="stop")
    model = train(ledger, before=poisoned(name, float("nan")))
    assert ledger.faults == [
        f"step 2: micro-batch 1: {SITES[name]} is the first site with non-finite values (f32, forward)"
    ]
    bad = [other for other, p in model.named_parameters() if not bool(p.isfinite().all())]
    assert bad == [name], "no other parameter was reached"


def test_a_decay_that_overflows_is_named() -> None:
    # exp(89) is beyond f32: the parameter is finite and the decay is not.
    ledger = Ledger(on_fault="raise")

    def before(step: int, model: nn.Module) -> None:
        if step == 1:
            model.get_parameter(f"{LAYER}.A_log").data[0] = 89.0
            ledger.note()

    with pytest.raises(NonFiniteError, match=rf"{LAYER}.g is the first site with non-finite values"):
        train(ledger, before=before)


def test_a_dead_head_is_named() -> None:
    # A of 0 drawn in bf16 is an A_log of -inf.
    ledger = Ledger(on_fault="raise")

    def before(step: int, model: nn.Module) -> None:
        model.get_parameter(f"{LAYER}.A_log").data[0] = float("-inf")
        ledger.note()

    with pytest.raises(NonFiniteError, match=rf"param.{LAYER}.A_log is the first site"):
        train(ledger, before=before)


class _Spoiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("inf")


def spoil(step: int, model: nn.Module) -> None:
    if step == 2:
        norm = model.get_submodule(f"{LAYER}.norm")
        norm.register_forward_pre_hook(lambda _, args: (_Spoiled.apply(args[0]), *args[1:]))


def test_the_first_gradient_is_named_in_the_order_of_backward() -> None:
    ledger = Ledger()
    train(ledger, before=spoil)
    site = f"d.{LAYER}.o"
    assert ledger.faults == [
        f"step 2: micro-batch 1: {site} is the first site with non-finite values (f32, backward)"
    ]


def test_sites_are_watched_under_activation_checkpointing() -> None:
    ledger = Ledger()

    def before(step: int, model: nn.Module) -> None:
        model.gradient_checkpointing_enable()
        spoil(step, model)

    train(ledger, before=before)
    assert len(ledger.faults) == 1
    assert f"d.{LAYER}.o is the first site" in ledger.faults[0]


def test_a_micro_batch_is_named_by_its_number() -> None:
    model = tiny_model().train()
    ledger = Ledger(on_fault="skip")
    ledger.attach(model)
    for row in range(3):
        if row == 2:
            model.lm_head.weight.data[0] = float("nan")
        model(**batch()).loss.backward()
    assert not ledger.step(model)
    assert ledger.faults[0].startswith("step 1: micro-batch 3: model.embed_tokens is the first site"), "tied"


def test_without_sites_the_gradient_of_a_parameter_is_named() -> None:
    ledger = Ledger(sites=False)
    model = train(ledger, before=spoil)
    assert len(ledger.faults) == 1
    assert "is the first non-finite gradient of a parameter" in ledger.faults[0]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_non_finite_value_among_large_ones_shows(value: float, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity()).train()
    sites = Sites(model, [])
    values = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
    values[0] = -values[0]
    model(values)
    assert sites.first_fault() is None, "the largest values are finite"
    values[2, 3] = value
    model(values)
    assert sites.first_fault().text.startswith("micro-batch 2: 0 is the first site with non-finite values")


def test_the_tensors_of_another_optimizer_are_not_covered() -> None:
    model = tiny_model().train()
    ledger = Ledger(on_fault="raise")
    ledger.attach(model)
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    model.get_parameter(f"{LAYER}.dt_bias").data += 1
    torch.optim.SGD([other], lr=0.1).step()
    model(**batch()).loss.backward()
    with pytest.raises(CheckFailed, match=f"{LAYER}.dt_bias changed outside the optimizer"):
        ledger.step(model)


def trainer(ledger: Ledger, folder: Path, **more: object) -> Trainer:
    arguments = TrainingArguments(
        str(folder / "trainer"),
        bf16=True,
        use_cpu=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_grad_norm=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", **more},
    )
    model = tiny_model()
    keep_fp32(model)
    return Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts(), callbacks=[ledger])


def test_the_callback_records_a_run_of_the_trainer(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert isinstance(ledger, TrainerCallback)
    run = trainer(ledger, tmp_path, max_steps=3)
    run.train()
    assert ledger.summary() == "7 protected tensors: f32 for 3/3 steps"
    assert ledger.occasions == {"build": 1, "step": 3, "evaluation": 2, "end": 1}
    found = entries(tmp_path)
    assert [entry["kind"] for entry in found] == ["step", "step", "evaluation", "step", "evaluation"]
    logs = [entry for entry in run.state.log_history if "grad_norm" in entry]
    for entry, log in zip([e for e in found if e["kind"] == "step"], logs, strict=True):
        assert entry["gradient_norm"] == log["grad_norm"] > 1e-3, "before clipping"
        assert sum(n**2 for n in entry["group_norms"].values()) ** 0.5 == pytest.approx(log["grad_norm"])
        assert entry["loss"] == pytest.approx(log["loss"], abs=1e-3)
        assert entry["learning_rate"] == log["learning_rate"]
        assert (entry["tokens"], entry["trained_tokens"]) == (20, 18)
    assert found[2]["loss"] == run.state.log_history[2]["eval_loss"]
    assert (found[2]["accuracy"], found[2]["tokens"]) == ("NaN", 80)


def test_a_model_that_was_lowered_is_not_trained(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    run = trainer(ledger, tmp_path, max_steps=3, learning_rate=0.1)
    run.model = tiny_model().bfloat16()
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.train()
    assert run.state.global_step == 0
    assert len(ledger.faults) == 7, "with the inverse frequencies"
    assert "check failed at build: model.layers.0.linear_attn.A_log is bf16" in ledger.faults[0]
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())


class Damage(TrainerCallback):
    """Damages a tensor after the first step, as an evaluation in bf16 would."""

    def on_step_end(
        self, args: object, state: object, control: object, model: nn.Module, **_: object
    ) -> None:
        if state.global_step == 1:
            parameter = model.get_parameter(f"{LAYER}.A_log")
            parameter.data = parameter.data.bfloat16().float()


@pytest.mark.parametrize(("on_fault", "steps"), [("stop", 2), ("skip", 3)])
def test_the_trainer_stops_or_skips(tmp_path: Path, on_fault: str, steps: int) -> None:
    ledger = Ledger(tmp_path, on_fault=on_fault)
    run = trainer(ledger, tmp_path, max_steps=3)
    run.add_callback(Damage())
    run.train()
    assert run.state.global_step == steps
    assert len(ledger.faults) == 1
    assert ledger.faults[0].startswith(
        f"step 2: protected-tensor check failed at step: {LAYER}.A_log changed"
    )
    taken = [entry["step"] for entry in entries(tmp_path) if entry["kind"] == "step"]
    assert taken == [step for step in range(1, steps + 1) if step != 2]


def test_a_skipped_update_leaves_every_parameter_alone() -> None:
    ledger = Ledger(on_fault="skip")
    seen = []

    def before(step: int, model: nn.Module) -> None:
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        if step == 2:
            spoil(step, model)

    train(ledger, steps=3, before=before)
    assert all(torch.equal(seen[1][name], seen[2][name]) for name in seen[1])
    assert not all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


def test_an_unknown_reaction_is_refused() -> None:
    with pytest.raises(UsageError, match="on_fault must be one of stop, skip, raise, got 'ignore'"):
        Ledger(on_fault="ignore")


def test_the_fixture_that_the_report_is_drawn_from_is_what_the_ledger_writes(tmp_path: Path) -> None:
    train(Ledger(tmp_path, on_fault="skip"), before=spoil)
    folder = ROOT / "fixtures" / "training" / "torch"
    shapes = [
        {entry["kind"]: list(entry) for entry in entries(where) if entry["kind"] != "evaluation"}
        for where in (tmp_path, folder)
    ]
    assert shapes[0] == shapes[1]
    written, fixture = (json.loads((where / "ledger.json").read_text()) for where in (tmp_path, folder))
    assert list(written) == list(fixture)
    assert list(written["entries"][0]) == list(fixture["entries"][0])


def test_an_incomplete_line_is_removed_before_others_follow(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(Event(1, "fault", "first"))
    writer.close()
    with path.open("a") as file:
        file.write('{"kind": "st')
    writer = MetricsWriter(path)
    writer.write(Event(2, "fault", "second"))
    writer.close()
    assert [entry["text"] for entry in entries(tmp_path)] == ["first", "second"]


def test_the_ledger_changes_no_bit_of_the_training() -> None:
    plain = tiny_model().train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for _ in range(3):
        plain(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    watched = train(Ledger())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert bits(plain).keys() == bits(watched).keys()
