"""``reshard_after_forward=n``: backward gathers from n neighbours what forward left with them."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from beside import DIM, OPTIONS, Mlp, check_grads, mean, mesh_of, mine, rows, train_beside, wrapped
from graphs import calls, capture
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from inductor_passes.adapters._torch import ranks_of_group
from inductor_passes.planner.keep import Kept
from simplefsdp import compile_step, microbatch, simple_fsdp
from simplefsdp.compiler import reshard
from simplefsdp.compiler.observers import observing
from simplefsdp.frontend.post_forward_groups import neighbours
from simplefsdp.frontend.wrapped import layouts_of
from simplefsdp.models.build import wrapped_model
from simplefsdp.models.options import ModelOptions, ParallelOptions

ALL, NEIGHBOURS = 4, 2
PARAMETERS = 4  # of an Mlp, of 7 rows, and of 1 row: uneven on 4 ranks, and on 2


class Recomputed(Mlp):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@contextmanager
def gathers():
    """By part of the step, over how many ranks each parameter is gathered."""
    found = {}

    def note(seen):
        program = seen.rehearsal.reading.program
        sent = [c for c in program.sent.values() if c.kind == "gather"]
        found.setdefault(seen.part, []).append([int(c.ranks) for c in sent])

    with observing(note):
        yield found


def trains_as_one_process(options, layer=Mlp, **settings) -> None:
    plain = nn.Sequential(layer(), layer())
    model = wrapped(plain, reshard_after_forward=NEIGHBOURS, **settings)
    with gathers() as found:
        call = torch.compile(model, backend="simplefsdp", fullgraph=True, options=options)
        train_beside(plain, model, call, rows)
        with torch.no_grad():
            assert torch.allclose(call(*rows(0)), plain(*rows(0)), rtol=1e-5, atol=1e-6)
    count = 2 * PARAMETERS
    assert found["forward"] == [[ALL] * count] * 2  # with gradients, and without
    ((*backward,),) = found["backward"]
    assert backward and set(backward) == {NEIGHBOURS}


@pytest.mark.parametrize("bucketing", ["none", "manual", "auto"])
@pytest.mark.slow(quick=["auto"])
def test_training(pools, bucketing):
    pools(ALL).run(trains_as_one_process, OPTIONS | {"bucketing": bucketing})


@pytest.mark.parametrize("executor", ["regions", "inductor"])
@pytest.mark.slow
def test_training_by_generated_code(pools, executor):
    pools(ALL).run(trains_as_one_process, {"bucketing": "auto", "executor": executor})


def test_activation_checkpointing(pools):
    pools(ALL).run(trains_as_one_process, OPTIONS, Recomputed)


def by_columns(param):
    return Shard(1) if param.dim() == 2 else None


@pytest.mark.slow
def test_another_dimension(pools):
    pools(ALL).run(_by_columns)


def _by_columns() -> None:
    trains_as_one_process(OPTIONS, shard_placement_fn=by_columns)


def many_layers() -> None:
    """Of ten layers, a few are traced."""
    plain = nn.Sequential(*(Mlp() for _ in range(10)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [
        wrapped(plain, reshard_after_forward=wanted, mp_policy=policy)
        for wanted in (True, NEIGHBOURS)
    ]
    grads = []
    for model in models:
        torch._dynamo.reset()
        call = torch.compile(model, backend="simplefsdp", fullgraph=True, options=OPTIONS)
        for number in range(2):
            with microbatch(model, is_last=number == 1):
                mean(call(*mine(rows(number)))).backward()
        grads.append([param.grad.to_local() for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


@pytest.mark.slow
def test_the_same_bits(pools):
    pools(ALL).run(many_layers)


def keeps(layer, activation_checkpointing) -> list[int]:
    """Rows of the parts of matrices that forward keeps for backward."""
    torch._dynamo.reset()
    plain = layer(activation_checkpointing)
    model = wrapped(plain, reshard_after_forward=NEIGHBOURS)
    kept = []
    with capture() as captured:
        call = torch.compile(model, backend="simplefsdp", fullgraph=True, options=OPTIONS)
        train_beside(plain, model, call, lambda step: (torch.arange(8) % 5,), steps=1)
    ((forward,), (backward,)) = captured.forward, captured.backward
    made = {node.name for node in calls(forward, torch.ops.aten.flip.default)}
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in made and node.meta["val"].dim() > 1:
            kept.append(len(node.meta["val"]))
    return kept


class Embedded(nn.Module):
    """Backward reads the last weight only; and the second, if what it makes is computed again."""

    def __init__(self, activation_checkpointing: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(64, DIM)
        self.up, self.down = nn.Linear(DIM, 16, bias=False), nn.Linear(16, 32, bias=False)
        self.activation_checkpointing = activation_checkpointing

    def block(self, x):
        return self.down(torch.tanh(self.up(x)))

    def forward(self, tokens):
        x = self.table(tokens).detach()
        if self.activation_checkpointing:
            return checkpoint(self.block, x, use_reentrant=False) + self.table(tokens)[:, :1]
        return self.block(x) + self.table(tokens)[:, :1]


@pytest.mark.parametrize(("recomputes", "rows_kept"), [(False, [16]), (True, [8, 16])])
def test_only_what_backward_reads_is_kept(pools, recomputes, rows_kept):
    for kept in pools(ALL).run(keeps, Embedded, recomputes):
        assert sorted(kept) == rows_kept


def switched() -> None:
    """By FSDP2's method, after the wrap; and uncompiled, where nothing is resharded."""
    plain = Mlp()
    model = wrapped(plain, reshard_after_forward=NEIGHBOURS)
    mean(plain(*rows(0))).backward()
    mean(model(*mine(rows(0)))).backward()
    check_grads(plain, model)
    for reshards, wanted in ((False, []), (True, [ALL])):
        model.set_reshard_after_forward(reshards)
        model.zero_grad()
        with gathers() as found:
            call = torch.compile(model, backend="simplefsdp", options=OPTIONS)
            mean(call(*mine(rows(0)))).backward()
        check_grads(plain, model)
        assert sorted({*found["backward"][0]}) == wanted


def test_switched_off_and_on(pools):
    pools(ALL).run(switched)


def whole_steps() -> None:
    plain = nn.Sequential(Mlp(), Mlp())
    model = wrapped(plain, reshard_after_forward=NEIGHBOURS)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (plain, model)]
    with gathers() as found:
        step = compile_step(lambda x: mean(model(x)), optimizers[1], options=OPTIONS)
        for number in range(2):
            mean(plain(*rows(number))).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            step(*mine(rows(number)))
    (over,) = found["step"]
    assert over[: 2 * PARAMETERS] == [ALL] * 2 * PARAMETERS
    assert set(over[2 * PARAMETERS :]) == {NEIGHBOURS}
    for (fqn, own), param in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.full_tensor(), param, rtol=1e-5, atol=1e-6), fqn


def test_whole_steps(pools):
    pools(ALL).run(whole_steps)


# --- decided by the planner ---


@pytest.mark.parametrize(
    ("members", "per_machine", "found"),
    [
        (range(16), 8, 8),
        (range(8), 8, 1),  # one machine
        (range(12), 8, 1),  # machines of 8 and 4
        (range(0, 16, 2), 8, 4),  # beside tensor parallelism
        (range(0, 64, 8), 8, 1),  # one of each machine
        (range(8, 24), 8, 8),
        ((0, 8, 1, 9), 8, 1),  # not in turn
    ],
)
def test_neighbours_on_a_machine(members, per_machine, found):
    assert neighbours(list(members), per_machine) == found


def by_the_planner() -> tuple[list[int], list[int]]:
    """Two machines, as far as torchrun tells; a slow wire between them."""
    plain = nn.Sequential(Mlp(), Mlp())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(NEIGHBOURS))
        model = wrapped(plain, reshard_after_forward="auto")
    groups = [v.spec.post_forward_group for m in model.modules() for v in layouts_of(m).values()]
    assert "" not in groups and len(set(groups)) == 1
    with pytest.MonkeyPatch.context() as patch, gathers() as found:
        patch.setattr(reshard, "choose_kept", lambda ways, *_, **__: Kept(way=len(ways) - 1))
        options = OPTIONS | {"bucketing": "auto"}
        call = torch.compile(model, backend="simplefsdp", options=options)
        train_beside(plain, model, call, rows)
    return sorted({*found["forward"][0]}), sorted({*found["backward"][0]})


def test_parts_by_the_planner(pools):
    assert pools(ALL).run(by_the_planner) == [([ALL], [NEIGHBOURS])] * ALL


def launched_differently() -> set[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(1 + dist.get_rank() % 2))
        model = wrapped(Mlp(), reshard_after_forward="auto")
    return {v.spec.post_forward_ranks for m in model.modules() for v in layouts_of(m).values()}


def test_ranks_that_were_launched_differently_keep_no_parts(pools):
    assert pools(ALL).run(launched_differently) == [{1}] * ALL


# --- on paper -------------------------------------------------------------------------------------


def test_neighbours(fake_mesh):
    """Rank 5 of the second group of eight: 8 to 15 share shards with 4 neighbours each."""
    mesh = fake_mesh(2, 8, names=("replicate", "shard"), rank=13)
    model = simple_fsdp(Mlp(), mesh, mode="hybrid_shard", reshard_after_forward=4)
    spec = layouts_of(model)["row"].spec
    assert ranks_of_group(spec.post_forward_group) == [12, 13, 14, 15]
    assert (spec.post_forward_ranks, spec.post_forward_rank) == (4, 1)
    assert spec.reshard_after_forward is True


@pytest.mark.parametrize(("wanted", "same_as"), [(1, False), (8, True)])
def test_numbers_that_stand_for_true_and_false(fake_mesh, wanted, same_as):
    model = simple_fsdp(Mlp(), fake_mesh(8), reshard_after_forward=wanted)
    spec = layouts_of(model)["row"].spec
    assert spec.reshard_after_forward is same_as and not spec.post_forward_group


@pytest.mark.parametrize("wanted", [3, 0, -2, 16])
def test_what_does_not_divide(fake_mesh, wanted):
    model = Mlp()
    with pytest.raises(ValueError, match=f"got {wanted}, which does not divide the 8 ranks that"):
        simple_fsdp(model, fake_mesh(8), reshard_after_forward=wanted)
    assert simple_fsdp(model, mesh_of()) is model  # nothing was changed


def test_a_copy_of_the_model(fake_mesh):
    model = simple_fsdp(Mlp(), fake_mesh(8), reshard_after_forward=4)
    assert layouts_of(copy.deepcopy(model))["row"].spec == layouts_of(model)["row"].spec


def test_the_option_of_our_programs(fake_mesh):
    options = ParallelOptions(post_forward_ranks=4, mixed_precision="none")
    model = wrapped_model(ModelOptions("debug"), options, fake_mesh(8, names=("shard",)), 1)
    specs = [layout.spec for module in model.modules() for layout in layouts_of(module).values()]
    assert specs and {spec.post_forward_ranks for spec in specs} == {4}
