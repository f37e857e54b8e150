"""Gradients of several micro-batches: those of one process, and nothing sent until the last."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from beside import DIM, Mlp, check_grads, mean, mine, numbers, rows, wrapped
from graphs import Captured, capture, reduces
from parity import POLICIES, mesh_for
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import Graph
from zoo import Small, Zoo, batch, loss_of

from inductor_passes.adapters.in_place import write_inputs_early
from inductor_passes.machine.simulate import live_by_use, memory
from simplefsdp import clip_grad_norm_, microbatch, simple_fsdp
from simplefsdp.compiler.observers import observing
from simplefsdp.frontend import accumulation
from simplefsdp.rank_guard import RankMismatchError

MICRO = 3


def run_of(model: nn.Module, executor: str, bucketing: str = "manual"):
    torch._dynamo.reset()
    if executor == "eager":
        return model
    options = {"executor": executor, "bucketing": bucketing}
    options |= {"cluster": "h100"} if bucketing == "auto" else {}
    return torch.compile(model, backend="simplefsdp", options=options, fullgraph=True)


def accumulate(plain, model, run, step: int, *, micro: int = MICRO, graphs: Captured | None = None):
    """Both through the micro-batches of one step, and compare."""
    for number in range(micro):
        tokens, targets = batch(step * micro + number, dist.get_world_size())
        (loss_of(plain, tokens, targets) / micro).backward()
        with microbatch(model, is_last=number == micro - 1):
            (loss_of(run, mine(tokens), mine(targets)) / micro).backward()
        if number < micro - 1:
            assert all(param.grad is None for param in model.parameters())


def train_beside(mode, executor, bucketing, precision="fp32", build=Zoo, tolerance=1e-5, **kind):
    torch.manual_seed(1)
    plain = build(mixed=False, **kind)
    model = simple_fsdp(
        copy.deepcopy(plain), mesh_for(mode), mode=mode, mp_policy=POLICIES[precision]
    )
    run = run_of(model, executor, bucketing)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (plain, model)]
    with capture() as graphs:
        for step in range(2):
            accumulate(plain, model, run, step)
            check_grads(plain, model, tolerance=tolerance)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    if executor != "eager":  # two graphs, in however many steps; only the last one's reduces
        assert [bool(reduces(graph)) for graph in graphs.backward] == [False, True]


@pytest.mark.slow(quick=["fully_shard-eager-none-fp32-Zoo", "replicate-eager-none-fp32-Zoo"])
@pytest.mark.parametrize(
    ("mode", "executor", "bucketing", "precision", "build"),
    [
        ("fully_shard", "eager", "none", "fp32", Zoo),
        ("fully_shard", "aot_eager", "auto", "fp32", Small),
        ("fully_shard", "aot_eager", "none", "bf16", Small),
        ("replicate", "aot_eager", "manual", "fp32", Small),
        ("replicate", "eager", "none", "fp32", Zoo),
    ],
)
def test_gradients_are_those_of_one_process(pools, mode, executor, bucketing, precision, build):
    tolerance = 1e-5 if precision == "fp32" else 3e-2
    pools(2).run(train_beside, mode, executor, bucketing, precision, build, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["inductor", "regions"])
def test_compiled_by_inductor(pools, executor):
    pools(2).run(train_beside, "fully_shard", executor, "auto", "fp32", Small)


@pytest.mark.slow
def test_gradients_of_a_hybrid_mesh(pools):
    pools(4).run(train_beside, "hybrid_shard", "aot_eager", "manual", "fp32", Small)


def checkpointed():
    train_beside("fully_shard", "aot_eager", "manual", recompute=True)
    train_beside("fully_shard", "eager", "none", recompute=True)


@pytest.mark.slow
def test_checkpointed_regions(pools):
    pools(2).run(checkpointed)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def tensor_parallel(executor):
    torch.manual_seed(0)
    plain = Pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(
        copy.deepcopy(plain), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    model = simple_fsdp(model, mesh["dp"])
    run = run_of(model, executor)
    for step in range(2):
        plain.zero_grad()
        model.zero_grad()
        for number in range(MICRO):
            x = numbers(4, 8, seed=step * MICRO + number)
            mean(plain(x)).backward()
            with microbatch(model, is_last=number == MICRO - 1):
                own = x.tensor_split(2)[mesh["dp"].get_local_rank()]
                mean(run(own)).backward()
        check_grads(plain, model)


@pytest.mark.slow(quick=["eager"])
@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_tensor_parallel_parameters(pools, executor):
    pools(4).run(tensor_parallel, executor)


def sent_per_microbatch(mode, until):
    """Collectives that reduce, of each of three micro-batches, without the compiler."""
    plain = nn.Sequential(Mlp(), Mlp())
    model = wrapped(plain, mode)
    sent = []
    for number in range(MICRO):
        if until == "shards":
            model.set_requires_all_reduce(number == MICRO - 1)
        else:
            model.set_requires_gradient_sync(number == MICRO - 1)
        with CommDebugMode() as comm:
            mean(model(*mine(rows(number)))).backward()
        counts: Counter[str] = Counter()
        for op, n in comm.get_comm_counts().items():
            counts[str(op).rpartition(".")[2]] += n
        sent.append([counts["reduce_scatter_tensor"], counts["all_reduce"]])
        mean(plain(*rows(number))).backward()
    check_grads(plain, model)
    return sent


def test_nothing_is_reduced_until_the_last(pools):
    assert pools(2).run(sent_per_microbatch, "fully_shard", "none")[0] == [[0, 0], [0, 0], [8, 0]]


def test_a_hybrid_mesh_may_defer_the_all_reduce_alone(pools):
    assert pools(4).run(sent_per_microbatch, "hybrid_shard", "shards")[0] == [
        [8, 0],
        [8, 0],
        [8, 8],
    ]
    assert pools(4).run(sent_per_microbatch, "hybrid_shard", "none")[0] == [[0, 0], [0, 0], [8, 8]]


class Rivals(nn.Module):
    """Of which one is trained while the other is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.makes, self.judges = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def forward(self, x):
        return self.judges(torch.tanh(self.makes(x)))


def in_turns(executor):
    """Each is frozen when the other's micro-batch ends."""
    torch.manual_seed(0)
    plain = Rivals()
    model = simple_fsdp(copy.deepcopy(plain))
    run = run_of(model, executor)
    for step in range(2):
        for number in range(MICRO):
            x = numbers(4, DIM, seed=step * MICRO + number)
            for name, other, sign in (("makes", "judges", 1), ("judges", "makes", -1)):
                for m in (plain, model):
                    m.get_submodule(name).requires_grad_(True)
                    m.get_submodule(other).requires_grad_(False)
                (sign * plain(x).square().mean()).backward()
                with microbatch(model, is_last=number == MICRO - 1):
                    (sign * run(mine(x)).square().mean()).backward()
        check_grads(plain, model)
        for m in (plain, model):
            m.zero_grad()


@pytest.mark.slow(quick=["eager"])
@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_what_is_frozen_in_turns(pools, executor):
    pools(2).run(in_turns, executor)


def both_deferred(executor):
    """Neither is sent in the first, only the all-reduce is missing in the second."""
    plain = nn.Sequential(Mlp(), Mlp())
    model = wrapped(plain, "hybrid_shard")
    run = run_of(model, executor)
    for step in range(2):
        for number, (gradients, copies) in enumerate([(False, True), (True, False), (True, True)]):
            model.set_requires_gradient_sync(gradients)
            model.set_requires_all_reduce(copies)
            mean(run(*mine(rows(step + number)))).backward()
            mean(plain(*rows(step + number))).backward()
        check_grads(plain, model)  # which add up over both steps


@pytest.mark.slow(quick=["eager"])
@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_what_is_deferred_is_taken_as_far_as_the_next_backward_goes(pools, executor):
    pools(4).run(both_deferred, executor)


def in_flight(executor):
    plain = nn.Sequential(Mlp(), Mlp())
    model = wrapped(plain)
    run = run_of(model, executor)
    batches = [rows(number) for number in range(5)]
    with model.no_sync():
        losses = [mean(run(*mine(x))) for x in batches[:2]]
        sum(losses).backward()  # both graphs in one backward
        mean(run(*mine(batches[4])))  # no backward: it loses nothing
        first, second = (mean(run(*mine(x))) for x in batches[2:4])
        second.backward()
    with torch.no_grad():
        run(*mine(batches[0]))
    first.backward()  # deferred, though that is over: so it was when its forward ran
    mean(run(*mine(batches[4]))).backward()
    for x in batches:
        mean(plain(*x)).backward()
    check_grads(plain, model)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_forwards_and_backwards_in_any_order(pools, executor):
    pools(2).run(in_flight, executor)


def set_too_late():
    """Between forward and backward, the habit that FSDP2 allows."""
    plain = nn.Sequential(Mlp(), Mlp())
    model = wrapped(plain)
    run = run_of(model, "aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(MICRO):
        loss = mean(run(*mine(rows(number))))
        model.set_requires_gradient_sync(number == MICRO - 1)
        loss.backward()
        mean(plain(*rows(number))).backward()
    message = "wait to be reduced over ranks.*before the forward of the last micro-batch"
    with pytest.raises(ValueError, match=rf"^SGD: gradients of 0\.row {message}"):
        optimizer.step()
    with pytest.raises(ValueError, match=f"^clip_grad_norm_: .*{message}"):
        clip_grad_norm_(model, 1.0)
    model.finalize_backward()
    check_grads(plain, model)
    optimizer.step()
    model.finalize_backward()  # nothing is left
    check_grads(plain, model)


def test_a_step_that_would_miss_gradients_is_refused(pools):
    pools(2).run(set_too_late)


def finalized_hybrid():
    plain = nn.Sequential(Mlp(), Mlp())
    model = wrapped(plain, "hybrid_shard")
    for number, (gradients, copies) in enumerate([(True, False), (False, True), (True, False)]):
        model.set_requires_gradient_sync(gradients)
        model.set_requires_all_reduce(copies)
        mean(model(*mine(rows(number)))).backward()
        mean(plain(*rows(number))).backward()
    assert model.finalize_backward(async_op=True).wait() is None
    check_grads(plain, model)


def test_what_is_left_of_a_hybrid_mesh_is_reduced(pools):
    pools(4).run(finalized_hybrid)


def dropped():
    plain = nn.Sequential(Mlp(), Mlp())
    model = wrapped(plain)
    with microbatch(model, is_last=False):
        mean(model(*mine(rows(0)))).backward()
    model.zero_grad()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with microbatch(model, is_last=False):
        mean(model(*mine(rows(1)))).backward()
    mean(model(*mine(rows(2)))).backward()
    for number in (1, 2):
        mean(plain(*rows(number))).backward()
    check_grads(plain, model)


def test_zero_grad_drops_what_waits(pools):
    pools(2).run(dropped)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        with torch.no_grad():  # the first read of these parameters wants no gradient
            target = self.mlp(x)
        return self.mlp(x) - 2 * target


def read_under_no_grad():
    plain = Frozen()
    model = wrapped(plain)
    run = run_of(model, "aot_eager")
    for number in range(MICRO):
        with microbatch(model, is_last=number == MICRO - 1):
            mean(run(*mine(rows(number)))).backward()
        mean(plain(*rows(number))).backward()
    check_grads(plain, model)


def test_a_parameter_that_is_also_read_under_no_grad(pools):
    pools(2).run(read_under_no_grad)


def one_rank_defers():
    model = wrapped(nn.Sequential(Mlp(5)))  # that no test before has compiled
    run = run_of(model, "aot_eager")
    model.set_requires_gradient_sync(dist.get_rank() == 0)
    with pytest.raises(RankMismatchError, match="gradient until none"):
        run(torch.ones(2, 5))


def test_ranks_that_differ_are_told(pools):
    pools(2).run(one_rank_defers)


def test_sums_are_written_early_and_stay(fake_mesh):
    """Or the gradients of all layers would be alive at once; and sums are not freed."""
    model = simple_fsdp(nn.Sequential(*(Mlp(64) for _ in range(4))), fake_mesh(4))
    run = run_of(model, "aot_eager")
    found = []
    with observing(found.append), microbatch(model, is_last=False):
        run(torch.zeros(4, 64)).sum().backward()
    (backward,) = (graph for graph in found if graph.part == "backward")
    program = backward.rehearsal.reading.program
    writes = [op for op in program.ops if op.name.startswith("copy_")]
    places = [program.index[op.name] for op in writes]
    assert len(writes) == 16
    assert max(places) - min(places) > len(program.ops) / 2
    sums = [op.reads[0] for op in writes]
    assert set(sums) <= set(program.outputs)
    nbytes = sum(program.buffers[name].nbytes for name in sums)
    assert min(memory(backward.rehearsal.after).live_nbytes) >= nbytes
    assert live_by_use(program)["full gradients"] >= nbytes


def test_a_write_stays_behind_other_reads():
    graph = Graph()
    aten = torch.ops.aten
    total, grad = graph.placeholder("total"), graph.placeholder("grad")
    new = graph.call_function(aten.add.Tensor, (total, grad))
    other = graph.call_function(aten.mul.Tensor, (grad, grad))
    view = graph.call_function(aten.t.default, (total,))
    late = graph.call_function(aten.mul.Tensor, (view, other))
    last = graph.call_function(aten.neg.default, (late,))
    write = graph.call_function(aten.copy_.default, (total, new))
    graph.output(last)
    write_inputs_early(graph, lambda value: value is not new)
    assert write.prev is last  # not ours
    write_inputs_early(graph, lambda value: value is new)
    assert write.prev is late
    graph.lint()


def test_a_write_stays_behind_what_is_sent():
    graph = Graph()
    shard, new = graph.placeholder("shard"), graph.placeholder("new")
    functional = torch.ops._c10d_functional
    sent = graph.call_function(functional.all_gather_into_tensor.default, (shard, 2, "0"))
    wait = graph.call_function(functional.wait_tensor.default, (sent,))
    last = graph.call_function(torch.ops.aten.neg.default, (wait,))
    write = graph.call_function(torch.ops.aten.copy_.default, (shard, new))
    graph.output(last)
    write_inputs_early(graph, lambda value: True)
    assert write.prev is wait


def test_bad_arguments_are_named(fake_mesh):
    mesh = fake_mesh(2)
    model = simple_fsdp(nn.Sequential(Mlp()), mesh)
    with pytest.raises(TypeError, match="requires_gradient_sync: expected a bool, got int"):
        model.set_requires_gradient_sync(1)
    message = "model: expected a module wrapped by simple_fsdp, .* got Linear"
    with pytest.raises(ValueError, match=message), microbatch(nn.Linear(2, 2), is_last=False):
        pass
    with torch.device("meta"):
        model = nn.Sequential(Mlp())
    simple_fsdp(model, mesh)
    with pytest.raises(ValueError, match=r"0\.row: is on the meta device.*init_weights"):
        model.set_requires_gradient_sync(False)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_who_says_so_after_forward_is_told(solo_mesh, caplog, executor):
    """FSDP2 takes its backward for the last one then."""
    accumulation._warn_of_late_sync.cache_clear()
    model = simple_fsdp(nn.Sequential(Mlp()), solo_mesh)
    run = run_of(model, executor)
    model.set_requires_gradient_sync(False)
    mean(run(numbers(2, DIM))).backward()
    loss = mean(run(numbers(2, DIM)))
    assert "its forward had begun before" not in caplog.text
    model.set_requires_gradient_sync(True)
    loss.backward()
    assert "its forward had begun before" in caplog.text and model[0].row.grad is None
    mean(run(numbers(2, DIM))).backward()
    assert model[0].row.grad is not None


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_hooks_run_where_gradients_are_reduced(solo_mesh, executor):
    """As under FSDP2: a hook that logs the norm of `.grad`, or steps, is not called without one."""
    model = simple_fsdp(nn.Sequential(Mlp()), solo_mesh)
    run = run_of(model, executor)
    param, seen = model[0].row, []
    handle = param.register_hook(lambda grad: seen.append(grad.norm().full_tensor()))
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().full_tensor()))
    for last in (False, False, True):
        model.set_requires_gradient_sync(last)
        mean(run(numbers(2, DIM))).backward()
        assert len(seen) == (2 if last else 0)
    assert torch.equal(*seen) and seen[0] > 0
    handle.remove()
    mean(run(numbers(2, DIM))).backward()
    assert len(seen) == 3


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_hooks_that_come_between_micro_batches(solo_mesh, executor):
    model = simple_fsdp(nn.Sequential(Mlp()), solo_mesh)
    run, seen = run_of(model, executor), []
    model.set_requires_gradient_sync(False)
    mean(run(numbers(2, DIM))).backward()
    model[0].row.register_hook(lambda grad: seen.append(grad.norm()))
    mean(run(numbers(2, DIM))).backward()
    assert not seen
    model.set_requires_gradient_sync(True)
    mean(run(numbers(2, DIM))).backward()
    assert len(seen) == 1


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_hooks_that_come_after_the_forward(solo_mesh, executor):
    model = simple_fsdp(nn.Sequential(Mlp()), solo_mesh)
    run, seen = run_of(model, executor), []
    for last in (False, False, True):
        model.set_requires_gradient_sync(last)
        loss = mean(run(numbers(2, DIM)))
        model[0].row.register_hook(lambda grad: seen.append(grad.norm()))
        model[0].row.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
        loss.backward()
        assert len(seen) == (6 if last else 0)


def test_a_forward_that_has_no_backward_leaves_nothing(solo_mesh):
    model = simple_fsdp(nn.Linear(DIM, DIM), solo_mesh)
    run, x = run_of(model, "aot_eager"), torch.ones(2, DIM, requires_grad=True)
    model.set_requires_gradient_sync(False)
    run(x)  # compiles, which leaves cycles
    x, gone = torch.ones(2, DIM, requires_grad=True), weakref.ref(x)
    gc.collect()
    gc.disable()
    try:
        output, gone = run(x), weakref.ref(x)
        assert output.grad_fn is not None
        del x, output
        assert gone() is None
    finally:
        gc.enable()


def by_another_backend() -> None:
    """Of torch's: it reduces in each backward, and nothing waits."""
    plain = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
    model, other = wrapped(plain), wrapped(nn.Sequential(*map(copy.deepcopy, plain)))
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        with microbatch(model, is_last=False):
            mean(run(*mine(rows(number)))).backward()
        mean(plain(*rows(number))).backward()
        check_grads(plain, model)
    model.finalize_backward()
    check_grads(plain, model)
    with microbatch(model, is_last=False):
        weights = dict(other.named_parameters())
        mean(torch.func.functional_call(run, weights, mine(rows(2)))).backward()
    check_grads(plain, model)
    assert all(param.grad is not None for param in other.parameters())
    optimizer.step()
    optimizer.zero_grad()

    model.unshard()  # which this code does not read
    with torch.no_grad():
        before = run(*rows(3))
        for param in model.parameters():
            param.mul_(2)
        after = run(*rows(3))
        assert not torch.equal(before, after) and torch.equal(after, model(*rows(3)))


def test_what_another_backend_compiles(pools):
    pools(2).run(by_another_backend)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_a_parameter_without_rows_accumulates(solo_mesh, executor):
    class Empty(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, DIM))

        def forward(self, x):
            return super().forward(x) + self.none.sum()

    model = simple_fsdp(nn.Sequential(Empty()), solo_mesh)
    run = run_of(model, executor)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        mean(run(numbers(2, DIM))).backward()
    assert model[0].none.grad.shape == (0, DIM) and model[0].row.grad is not None


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_a_move_between_forward_and_backward_is_named(solo_mesh, executor):
    model = simple_fsdp(nn.Sequential(Mlp()), solo_mesh)
    run = run_of(model, executor)
    model.set_requires_gradient_sync(False)
    loss = mean(run(numbers(2, DIM)))
    model.to(torch.float64)
    with pytest.raises((ValueError, RuntimeError), match=r"moved \(model.to\(\)\)|swap"):
        loss.backward()


def test_a_part_may_defer_alone(fake_mesh):
    model = simple_fsdp(nn.Sequential(Mlp(), Mlp()), fake_mesh(2))
    model[0].set_requires_gradient_sync(False)
    model(torch.ones(2, DIM)).sum().backward()
    assert all(p.grad is None for p in model[0].parameters())
    assert all(isinstance(p.grad, DTensor) for p in model[1].parameters())
    model[0].set_requires_gradient_sync(True, recurse=False)  # of `row` alone
    model[0].zero_grad()
    model(torch.ones(2, DIM)).sum().backward()
    assert model[0].row.grad is not None
    assert model[0].up.weight.grad is None


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_a_copy_has_sums_of_its_own(solo_mesh, executor):
    plain = nn.Sequential(Mlp())
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    with model.no_sync():
        mean(run_of(model, executor)(*rows(0))).backward()
        other = copy.deepcopy(model)
        mean(run_of(other, executor)(*rows(1))).backward()
    with pytest.raises(ValueError, match="wait to be reduced"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    other.finalize_backward()
    mean(plain(*rows(1))).backward()
    check_grads(plain, other)


def after_forward(model):
    model.zero_grad()


def evaluation(model):
    with torch.no_grad():
        model(*rows(3))


def forward_without_backward(model):
    model(*rows(3))


def other_parameters(model):
    model.load_state_dict(model.state_dict(), assign=True)


def moved(model):
    model.to("cpu")


def there_and_back(model):
    model.double().float()


def loaded_by_swap(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(model.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


BETWEEN = [
    evaluation,
    forward_without_backward,
    other_parameters,
    moved,
    there_and_back,
    loaded_by_swap,
]


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
@pytest.mark.parametrize("between", BETWEEN)
def test_what_waits_is_known_whatever_comes_between(solo_mesh, executor, between):
    plain = nn.Sequential(Mlp())
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    run = run_of(model, executor)
    with model.no_sync():
        mean(run(*rows(0))).backward()
    between(run)
    with pytest.raises(ValueError, match="wait to be reduced"):
        clip_grad_norm_(model, 1.0)
    model.finalize_backward()
    mean(plain(*rows(0))).backward()
    check_grads(plain, model)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
@pytest.mark.parametrize("change", [moved, there_and_back])
def test_the_last_backward_takes_along_what_moved(solo_mesh, executor, change):
    plain = nn.Sequential(Mlp())
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    run = run_of(model, executor)
    model.set_requires_gradient_sync(False)
    change(model)  # before the first forward, too
    mean(run(*rows(0))).backward()
    change(model)
    model.set_requires_gradient_sync(True)
    mean(run(*rows(1))).backward()
    for number in range(2):
        mean(plain(*rows(number))).backward()
    check_grads(plain, model)


class Sometimes(nn.Module):
    """A layer that is dropped, but read: no gradient comes of it."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM)

    def forward(self, x, drop):
        x = x.to(self.layer.weight.dtype)
        return self.head(x if drop else self.layer(x))


@pytest.mark.slow(quick=["eager", "aot_eager"])
@pytest.mark.parametrize("executor", ["eager", "aot_eager", "inductor"])
def test_what_the_last_backward_has_no_gradient_of_still_waits(solo_mesh, executor):
    plain = Sometimes()
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    run = run_of(model, executor)
    for number, drop in enumerate((False, True)):
        with microbatch(model, is_last=drop):
            mean(run(*rows(number), drop)).backward()
        mean(plain(*rows(number), drop)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="wait to be reduced"):
        optimizer.step()
    model.finalize_backward()
    check_grads(plain, model)
    optimizer.step()
    optimizer.zero_grad()
    for number in range(2):  # dropped throughout: there is nothing to miss
        with microbatch(model, is_last=number == 1):
            mean(run(*rows(number), True)).backward()
    optimizer.step()


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_zero_grad_between_forward_and_backward(solo_mesh, executor):
    plain = nn.Sequential(Mlp())
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    run = run_of(model, executor)
    for number in range(2 * MICRO):
        first, last = number % MICRO == 0, number % MICRO == MICRO - 1
        for m, call in ((plain, plain), (model, run)):
            with microbatch(model, is_last=last):
                loss = mean(call(*rows(number)))
                if first:
                    m.zero_grad()
                loss.backward()
    check_grads(plain, model)


def test_gradients_of_inputs_are_not_those_of_parameters(solo_mesh):
    """A compiled backward would add up both."""
    plain = nn.Sequential(Mlp())
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    (x,) = rows(0)
    x.requires_grad_()
    run = run_of(model, "aot_eager")
    with microbatch(model, is_last=False):
        torch.autograd.grad(mean(model(x)), x)  # as it is before it is compiled
        for ask in (
            lambda loss: torch.autograd.grad(loss, x),
            lambda loss: torch.autograd.grad(loss, list(model.parameters())),
            lambda loss: loss.backward(inputs=[x]),
        ):
            with pytest.raises(ValueError, match="not while gradients are accumulated"):
                ask(mean(run(x)))
        mean(run(x)).backward()
    mean(run(x)).backward()
    for _ in range(2):
        mean(plain(x)).backward()
    check_grads(plain, model)
    for call in (model, run):  # nothing waits any more
        (got,), (wanted,) = (torch.autograd.grad(mean(f(x)), x) for f in (call, plain))
        torch.testing.assert_close(got, wanted)
    for call in (run, plain):
        mean(call(x)).backward()
    check_grads(plain, model)


def test_memory_that_is_not_there_changes_nothing(solo_mesh, monkeypatch):
    model = simple_fsdp(nn.Sequential(Mlp()), solo_mesh)
    calls = []

    def new_zeros(*_, **__):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return torch.zeros(1)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", new_zeros)
        with pytest.raises(MemoryError), model.no_sync():
            pass
    mean(model(*rows(0))).backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_gradients_of_other_tensors_do_not_add_up_with_the_models(solo_mesh, executor):
    """At weights that stand in the place of the model's for a while, as for virtual adversaries."""
    model = simple_fsdp(nn.Linear(4, 1, bias=False), solo_mesh)
    x, other = torch.ones(1, 4), {"weight": torch.zeros_like(model.weight, requires_grad=True)}
    if executor == "aot_eager":
        torch._dynamo.reset()
        model.compile(backend="simplefsdp", options={"executor": executor})
    with microbatch(model, is_last=False):
        model(x).backward()
        if executor == "aot_eager":
            with pytest.raises(ValueError, match="not inside microbatch"):
                torch.func.functional_call(model, other, (x,))
        else:
            torch.func.functional_call(model, other, (5 * x,)).backward()
            assert other["weight"].grad.full_tensor().eq(5).all()
    with microbatch(model, is_last=True):
        model(2 * x).backward()
    assert model.weight.grad.full_tensor().eq(3).all()


def branches():
    """Each rank reads another parameter of a model that is kept, so that nothing is gathered."""
    model = wrapped(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), mp_policy=None)
    model.unshard()
    with model.no_sync():
        model[dist.get_rank()](torch.ones(1, 4)).sum().backward()
    with pytest.raises(RankMismatchError, match="the gradients that finalize_backward reduces"):
        model.finalize_backward()


def test_ranks_reduce_the_same_at_the_end(pools):
    pools(2).run(branches)


def test_a_step_may_run_the_last_micro_batch_itself(fake_mesh):
    model = simple_fsdp(nn.Sequential(Mlp()), fake_mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(2, DIM)).sum()
        loss.backward()
        return loss

    for step in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        with model.no_sync():
            closure()
        assert isinstance(step(), torch.Tensor)
        with model.no_sync(), pytest.raises(ValueError, match="wait to be reduced"):
            step()
        model.zero_grad()


def test_an_evaluation_is_compiled_once(fake_mesh):
    """Whatever is deferred when it is made again: it defers nothing."""
    graphs = []
    torch._dynamo.reset()
    model = simple_fsdp(nn.Linear(4, 4), fake_mesh(2))
    run = torch.compile(model, backend=lambda gm, _: graphs.append(gm) or gm.forward)
    x = torch.ones(2, 4)

    def evaluate() -> None:
        with torch.no_grad():
            run(x)

    evaluate()
    for deferred in (False, True, False):
        model.set_requires_gradient_sync(not deferred)
        run(x)
        evaluate()
    assert len(graphs) == 4  # one evaluation; nothing was deferred yet, deferred, and synchronised
