"""Classes of tensors that say how they are gathered, as torchao's float8 weights do."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from beside import (
    DIM,
    OPTIONS,
    call_of,
    compiled,
    mean,
    mesh_of,
    meta,
    mine,
    numbers,
    rows,
    train_beside,
    whole_of,
)
from tensor_classes import MlpAsSent, ReducedInPlace, SentAsInt8, ToldAll, mlp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from simplefsdp import init_weights, simple_fsdp, unsharded
from simplefsdp.compiler import warm_start
from simplefsdp.compiler.observers import CompiledGraph, observing
from simplefsdp.frontend.kept import kept_of
from simplefsdp.simulation.trace import trace


def train(executor: str, mode: str) -> None:
    plain = nn.Sequential(MlpAsSent(), MlpAsSent())
    model = nn.Sequential(*(mlp(like=layer) for layer in plain))
    simple_fsdp(model, mesh_of(mode), mode=mode)
    assert all(type(p) is nn.Parameter or isinstance(p, DTensor) for p in model.parameters())
    train_beside(plain, model, call_of(model, executor), rows, steps=3)
    model.load_state_dict(plain.state_dict())
    with unsharded(model):
        assert torch.equal(model[0].up.weight, plain[0].up.weight)
    for value, wanted in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(whole_of(value), wanted)


@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_ranks_send_what_the_class_says(pools, executor):
    pools(2).run(train, executor, "fully_shard")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hybrid_shard", "replicate"])
def test_ranks_send_what_the_class_says_in_each_mode(pools, mode):
    pools(4).run(train, "aot_eager", mode)


def sent(graph: CompiledGraph) -> Counter[tuple[str, str]]:
    """How many collectives of each kind and dtype a graph has, before they are merged."""
    starts = [op.collective for _, op in graph.rehearsal.reading.program.starts()]
    return Counter((collective.kind, collective.dtype) for collective in starts)


def test_a_graph_sends_bytes_and_gathers_them_again_in_backward(fake_mesh):
    model = simple_fsdp(nn.Sequential(mlp(), mlp()), fake_mesh(2))
    graphs: list[CompiledGraph] = []
    with observing(graphs.append):
        compiled(model)(numbers(4, DIM)).sum().backward()
    forward, backward = map(sent, graphs)
    # The scales of all matrices at once; backward has them, and gathers again what it needs.
    assert forward == {("gather", "int8"): 4, ("gather", "float32"): 4, ("other", "float32"): 1}
    assert backward == {("gather", "int8"): 3, ("gather", "float32"): 2, ("reduce", "float32"): 8}


def test_a_graph_that_is_traced_for_inspect_is_the_same(fake_mesh):
    step = trace(simple_fsdp(nn.Sequential(mlp(), mlp()), fake_mesh(2)), numbers(4, DIM))
    reduces = step.forward.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_reduce.default
    )
    assert [node.meta["val"].shape for node in reduces] == [(4,)]


def test_without_values_and_other_dtypes(fake_mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = simple_fsdp(meta(lambda: mlp(ToldAll).up), fake_mesh(2), mp_policy=policy)
    init_weights(model, seed=0)
    assert model(numbers(4, DIM)).dtype == torch.bfloat16
    assert ToldAll.told == (torch.Size((8, DIM)), (DIM, 1), torch.bfloat16)


def test_full_parameters_are_kept_of_others_only(fake_mesh):
    model = simple_fsdp(mlp(), fake_mesh(2))
    model.unshard()
    assert kept_of(model.up, "weight") is None and kept_of(model.up, "bias") is not None
    mean(model(numbers(4, DIM))).backward()
    assert model.up.weight.grad is not None
    model.reshard()


def test_the_attributes_of_the_class_stay_with_it(fake_mesh):
    plain = mlp()
    plain.up.weight.no_weight_decay = True
    model = simple_fsdp(plain, fake_mesh(2))
    marks = vars(model.up.weight)
    assert marks["no_weight_decay"] and not {"held", "levels"} & marks.keys()


class Halves(SentAsInt8):
    """Holds two tensors."""

    def __tensor_flatten__(self):
        return ["held", "other"], {}

    other = torch.zeros(1)


class Nameless(SentAsInt8):
    def __tensor_flatten__(self):
        return ["held"], object()


class ToldMesh(SentAsInt8):
    told = ""

    def fsdp_pre_all_gather(self, mesh):
        ToldMesh.told = mesh.get_group().group_name
        return super().fsdp_pre_all_gather(mesh)


class SaysHalf(torch.Tensor):
    def fsdp_pre_all_gather(self, mesh):
        raise NotImplementedError


def test_what_cannot_be_gathered_so_is_named(fake_mesh):
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(SaysHalf))
    mesh = fake_mesh(2)
    with pytest.raises(ValueError, match=r"weight: is a SaysHalf, .*, not none. Wrap"):
        simple_fsdp(layer, mesh)
    with pytest.raises(ValueError, match=r"up.weight: is a Halves, .*, not held, other"):
        simple_fsdp(mlp(Halves), mesh)
    with pytest.raises(ValueError, match=r"up.weight: is a Nameless, .* no text tells: .*object"):
        simple_fsdp(mlp(Nameless), mesh)


def test_uneven_rows_are_refused(fake_mesh):
    with pytest.raises(ValueError, match=r"weight: is a SentAsInt8 of 8 rows, which 3 ranks"):
        simple_fsdp(mlp(), fake_mesh(3))


@pytest.mark.parametrize("ranks", [1, 2])  # among one there is no gather, and no group of it
def test_classes_are_told_of_their_own_mesh(fake_mesh, ranks):
    mesh = fake_mesh(ranks, 2, names=("a", "b"))
    one, other = (
        simple_fsdp(mlp(ToldMesh).up, mesh[name], mode=mode)
        for name, mode in (("a", "replicate"), ("b", "fully_shard"))
    )
    for model, name in ((one, "a"), (other, "b"), (one, "a")):
        model(numbers(4, DIM))
        assert ToldMesh.told == mesh.get_group(name).group_name


def test_code_that_has_its_methods_in_it_is_not_kept(fake_mesh):
    model, names = simple_fsdp(mlp(), fake_mesh(2)), []
    with pytest.MonkeyPatch.context() as patch:
        key_of = warm_start._torch.key_of_graph
        patch.setattr(warm_start._torch, "key_of_graph", lambda *a: names.append(a) or key_of(*a))
        model.compile(backend="simplefsdp", options={"bucketing": "none"})
        model(numbers(4, DIM))
    assert not names


def test_a_collective_that_the_compiler_does_not_see_is_refused(fake_mesh):
    model = simple_fsdp(mlp(ReducedInPlace), fake_mesh(2))
    model(numbers(4, DIM))
    with pytest.raises(RuntimeError, match=r"ReducedInPlace.* calls allreduce_ of"):
        compiled(model)(numbers(4, DIM))


def float8(executor: str) -> list[float]:
    """As torchao has it, beside FSDP2: its losses, and ours, of three steps."""
    from torch.distributed.fsdp import fully_shard
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    losses: list[float] = []
    for wrap in (lambda m: fully_shard(m, mesh=mesh_of()), lambda m: simple_fsdp(m, mesh_of())):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(DIM, 8), nn.GELU(), nn.Linear(8, DIM))
        convert_to_float8_training(model, config=config)
        wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if losses and executor != "eager":
            model.compile(backend="simplefsdp", options=OPTIONS, fullgraph=True)
        for step in range(3):
            loss = mean(model(mine(numbers(4, DIM, seed=step))))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["eager", "aot_eager"])
def test_float8_is_as_under_fsdp2(pools, executor):
    pytest.importorskip("torchao")
    for losses in pools(2).run(float8, executor):
        assert losses[3:] == pytest.approx(losses[:3], rel=1e-6)
        assert losses[2] != losses[0]
