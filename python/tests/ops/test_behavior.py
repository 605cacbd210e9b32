"""Operations in use: compiled, checkpointed, with non-contiguous and empty inputs, used twice, on threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ballast
from ballast import ops, testing
from ballast._native import ops as native
from ballast.errors import UsageError

CASES: list[tuple[str, dict[str, Any]]] = [
    ("chunk_gated_delta_rule", dict(batch=2, tokens=40, value_heads=4, initial_state=True)),
    ("chunk_gated_delta_rule", dict(lengths=[30, 0, 12])),
    ("causal_conv1d_fn", dict(batch=2, tokens=40)),
    ("causal_conv1d_fn", dict(lengths=[30, 0, 12], initial_states=True)),
    ("gated_rms_norm", dict()),
    ("attention", dict(batch=2, sinks=True)),
    ("indexer_loss", dict(lengths=[20, 30], topk=5)),
    ("linear_cross_entropy", dict()),
]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert torch.equal(x, b[name]), name


@pytest.mark.parametrize(("operation", "shape"), CASES, ids=lambda x: str(x))
def test_compiled_without_a_graph_break_the_bits_are_the_same(operation: str, shape: dict[str, Any]) -> None:
    torch.compiler.reset()
    case, kernel = testing.golden(operation, **shape), getattr(ops, operation)
    compiled = torch.compile(lambda **given: kernel(**given), fullgraph=True, backend="aot_eager")
    equal(case.results(compiled), case.results(kernel))


def test_inductor_compiles_a_layer_around_the_rule_for_any_number_of_tokens() -> None:
    torch.compiler.reset()

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ weight).unflatten(-1, (3, 2, 8)).unbind(2)
        g, beta = -x[..., :2].abs(), x[..., :2].sigmoid()
        return ops.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0].square().sum()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    weight = testing.values([16, 48]).float().requires_grad_()
    for tokens in (70, 33):
        x = testing.values([2, tokens, 16]).float().requires_grad_()
        for a, b in zip(
            torch.autograd.grad(compiled(x, weight), (x, weight)),
            torch.autograd.grad(layer(x, weight), (x, weight)),
            strict=True,
        ):
            testing.assert_close(a, b, rms=1e-5)


@pytest.mark.parametrize(("operation", "shape"), CASES, ids=lambda x: str(x))
def test_activation_checkpointing_gives_the_same_bits(operation: str, shape: dict[str, Any]) -> None:
    case, kernel = testing.golden(operation, **shape), getattr(ops, operation)
    plain = case.results(kernel)
    equal(case.results(lambda **given: checkpoint(kernel, use_reentrant=False, **given)), plain)


@pytest.mark.parametrize(("operation", "shape"), CASES, ids=lambda x: str(x))
def test_non_contiguous_inputs_give_the_same_bits(operation: str, shape: dict[str, Any]) -> None:
    case, kernel = testing.golden(operation, **shape), getattr(ops, operation)
    scattered = {
        name: torch.stack([x.detach(), x.detach()], dim=-1)[..., 0].requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor)
        else x
        for name, x in case.arguments.items()
    }
    assert not any(
        x.is_contiguous() for x in scattered.values() if isinstance(x, torch.Tensor) and x.numel() > 1
    )
    equal(
        testing.Golden(operation, scattered, case.reference, case.outputs).results(kernel),
        case.results(kernel),
    )


@pytest.mark.parametrize(("operation", "shape"), CASES, ids=lambda x: str(x))
def test_values_saved_for_backward_are_tensors_that_hooks_see(operation: str, shape: dict[str, Any]) -> None:
    case, kernel = testing.golden(operation, **shape), getattr(ops, operation)
    plain, seen = case.results(kernel), []

    def pack(x: torch.Tensor) -> int:
        seen.append(x.clone())
        return len(seen) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, seen.__getitem__):
        hooked = case.results(kernel)
    assert seen
    equal(hooked, plain)


def test_a_tensor_used_twice_gets_the_sum_and_a_second_backward_the_same() -> None:
    case = testing.golden("chunk_gated_delta_rule", tokens=50)
    x, given = (
        case.arguments["q"],
        {n: x.detach() for n, x in case.arguments.items() if n in ("v", "g", "beta")},
    )

    def both(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        first, _ = ops.chunk_gated_delta_rule(q, k, **given)
        return (first + ops.chunk_gated_delta_rule(k, q, **given)[0]).square().sum()

    q, k = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    apart = torch.autograd.grad(both(q, k), (q, k))
    loss = both(x, x)
    once = torch.autograd.grad(loss, x, retain_graph=True)[0]
    testing.assert_close(once, apart[0] + apart[1], rms=1e-6)
    assert torch.equal(torch.autograd.grad(loss, x)[0], once)


def test_a_second_derivative_is_refused() -> None:
    case = testing.golden("chunk_gated_delta_rule", tokens=5)
    o, _ = ops.chunk_gated_delta_rule(**case.arguments)
    (dq,) = torch.autograd.grad(o.sum(), case.arguments["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="gated_delta_rule_backward"):
        dq.sum().backward()


def test_a_frozen_input_gets_no_gradient() -> None:
    case = testing.golden("chunk_gated_delta_rule", tokens=20)
    arguments = {**case.arguments, "g": case.arguments["g"].detach()}
    frozen = testing.Golden("chunk_gated_delta_rule", arguments, case.reference, case.outputs)
    results = frozen.results(ops.chunk_gated_delta_rule)
    assert "dg" not in results and torch.equal(results["dq"], case.results(ops.chunk_gated_delta_rule)["dq"])


def test_sequences_without_tokens_are_allowed() -> None:
    q, g = torch.ones(2, 0, 1, 4, requires_grad=True), torch.zeros(2, 0, 1)
    state = testing.values([2, 1, 4, 4]).float().requires_grad_()
    o, final = ops.chunk_gated_delta_rule(q, q, q, g, g, initial_state=state, output_final_state=True)
    assert o.shape == (2, 0, 1, 4) and torch.equal(final, state)
    final.sum().backward()
    assert torch.equal(state.grad, torch.ones_like(state)) and q.grad.shape == q.shape
    assert ops.causal_conv1d_fn(torch.ones(2, 3, 0), torch.ones(3, 4), activation="silu").shape == (2, 3, 0)
    assert ops.attention(q, q, q).shape == (2, 0, 1, 4)
    assert ops.gated_rms_norm(q, q, torch.ones(4)).shape == q.shape
    assert ops.linear_cross_entropy(torch.ones(0, 4), torch.ones(5, 4), torch.ones(0, dtype=torch.int64)) == 0
    nothing = ops.fused_recurrent_gated_delta_rule(q.detach(), q.detach(), q.detach(), g, beta=g)
    assert nothing[0].shape == q.shape and nothing[1] is None


def test_without_gradients_nothing_is_saved() -> None:
    case = testing.golden("chunk_gated_delta_rule", tokens=40, output_final_state=False)
    with torch.no_grad():
        o, state = ops.chunk_gated_delta_rule(**case.arguments)
        assert state is None and not o.requires_grad
        sizes = [
            x.numel()
            for x in torch.ops.ballast.gated_delta_rule(
                *(case.arguments[n].detach() for n in "qkv"),
                case.arguments["g"],
                case.arguments["beta"],
                None,
                None,
                1.0,
                True,
                32,
                False,
                False,
            )
        ]
    assert sizes == [o.numel(), 0, 0, 0, 0]


def test_autocast_leaves_the_f32_inputs_alone() -> None:
    case = testing.golden("chunk_gated_delta_rule", tokens=40, dtype=torch.bfloat16)
    plain = ops.chunk_gated_delta_rule(**case.arguments)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.chunk_gated_delta_rule(**case.arguments)[0], plain)


def test_tensors_on_a_gpu_are_refused_with_the_name_of_the_alternative() -> None:
    class OnCuda(torch.Tensor):
        device = torch.device("cuda", 0)

    x = torch.ones(1, 1, 1, 1).as_subclass(OnCuda)
    with pytest.raises(UsageError, match=r"q is on cuda:0; use flash-linear-attention"):
        ops.chunk_gated_delta_rule(x, x, x, x[..., 0], x[..., 0])
    with pytest.raises(UsageError, match="flash-linear-attention"):
        ops.causal_conv1d_fn(x[0], torch.ones(1, 2), activation="silu")


def test_dtypes_other_than_f32_and_bf16_are_refused() -> None:
    x = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"takes torch\.float32 and torch\.bfloat16, got torch\.float64"):
        ops.attention(x, x, x)


def test_offsets_that_do_not_fit_are_refused() -> None:
    q, g = torch.ones(1, 4, 1, 2), torch.zeros(1, 4, 1)
    for offsets, message in [
        ([0, 3], "must end with the number of tokens, 4, got 3"),
        ([1, 4], "must start with 0"),
        ([0, 3, 2, 4], "must not decrease"),
        ([0, -1, 4], "must not be negative"),
    ]:
        with pytest.raises(UsageError, match=message):
            ops.chunk_gated_delta_rule(q, q, q, g, g, cu_seqlens=torch.tensor(offsets))


# Tensors become slices in Rust: what is checked before that.


def forward(o: torch.Tensor, x: torch.Tensor, z: torch.Tensor) -> None:
    native.gated_rms_norm_forward(o, torch.empty(2), x, z, torch.ones(4), 1e-6, 1)


def test_a_slice_is_made_of_a_contiguous_cpu_tensor_of_the_right_type_only() -> None:
    x = testing.values([2, 4]).float()
    o = torch.empty(2, 4)
    forward(o, x, x)
    testing.assert_close(o, testing.gated_rms_norm_reference(x, x, torch.ones(4)), rms=1e-6)
    with pytest.raises(UsageError, match="z must be contiguous"):
        forward(o, x, testing.values([4, 2]).float().T)
    with pytest.raises(UsageError, match=r"z must be torch\.float32, got torch\.float64"):
        forward(o, x, x.double())
    with pytest.raises(UsageError, match="z must be on the CPU, got meta"):
        forward(o, x, x.to("meta"))
    with pytest.raises(UsageError, match="z must have 8 elements, got 4"):
        forward(o, x, x[:1])
    with pytest.raises(UsageError, match="x must be torch.float32 or torch.bfloat16, got torch.int64"):
        forward(o, x.long(), x)
    with pytest.raises(AttributeError):
        native.gated_rms_norm_forward(o, 7, x, x, torch.ones(4), 1e-6, 1)


def test_an_output_shares_no_memory_with_another_argument() -> None:
    x = testing.values([4, 4]).float()
    for output in (x[:2], x[1:3]):
        with pytest.raises(UsageError, match="shares memory with another argument"):
            forward(output, x[:2], x[:2].clone())
    # Neighbors do not overlap, and inputs may.
    forward(x[2:], x[:2], x[:2])


def test_states_of_the_wrong_size_are_refused_before_they_are_read() -> None:
    case = testing.golden("chunk_gated_delta_rule", tokens=300)
    q, k, v, g, beta = (case.arguments[name].detach() for name in ("q", "k", "v", "g", "beta"))
    rstd = torch.empty(1, 300, 2)
    with pytest.raises(UsageError, match="states must have 3 states"):
        native.gated_delta_rule_forward(
            torch.empty_like(v),
            torch.empty(0),
            rstd,
            rstd.clone(),
            torch.empty(2, 2, 16, 16),
            q,
            k,
            v,
            g,
            beta,
            None,
            None,
            1.0,
            True,
            32,
            1,
        )
    with pytest.raises(UsageError, match="state must have 512 elements, got 1024"):
        native.gated_delta_rule_steps(
            torch.empty_like(v), torch.empty(2, 2, 16, 16), q, k, v, g, beta, None, 1.0, True, 1
        )


# Threads


def test_any_number_of_threads_gives_the_same_bits() -> None:
    before = torch.get_num_threads()
    case = testing.golden("chunk_gated_delta_rule", batch=2, tokens=90, value_heads=4)
    try:
        results = []
        for count in (1, 2, 3):
            ballast.set_num_threads(count)
            assert (ballast.get_num_threads(), torch.get_num_threads()) == (count, count)
            results.append(case.results(ops.chunk_gated_delta_rule))
        torch.set_num_threads(2)
        assert ballast.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    equal(results[0], results[1])
    equal(results[0], results[2])
    with pytest.raises(UsageError, match="must be 1 or more, got 0"):
        ballast.set_num_threads(0)


def test_a_number_of_threads_set_before_torch_is_imported_holds_for_both() -> None:
    code = (
        "import sys, ballast; ballast.set_num_threads(3); assert 'torch' not in sys.modules;"
        "assert ballast.get_num_threads() == 3;"
        "import ballast.ops, torch; assert torch.get_num_threads() == 3"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_kernels_start_as_many_threads_as_torch_has() -> None:
    code = """
import os, torch
from ballast import ops, testing
torch.set_num_threads(2)
case = testing.golden("chunk_gated_delta_rule", tokens=64)
for _ in range(5):
    case.results(ops.chunk_gated_delta_rule)
names = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
print(sum(name.startswith("ballast-") for name in names))
torch.set_num_threads(1)
case.results(ops.chunk_gated_delta_rule)
import time; time.sleep(0.5)
names = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
print(sum(name.startswith("ballast-") for name in names))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=300, capture_output=True, text=True
    )
    assert done.stdout.split() == ["2", "1"]


def test_python_runs_while_a_kernel_does() -> None:
    case = testing.golden("chunk_gated_delta_rule", tokens=30000, key_dim=64, value_dim=64)
    given = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in case.arguments.items()}
    ticks, done = [0], threading.Event()

    def work() -> None:
        ops.chunk_gated_delta_rule(**given)
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    while not done.is_set():
        ticks[0] += 1
        time.sleep(0.0005)
    worker.join()
    assert ticks[0] > 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_gets_threads_of_its_own() -> None:
    code = """
import os, warnings, torch
from ballast import ops, testing
warnings.simplefilter("ignore")
case = testing.golden("gated_rms_norm", rows=500)
x = {name: t.detach() for name, t in case.arguments.items()}
expected = ops.gated_rms_norm(**x)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(ops.gated_rms_norm(**x), expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_without_keys_is_refused(window: int) -> None:
    q = torch.ones(1, 4, 1, 2)
    with pytest.raises(UsageError, match=f"window must be 1 or more, got {window}"):
        ops.attention(q, q, q, window=window)


@pytest.mark.parametrize("key", [4, -2, 2**31, 2**32, -(2**32)])
def test_a_selected_key_outside_of_the_sequence_is_refused(key: int) -> None:
    q = torch.ones(1, 8, 1, 2)
    selected = torch.zeros(1, 8, 1, dtype=torch.int64)
    selected[0, 5] = key
    with pytest.raises(UsageError, match="for token 5, but positions in its sequence are 0 to 3"):
        ops.attention(q, q, q, selected=selected, cu_seqlens=torch.tensor([0, 4, 8]))
    with pytest.raises(UsageError, match="selected must be torch.int32 or torch.int64, got torch.float32"):
        ops.attention(q, q, q, selected=selected.float())
