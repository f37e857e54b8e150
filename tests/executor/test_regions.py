"""The executor of regions: what it compiles, in which order it runs, and what it computes."""

from __future__ import annotations

import copy
import operator
import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from inductor_passes.adapters import _torch, _torch_lowering, fx
from inductor_passes.adapters.units import Piece
from inductor_passes.executor import regional, straight_line
from inductor_passes.executor.regions import Region, cut, graph_of, structure_of
from simplefsdp import simple_fsdp
from simplefsdp.compiler import compilation
from simplefsdp.compiler.executor import MANY_LAYERS
from simplefsdp.compiler.observers import observing
from simplefsdp.models import CONFIGS
from simplefsdp.models.llama3 import Llama

DIM = 16


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, layers: int, **kind: float) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Layer(**kind) for _ in range(layers))
        self.batch_norm = nn.BatchNorm1d(DIM)
        self.head = nn.Linear(DIM, 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.batch_norm(x))


class Ran:
    """What the executor made: its programs, and how many structures were compiled."""

    def __init__(self) -> None:
        self.programs: dict[str, str] = {}
        self.compiled: dict[str, int] = {}
        self.regions: dict[str, int] = {}


@contextmanager
def recorded(monkeypatch):
    ran, original = Ran(), regional.compile_by_regions

    def compile_by_regions(gm, codes, *, is_backward):
        part = "backward" if is_backward else "forward"
        before = len(codes)
        program = original(gm, codes, is_backward=is_backward)
        ran.programs[part] = program.source
        ran.compiled[part] = len(codes) - before
        ran.regions[part] = len(re.findall(r"f\d+\(a\)", program.source))
        return program

    with monkeypatch.context() as patch:
        patch.setattr(regional, "compile_by_regions", compile_by_regions)
        yield ran


def run(model: nn.Module, x: torch.Tensor, **options: object) -> torch.Tensor:
    torch._dynamo.reset()
    options = {"executor": "regions", "bucketing": "manual", **options}
    loss = torch.compile(model, backend="simplefsdp", options=options, fullgraph=True)(x).sum()
    loss.backward()
    return loss.detach()


def compiled_of(mesh, monkeypatch, layers: int, dropout: float = 0.0, **options: object) -> Ran:
    """A Llama, whose layers the partitioner cuts alike. Where two choices of what to save cost the
    same, as for the layer norms above, it may take one in one layer and another in the next."""
    config = replace(CONFIGS["debug"], n_layers=layers, dim=32, ffn_dim=64, vocab_size=64)
    model = Llama(replace(config, n_heads=4, n_kv_heads=2))
    for layer in model.layers:
        layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(dropout))
    with monkeypatch.context() as patch, recorded(monkeypatch) as ran:
        patch.setattr(
            _torch_lowering, "compile_region", lambda gm, *_, **__: lambda args: gm(*args)
        )
        run(simple_fsdp(model, mesh), torch.zeros(2, 16, dtype=torch.long), **options)
    return ran


@pytest.mark.slow
def test_many_layers_that_are_alike_are_compiled_so_by_default(fake_mesh, monkeypatch):
    """And few are not."""
    mesh = fake_mesh(4)
    ran = compiled_of(mesh, monkeypatch, MANY_LAYERS, executor="auto")
    assert ran.compiled["forward"] < ran.regions["forward"]
    assert ran.compiled["backward"] < ran.regions["backward"]
    made: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(compilation._Compiler, "_by_regions", lambda *_, **__: made.append("region"))
        few = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))
        torch.compile(simple_fsdp(few, mesh), backend="simplefsdp")(torch.ones(2, 4))
    assert not made


@pytest.mark.slow
@pytest.mark.parametrize(("bucketing", "dropout"), [("manual", 0.5), ("auto", 0.0)])
def test_what_is_compiled_does_not_grow_with_depth(fake_mesh, monkeypatch, bucketing, dropout):
    mesh = fake_mesh(4)
    few, many = (
        compiled_of(mesh, monkeypatch, n, dropout=dropout, bucketing=bucketing) for n in (5, 8)
    )
    for part in ("forward", "backward"):
        # At most the pieces of a layer, and what is before, behind and between layers.
        assert 2 <= few.compiled[part] <= 16 and 2 <= many.compiled[part] <= 16
        # Two to a layer, and one more for each place where something stands in any of them.
        assert many.regions[part] - few.regions[part] >= 6
        assert all(2 * n <= ran.regions[part] <= 8 * n for n, ran in ((5, few), (8, many)))
        if bucketing == "manual":
            assert many.regions[part] - few.regions[part] <= 24
            assert few.compiled[part] == many.compiled[part]


def test_layers_are_cut_where_something_stands_in_any_of_them():
    """Of two layers of three pieces, a gather is awaited inside the first one."""
    graph = Graph()
    x, shard = graph.placeholder("x"), graph.placeholder("shard")
    x.meta = {"val": torch.ones(2)}
    wait = torch.ops._c10d_functional.wait_tensor.default
    place, value = 0, x

    def compute(piece: tuple[int, int]) -> None:
        nonlocal value, place
        for target in (torch.ops.aten.sin.default, torch.ops.aten.cos.default):
            value = graph.call_function(target, (value,))
            place += 1
            value.meta = {fx._UNIT: fx._Mark(place, place, Piece(*piece)), "val": torch.ones(2)}

    for half in (1, 2):
        for at in range(3):
            compute((half, at))
            if (half, at) == (1, 0):
                full = graph.call_function(wait, (shard,))
    graph.output((value, full))
    pieces = cut(graph)
    sizes = [len(piece.nodes) for piece in pieces if isinstance(piece, Region)]
    assert sizes == [2, 4, 2, 4]  # of each layer the first piece, and the others


def launches_of(source: str) -> list[str]:
    """Kinds of the collectives that are launched and waited for, and regions between."""
    found = re.findall(r"# _c10d_functional\.(\w+)|(f\d+\(a\))", source)
    return ["region" if region else kind.split("_")[0] for kind, region in found]


def test_it_runs_what_was_planned_in_that_order_and_drops_values(fake_mesh, monkeypatch):
    mesh, seen = fake_mesh(4), []
    with observing(seen.append):
        ran = compiled_of(mesh, monkeypatch, 4)
    for shown in seen:
        planned = [op.sends for _, op in shown.rehearsal.after.starts()]
        kinds = {"all": "gather", "reduce": "reduce"}
        launched = [kinds[k] for k in launches_of(ran.programs[shown.part]) if k in kinds]
        assert launched == planned and len(launched) >= 5
    # One bucket is gathered while the one before is computed with.
    sequence = [k for k in launches_of(ran.programs["forward"]) if k != "wait"]
    assert " ".join(sequence).startswith("all all all region region all region region all")
    every_value_is_dropped_after_its_last_use(ran)


def every_value_is_dropped_after_its_last_use(ran: Ran) -> None:
    for source in ran.programs.values():
        *lines, result = source.splitlines()[2:]
        made: set[str] = set(re.findall(r"v\d+", source.splitlines()[1]))
        for line in lines:
            names = set(re.findall(r"\bv\d+\b", line))
            if line.strip().startswith("del "):
                assert names <= made
                made -= names
            else:
                target = line.split("=")[0]
                made |= set(re.findall(r"\bv\d+\b", target))
        assert made == set(re.findall(r"\bv\d+\b", result))


def numbers(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {fqn: p.grad.full_tensor() for fqn, p in model.named_parameters()}
    return found | {fqn: b.clone() for fqn, b in model.named_buffers()}


@pytest.mark.slow
def test_it_computes_what_the_whole_graph_does(solo_mesh, monkeypatch):
    """Dropout, too, which draws from the same seeds, and what is written in place."""
    torch.manual_seed(0)
    plain, x = Model(3, dropout=0.3), torch.rand(4, DIM)

    def found(executor: str, bucketing: str) -> dict[str, torch.Tensor]:
        model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
        torch.manual_seed(1)
        with recorded(monkeypatch) as ran:
            loss = run(model, x, executor=executor, bucketing=bucketing)
        assert bool(ran.programs) == (executor == "regions")
        return {"loss": loss, **numbers(model)}

    whole = found("inductor", "none")
    for bucketing in ("none", "manual", "auto"):
        for name, value in found("regions", bucketing).items():
            torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_dropout_differs_between_layers(solo_mesh):
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(0.5) for _ in range(4))

        def forward(self, x):
            return torch.stack([layer(x) for layer in self.layers])

    model = Drops()
    for layer in model.layers[1:]:
        layer.load_state_dict(model.layers[0].state_dict())
    simple_fsdp(model, solo_mesh)
    options = {"executor": "regions", "bucketing": "manual"}
    made = torch.compile(model, backend="simplefsdp", options=options)(torch.rand(4, DIM))
    assert all(not torch.equal(made[0], other) for other in made[1:])


@pytest.mark.slow
def test_another_batch_is_compiled_whole(solo_mesh, monkeypatch):
    model = simple_fsdp(Model(2), solo_mesh)
    options = {"executor": "regions", "bucketing": "manual"}
    compiled = torch.compile(model, backend="simplefsdp", options=options)
    for batch in (4, 6, 7):  # the second one makes the size a symbol
        x = torch.rand(batch, DIM)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)


def dropped(layer, x):
    return nn.functional.dropout(layer(x), 0.5)


class Chooses(nn.Module):
    """Has sizes that depend on data, and drops in what is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            chosen = x[(x.sum(-1) > -99).nonzero()[:, 0]]
            x = checkpoint(dropped, layer, chosen, use_reentrant=False)
        return x


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's partitioner refuses it")
def test_sizes_that_depend_on_data(solo_mesh):
    """What is dropped in backward is what was dropped in forward, so these are one function."""
    model, x = simple_fsdp(Chooses(), solo_mesh), torch.randn(6, DIM, requires_grad=True)
    options = {"executor": "regions", "bucketing": "manual"}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        made = torch.compile(model, backend="simplefsdp", options=options)(x)
    made.sum().backward()
    bias = model.layers[-1].bias
    # Of the last layer, each kept element has a gradient of 2.
    assert torch.equal(bias.grad.full_tensor(), (made != 0).sum(0) * 2.0)


class Several(nn.Module):
    """Operators with several results, which the next layer uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 4) for _ in range(4))

    def forward(self, x):
        indices = torch.zeros(2, 4, DIM, dtype=torch.long)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = norm(layer(x).gather(2, indices)).relu()
            values, indices = (y + x).topk(DIM, dim=2)
            x = values.sin() + y
        return x


class Gated(nn.Module):
    """Parts of one projection: backward takes both from what was saved, and needs them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, 2 * DIM) for _ in range(3))
        self.values = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x):
        for layer, value in zip(self.layers, self.values, strict=True):
            part, gate = layer(x).chunk(2, -1)
            x = x + value(part.sin()) * gate.tanh()
        return x


class Scaled(Gated):
    """A scale of 1 is left out, and the parts, which lie apart, take its place."""

    def forward(self, x):
        for layer, value in zip(self.layers, self.values, strict=True):
            part = layer(x)[..., :DIM] / 1.0
            x = x + value(part.sin()) * part.tanh()
        return x


@pytest.mark.slow
@pytest.mark.parametrize("bucketing", ["manual", "auto"])
@pytest.mark.parametrize("model_class", [Several, Gated, Scaled])
def test_operators_with_several_results(solo_mesh, model_class, bucketing):
    """In double precision: rounding grows from one norm to the next, whoever computes it."""
    plain, x = model_class().double(), torch.randn(2, 4, DIM, dtype=torch.double)
    model = simple_fsdp(copy.deepcopy(plain), solo_mesh)
    wanted = plain(x).sum()
    wanted.backward()
    made = run(model, x, bucketing=bucketing)
    torch.testing.assert_close(made, wanted.detach(), rtol=1e-9, atol=1e-9)
    for fqn, param in plain.named_parameters():
        got = model.get_parameter(fqn).grad.full_tensor()
        torch.testing.assert_close(got, param.grad, rtol=1e-9, atol=1e-9, msg=fqn)


SCALES = (lambda z: z * 2.0, lambda z: z * 3.0, lambda z: z * 50.0)


class Branches(nn.Module):
    """A branch inside a branch, which differs from layer to layer only in there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x):
        for layer, scale in zip(self.layers, SCALES, strict=True):

            def inner(y, scale=scale):
                return torch.cond(y.sum() > -1e9, scale, lambda z: z + 1, (y,))

            y = layer(x).sin()
            x = torch.cond(y.sum() > -1e9, inner, lambda z: z - 1, (y,)).tanh()
        return x


@pytest.mark.slow
def test_submodules_inside_submodules_tell_regions_apart(solo_mesh):
    model, x = Branches(), torch.rand(4, DIM)
    wanted = model(x)
    simple_fsdp(model, solo_mesh)
    options = {"executor": "regions", "bucketing": "manual"}
    with torch.no_grad():
        made = torch.compile(model, backend="simplefsdp", options=options)(x)
    torch.testing.assert_close(made, wanted)


def test_autocast_of_the_caller_changes_nothing():
    """Backward may run inside of a context that forward ran outside of."""
    gm = traced(lambda a, b: (a @ b, (a @ b + 1).relu()), torch.rand(3, 3), torch.rand(3, 3))
    run = straight_line.straight_line(gm, cut(gm.graph), interpreted)
    with torch.autocast("cpu", torch.bfloat16):
        made = run([torch.rand(3, 3), torch.rand(3, 3)])
    assert [tensor.dtype for tensor in made] == [torch.float32] * 2


@pytest.mark.parametrize("layout", ["rows", "transposed", "already"])
def test_a_cast_by_itself_is_atens_and_as_that_of_prims(layout):
    convert = torch.ops.prims.convert_element_type.default
    x = {
        "rows": torch.rand(3, 4),
        "transposed": torch.rand(4, 3).t(),
        "already": torch.rand(3, 4, dtype=torch.bfloat16),
    }[layout]
    gm = traced(lambda a: (convert(a, torch.bfloat16),), x)
    run = straight_line.straight_line(gm, cut(gm.graph), interpreted)
    (made,), (wanted,) = run([x]), gm(x)
    assert torch.equal(made, wanted) and made.stride() == wanted.stride()
    assert made.data_ptr() != x.data_ptr()
    assert torch.ops.aten._to_copy.default in run.scope.values()


# --- cutting -------------------------------------------------------------------------------------


def traced(function, *args):
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(function, tracing_mode="fake")(*args)
    gm.graph.eliminate_dead_code()
    return gm


def pieces_of(gm) -> list[str]:
    return ["region" if isinstance(p, Region) else str(p.target) for p in cut(gm.graph)]


def test_what_has_nothing_to_fuse_is_called_as_it_is():
    gm = traced(lambda a, b: (a @ b, a + b), torch.rand(3, 3), torch.rand(3, 3))
    assert pieces_of(gm) == ["aten.mm.default", "aten.add.Tensor"]
    gm = traced(lambda a, b: (a @ b + 1).relu(), torch.rand(3, 3), torch.rand(3, 3))
    assert pieces_of(gm) == ["region"]


def test_writes_in_place_are_alone_and_in_order():
    def function(a, b):
        made = (a + b).relu()
        a.copy_(made)
        return (a * 2).relu()

    assert pieces_of(traced(function, torch.rand(3), torch.rand(3))) == [
        "region",
        "aten.copy_.default",
        "region",
    ]


def structures(function, *args) -> list[str]:
    return [structure_of(p) for p in cut(traced(function, *args).graph) if isinstance(p, Region)]


def test_structures_tell_regions_apart():
    a, b = torch.rand(4, 4), torch.rand(4, 4)

    def first(a, b):
        return (a @ b + 1).relu()

    alike = structures(first, a, b)
    assert structures(first, b, a) == alike
    others = [
        structures(lambda a, b: (a @ b + 2).relu(), a, b),  # a constant
        structures(lambda a, b: (a @ b + a).relu(), a, b),
        structures(lambda a, b: (a @ b + b).relu(), a, b),  # wiring
        structures(lambda a, b: (a @ b - 1).relu(), a, b),  # an operator
        structures(first, a.t(), b),  # strides
        structures(first, a.double(), b.double()),
        structures(first, torch.rand(2, 4), b),
        structures(lambda a, b: ((c := a @ b + 1).relu(), c), a, b),  # what is used outside
    ]
    assert all(len(found) == 1 and found != alike for found in others)
    assert len({found[0] for found in others}) == len(others)


def test_what_is_to_be_stored_tells_regions_apart(monkeypatch):
    """In the structure, and in Inductor's cache, as other sources do."""
    from torch._inductor import config

    gm = traced(lambda a, b: ((a * b).sin(), (a * b).cos()), torch.rand(3), torch.rand(3))
    (region,) = cut(gm.graph)
    before = structure_of(region)
    told = []

    def compiled(graph, inputs, **kwargs):
        told.append(config.aot_inductor.metadata["simplefsdp"])

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", compiled)
    _torch_lowering.compile_region(graph_of(region), [], is_backward=False)
    _torch.store(region.nodes[0])
    assert structure_of(region) != before
    for sources in (_torch_lowering._sources(), "others"):
        monkeypatch.setattr(_torch_lowering, "_sources", lambda sources=sources: sources)
        _torch_lowering.compile_region(graph_of(region), [], is_backward=False)
    assert len(set(told)) == 3


def test_what_only_regions_use_and_make_anew_is_no_output():
    def function(a, b):
        ones = torch.full((3, 3), 2.0)
        c = (a @ ones + 1).relu()
        torch.ops.aten.add_.Tensor(b, 1)
        return (c @ ones + b).relu()

    gm = traced(function, torch.rand(3, 3), torch.rand(3, 3))
    regions = [piece for piece in cut(gm.graph) if isinstance(piece, Region)]
    assert [len(region.outputs) for region in regions] == [1, 1]
    assert all(any("full" in n.name for n in region.nodes) for region in regions)


def handed_on(function, *args) -> list[str]:
    """Operators whose values the second of two regions is given; both compute what they did."""
    gm = traced(function, *args)
    first, second = (piece for piece in cut(gm.graph) if isinstance(piece, Region))
    run = straight_line.straight_line(gm, cut(gm.graph), interpreted)
    wanted = gm(*(arg.clone() for arg in args))
    for one, other in zip(run([arg.clone() for arg in args]), wanted, strict=True):
        assert torch.equal(one, other)
    assert all(node in first.outputs for node in second.inputs if node.op != "placeholder")
    return [re.sub("_1$", "", str(node.target)) for node in second.inputs]


def double(x):
    return torch.ops.prims.convert_element_type.default(x, torch.double)


@pytest.mark.parametrize(
    ("loop", "is_repeated"),
    [
        (double, True),
        (lambda x: (double(x) + 1).view(16), True),
        (lambda x: x + 1, False),  # as large as what it is made of
        (lambda x: double(x).sum(0) + 1, False),  # a sum is a kernel's work
        (lambda x: double(x).exp(), False),  # takes long, on a CPU
    ],
)
@pytest.mark.parametrize("written", ["other", "x"])
def test_what_is_larger_than_what_it_is_made_of_is_repeated(loop, is_repeated, written):
    def function(x, other):
        wide = loop(x)
        first = (wide * 2).relu()
        torch.ops.aten.add_.Tensor({"x": x, "other": other}[written], 1)
        return first, (wide * 3).relu()

    given = handed_on(function, torch.rand(4, 4), torch.rand(3))
    is_repeated &= written == "other"
    assert (given == ["x"]) == is_repeated and len(given) == 1


@pytest.mark.parametrize("written", ["other", "gate"])
def test_a_loop_goes_to_the_one_it_reads(written):
    """Of a gated product's backward: what is written, kept and read is one value, not two."""

    def function(grad, weight, gate, other):
        wide = (grad @ weight).relu()
        torch.ops.aten.add_.Tensor({"gate": gate, "other": other}[written], 1)
        return (wide * gate + 1) @ weight

    args = [torch.rand(4, 4) for _ in range(4)]
    pieces = pieces_of(gm := traced(function, *args))
    run = straight_line.straight_line(gm, cut(gm.graph), interpreted)
    wanted = gm(*(arg.clone() for arg in args))
    assert torch.equal(run([arg.clone() for arg in args]), wanted)
    moved = ["region", "aten.add_.Tensor", "aten.mm.default"]
    assert pieces == (moved if written == "other" else [*moved[:2], "region"])


def written_later(x, other):
    """A view of what would be repeated is written to."""
    wide = double(x) + 1
    first = (wide * 2).relu()
    torch.ops.aten.add_.Tensor(wide.view(16), 1)
    return first, (wide * 3).relu()


def made_of_what_was_written(x, other):
    """By an op whose result is what it has written to."""
    view = x.view(16)
    wide = double(torch.ops.aten.add_.Tensor(x, 1))
    first = (wide * 2).relu()
    torch.ops.aten.add_.Tensor(view, 1)
    return first, (wide * 3).relu()


def of_several_results(x, other):
    """A loop with several results, and what takes one of them, stay together."""
    made = (x @ x).relu()
    torch.ops.aten.add_.Tensor(other, 1)
    var, mean = torch.ops.aten.var_mean.correction(made, [1])
    first, last = made.split(2)
    return (var + mean) @ x, (first + 1) @ x, (last * mean.sum()).relu() @ x


@pytest.mark.parametrize("function", [written_later, made_of_what_was_written, of_several_results])
def test_what_aliases_or_is_a_tuple_is_not_taken_apart(function):
    args = torch.rand(4, 4), torch.rand(4)
    gm = traced(function, *args)
    wanted = gm(*(arg.clone() for arg in args))
    run = straight_line.straight_line(gm, cut(gm.graph), interpreted)
    for one, other in zip(run([arg.clone() for arg in args]), wanted, strict=True):
        assert torch.equal(one, other)
    assert no_region_takes_or_gives_a_tuple(gm)


def test_an_assertion_runs():
    def function(x):
        made = (x + 1).relu()
        torch.ops.aten._assert_async.msg((made > 0).all(), "boom")
        return made @ x

    gm = traced(function, torch.rand(4, 4))
    assert any("_assert_async" in str(node.target) for node in gm.graph.nodes)
    run = straight_line.straight_line(gm, cut(gm.graph), interpreted)
    with pytest.raises(RuntimeError, match="boom"):
        run([torch.full((4, 4), -2.0)])


def test_a_loop_stays_with_the_product_that_it_waits_for():
    def function(a, b, other):
        made = (a + 1).relu()
        product = made @ b
        torch.ops.aten.add_.Tensor(other, 1)
        return product, ((product + made).relu() * 2) @ b

    gm = traced(function, *(torch.rand(4, 4) for _ in range(3)))
    first, second = (piece for piece in cut(gm.graph) if isinstance(piece, Region))
    assert len(first.outputs) == 2 and len(second.nodes) == 4


def test_what_is_given_anyway_is_made_of_nothing_more():
    def function(x, y, other):
        made = (x + y).relu()
        first = (made * 2).sum()
        torch.ops.aten.add_.Tensor(other, 1)
        return first, (made * x).sum(), (made * y).relu()

    given = handed_on(function, torch.rand(4), torch.rand(4), torch.rand(4))
    assert given == ["x", "y"]


def no_region_takes_or_gives_a_tuple(gm) -> bool:
    regions = [piece for piece in cut(gm.graph) if isinstance(piece, Region)]
    values = [n.meta["val"] for r in regions for n in (*r.inputs, *r.outputs)]
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)


def test_no_region_takes_a_list_of_parts():
    """Of which it alone uses one."""

    def function(x):
        part, other = x.chunk(2)
        part = (part + 1).relu()
        torch.ops.aten.add_.Tensor(torch.ones(3), 1)
        return part, (other + 1).relu()

    assert no_region_takes_or_gives_a_tuple(traced(function, torch.rand(4, 4)))


def test_no_region_takes_or_gives_a_tuple():
    def function(x):
        values, indices = x.topk(2)
        values = (values + 1).relu()
        torch.ops.aten.add_.Tensor(x, 1)
        return values, (indices + 1).relu()

    gm = traced(function, torch.rand(3, 4))
    (last,) = [n for n in gm.graph.nodes if n.target is operator.getitem and n.args[1] == 1]
    user = next(iter(last.users))
    user.prepend(last)  # where a view goes, to its first user
    assert no_region_takes_or_gives_a_tuple(gm)


def test_a_program_of_calls_gives_what_the_graph_gives():
    def function(a, b):
        made = (a @ b + 1).relu()
        return made.t(), [a.sum(0), made.view(-1)[:3] * 2]

    args = (torch.rand(3, 3), torch.rand(3, 3))
    gm = traced(lambda a, b: (*function(a, b)[:1], *function(a, b)[1]), *args)
    run = straight_line.straight_line(gm, cut(gm.graph), interpreted)
    given = list(args)
    made = run(given)
    assert given == []  # so that whoever runs it holds nothing
    for one, other in zip(made, gm(*args), strict=True):
        assert torch.equal(one, other)


def interpreted(region: Region):
    gm = graph_of(region)
    return lambda args: gm(*args)
