"""One rank's plan for all: ranks whose graphs differ in size launch alike, and fail alike."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import rehearsal
from inductor_passes.passes import PassError
from simplefsdp import simple_fsdp
from simplefsdp.compiler import plans
from simplefsdp.compiler.observers import observing
from simplefsdp.rank_guard import RankMismatchError

AUTO = {"executor": "aot_eager", "rank_guard_timeout_s": 30}


class Layers(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wrapped(model: nn.Module, **keywords: object) -> nn.Module:
    return simple_fsdp(model, init_device_mesh("cpu", (dist.get_world_size(),)), **keywords)


def compiled(model: nn.Module, **options: object):
    return torch.compile(
        model, backend="simplefsdp", fullgraph=True, dynamic=False, options={**AUTO, **options}
    )


def step(run, x) -> list[list[str]]:
    """What each graph launches that a step compiles."""
    found = []
    with observing(found.append):
        run(x).square().mean().backward()
    return [rehearsal.launches(seen.rehearsal) for seen in found]


def error_of(run, x) -> str:
    with pytest.raises((ValueError, PassError, RankMismatchError)) as caught:
        run(x)
    return f"{type(caught.value).__name__}: {caught.value}"


def relative_error(model: nn.Module, reference: nn.Module) -> float:
    """The largest of all gradients, shards against one process."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(((p.grad.full_tensor() - q.grad).norm() / q.grad.norm()).item() for p, q in pairs)


def first_batches_differ(rows, reshard_after_forward, options):
    torch.manual_seed(1)
    reference = Layers()
    model = wrapped(Layers(), reshard_after_forward=reshard_after_forward)
    model.load_state_dict(reference.state_dict())
    batches = [torch.randn(n, 64) for n in rows]
    launched = step(compiled(model, **options), batches[dist.get_rank()])
    sum(reference(x).square().mean() / len(rows) for x in batches).backward()
    return launched, relative_error(model, reference)


@pytest.mark.parametrize(
    ("reshard_after_forward", "options"),
    [(True, {"cluster": "h100"}), ("auto", {"memory_budget_gb": 300e-6})],
)
def test_first_batches_that_differ(pools, reshard_after_forward, options):
    """Each rank alone would plan, and keep, something else."""
    one, other = pools(2).run(first_batches_differ, (2, 1024), reshard_after_forward, options)
    assert one[0] == other[0] and len(one[0]) == 2
    assert max(one[1], other[1]) < 1e-5


def planner_has_no_room():
    """Rank 0's batch does not fit; both raise; the next one does."""
    run = compiled(wrapped(Layers()), memory_budget_gb=300e-6)
    text = error_of(run, torch.ones(2 if dist.get_rank() else 4096, 64))
    return text, step(run, torch.ones(2, 64))


def test_the_planning_rank_fails(pools):
    (text, launched), (same_text, same_launched) = pools(2).run(planner_has_no_room)
    assert "ValueError: forward graph: memory budget: no schedule fits 300,000 bytes" in text
    assert text == same_text
    assert launched == same_launched and len(launched) == 2


def planner_breaks(name, rank):
    def fail(*args):
        raise KeyError("no such node")

    model = wrapped(Layers())
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(plans, name, fail)
        return error_of(compiled(model), torch.ones(2, 64))


def test_the_planner_breaks(pools):
    text, same_text = pools(2).run(planner_breaks, "choose", 0)
    assert "PassError: forward graph: 'no such node'" in text and text == same_text


def test_a_rank_that_cannot_use_the_plan_stops_all(pools):
    for text in pools(2).run(planner_breaks, "as_planned", 1):
        assert "RankMismatchError" in text
        assert "rank 1 has \"cannot be planned: 'no such node'\"" in text


def changed_batches(resets):
    """Launches of a small batch, and of a large one after each kind of reset."""
    found = []
    for rows, reset in zip((2, 1024, 1024), (None, *resets), strict=True):
        if reset is not None:
            reset()
        run = compiled(wrapped(Layers()), cluster="h100")
        found.append(step(run, torch.ones(rows, 64)))
    return found


@pytest.mark.slow
def test_after_a_reset_a_changed_batch_makes_a_new_plan(pools):
    resets = (torch._dynamo.reset_code_caches, torch.compiler.reset)
    one, other = pools(2).run(changed_batches, resets)
    assert one == other
    small, kept, new = one
    assert small == kept != new


def one_rank_resets(rank):
    """What is said to it, and to the other one that comes later; then both reset."""
    run = compiled(wrapped(Layers(5)), cluster="h100", rank_guard_timeout_s=3)
    first = step(run, torch.ones(2, 64))
    told = ""
    if dist.get_rank() == rank:
        torch.compiler.reset()
        told = error_of(run, torch.ones(1024, 64))
    dist.barrier()
    if rank == 0 and dist.get_rank() == 1:
        torch.compiler.reset()
        told = error_of(run, torch.ones(1024, 64))
    dist.barrier()
    torch.compiler.reset()
    return told, first, step(run, torch.ones(1024, 64))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_resets_alone_is_told_and_a_reset_of_all_mends_it(pools, rank):
    answers = pools(2).run(one_rank_resets, rank)
    late = f"rank {1 - rank} did not get to what rank {rank} is about to do"
    assert late in answers[rank][0]
    if rank == 0:  # it planned anew, and would have launched something else
        assert "rank 0 gave up waiting for rank 1" in answers[1][0]
    else:
        assert "call torch.compiler.reset() on all ranks or on none" in answers[1][0]
        assert answers[0][0] == ""
    assert answers[0][1:] == answers[1][1:] and answers[0][1] != answers[0][2]


def one_rank_needs_gradients_of_inputs() -> str:
    run = compiled(wrapped(Layers(3)), cluster="h100", rank_guard_timeout_s=1)
    step(run, torch.ones(2, 64))
    told = ""
    if dist.get_rank() == 1:
        told = error_of(partial(step, run), torch.ones(2, 64, requires_grad=True))
    else:
        run(torch.ones(2, 64))
    dist.barrier()
    return told


def test_a_rank_that_compiles_again_and_communicates_otherwise_is_told_so(pools):
    """Of the first layer's weight its backward gathers, which no other does."""
    told = pools(2).run(one_rank_needs_gradients_of_inputs)[1]
    assert "rank 0 did not get to what rank 1 is about to do" in told
    assert "This rank compiles again what those have compiled" in told
    pools(2).stop()  # the turns of the two ranks are out of step now


class Causal(nn.Module):
    """Attends to its part of a sequence and to all before it, which other ranks have."""

    def __init__(self, mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        q, k, v = (layer(self.norm(x)) for layer in (self.q, self.k, self.v))
        start, length = 0, x.shape[1]
        if self.mesh is not None:
            start = self.mesh.get_local_rank() * length
            # Along dim 0, and cat: Dynamo of 2.12 takes no gather along another one.
            whole = (all_gather_tensor_autograd(t.contiguous(), 0, self.mesh) for t in (k, v))
            k, v = (torch.cat(t.chunk(self.mesh.size()), 1) for t in whole)
        k, v = (t[:, : start + length] for t in (k, v))
        seen = torch.arange(start + length)[None] <= torch.arange(length)[:, None] + start
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.o(y)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, mesh=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Causal(mesh)])
        self.head = nn.Linear(64, 32)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def context_parallel(flat):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(1)
    reference = Decoder()
    model = Decoder(mesh["cp"])
    model.load_state_dict(reference.state_dict())
    simple_fsdp(model, mesh["dp", "cp"]._flatten("dp_cp") if flat else mesh["dp"])
    run = compiled(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    launched, errors = [], []
    for _ in range(2):
        batch = torch.randn(4, 32, 64)
        mine = batch.chunk(2)[mesh["dp"].get_local_rank()].chunk(2, 1)[mesh["cp"].get_local_rank()]
        launched += step(run, mine)
        reference(batch).square().mean().backward()
        if not flat:  # over these the user averages
            for p in model.parameters():
                dist.all_reduce(p.grad.to_local().div_(2), group=mesh["cp"].get_group())
        errors.append(relative_error(model, reference))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return launched, errors


@pytest.mark.slow
@pytest.mark.parametrize("flat", [True, False], ids=["dp_cp", "dp"])
def test_context_parallelism(pools, flat):
    """A rank attends to more than the ranks before it, so its graph takes longer, and more room."""
    answers = pools(4).run(context_parallel, flat)
    groups = [answers] if flat else [answers[::2], answers[1::2]]
    for group in groups:
        assert all(launched == group[0][0] for launched, _ in group)
    for launched, errors in answers:
        assert max(errors) < 1e-5
        merged = [sum(line.count(".weight") for line in graph) > len(graph) for graph in launched]
        assert merged == [True, True]
