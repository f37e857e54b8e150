"""What is launched and waited for when, in the code that Inductor generates for a Llama."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, get_args

import pytest
import torch
import torch.nn.functional as F
from fx_graphs import copied
from graphs import no_kernels
from torch import nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import Graph, Node

import simplefsdp.compiler.compilation
import simplefsdp.provenance
from inductor_passes import passes
from inductor_passes.adapters import fx, scheduler
from inductor_passes.adapters._torch import origins_of
from inductor_passes.adapters.layouts import BucketLayout
from inductor_passes.ir.program import Program
from inductor_passes.rehearsal import Settings
from inductor_passes.transform.order import OverlapPolicy
from simplefsdp import simple_fsdp
from simplefsdp.models import CONFIGS
from simplefsdp.models.llama3 import Llama

LAYERS = [f"layers.{i}" for i in range(2)]
FORWARD = [("gather", label) for label in ["embed_tokens", *LAYERS, "norm+lm_head"]]
MODULES = ["norm+lm_head", *reversed(LAYERS), "embed_tokens"]


class Event(NamedTuple):
    """A launch, or the wait for one of its results, in the order in which they stand."""

    what: str  # "start" or "wait"
    kind: str
    label: str
    results: int  # of the start


def events_of(program: Program) -> list[Event]:
    found = []
    for i, op in enumerate(program.ops):
        for at in (i,) if op.kind == "start" else program.start_of.get(i, ()):
            start = program.ops[at]
            c = start.collective
            found.append(Event(op.kind, c.kind, c.bucket, len(start.writes)))
    return found


START = re.compile(r"(\w+) = torch\.ops\._c10d_functional\.(\w+)\.default\(")
ITEM = re.compile(r"(\w+) = (\w+)\[\d+\]\s*$")
WAIT = re.compile(r"torch\.ops\._c10d_functional\.wait_tensor\.default\((\w+)\)")
CALL = re.compile(r"def call\(.*?return \(", re.DOTALL)
KINDS = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce"}


def events_in(code: str, labels: dict[str, str]) -> list[Event]:
    """The events of generated code.

    Args:
        labels: bucket of each buffer that a start fills.
    """
    lines = code.splitlines()
    kind_of = {m[1]: m[2] for line in lines if (m := START.search(line))}
    start_of = {m[1]: m[2] for line in lines if (m := ITEM.search(line)) and m[2] in kind_of}
    label_of = labels | {start: labels[item] for item, start in start_of.items()}
    results = {start: list(start_of.values()).count(start) or 1 for start in kind_of}
    found = []
    for line in lines:
        if match := START.search(line):
            what, start = "start", match[1]
        elif match := WAIT.search(line):
            what, start = "wait", start_of.get(match[1], match[1])
        else:
            continue
        kind = KINDS[kind_of[start].removesuffix("_coalesced")]
        found.append(Event(what, kind, label_of[start], results[start]))
    return found


class Compiled(NamedTuple):
    """Forward and backward of one step.

    Attributes:
        log: the lines it wrote.
        planned: events of the FX graphs after the pass.
        generated: events of the code, none if nothing was generated.
        before: what the pass was given.
        placed: names of the matrix products of each graph, and of sums over all rows (gradients
            of norms): as in the graph, as executed.
    """

    log: list[str]
    planned: tuple[list[Event], list[Event]]
    generated: tuple[list[Event], ...]
    before: list[tuple[Graph, Settings]]
    placed: list[tuple[list[str], list[str]]]


def is_placed(node: Node) -> bool:
    over_rows = node.target is torch.ops.aten.sum.dim_IntList and node.args[1] == [0, 1]
    return over_rows or node.target is torch.ops.aten.mm.default


class Recorder:
    """The programs that the two passes leave."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.before: list[tuple[Graph, Settings]] = []
        self.graphs: list[list[Event]] = []
        self.labels: list[dict[str, str]] = []
        self.placed: list[tuple[list[str], list[str]]] = []
        self.in_graph: list[str] = []
        self.impose_order = passes.ImposeOrder.__call__
        patch.setattr(simplefsdp.compiler.compilation, "bucket_and_reorder", self.graph_pass)
        recorder = self

        def order(impose_order, snodes):
            return recorder.order(impose_order, snodes)

        patch.setattr(passes.ImposeOrder, "__call__", order)

    def graph_pass(self, graph, settings, fqn_of, planned, before=None) -> None:
        self.before.append((copied(graph), settings))
        passes.bucket_and_reorder(graph, settings, fqn_of, planned, before)
        self.graphs.append(events_of(fx.read(graph, fqn_of).program))
        self.in_graph = [n.name for n in graph.nodes if is_placed(n)]

    def order(self, impose_order, snodes):
        ordered = self.impose_order(impose_order, snodes)
        starts = scheduler.read(ordered).program.starts()
        each = [part for snode in ordered for part in snode.get_nodes()]
        executed = [n.name for part in each for n in origins_of(part) if is_placed(n)]
        self.placed.append((self.in_graph, executed))
        self.labels.append({n: op.collective.bucket for _, op in starts for n in op.writes})
        return ordered


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def llama(mesh, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = Llama(replace(CONFIGS["debug"], n_layers=len(LAYERS)))
    return simple_fsdp(model, mesh, mp_policy=policy)


def step(run) -> None:
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    F.cross_entropy(run(tokens).flatten(0, 1), tokens.flatten()).backward()


def compile_step(mesh, policy: MixedPrecisionPolicy | None = None, **options) -> Compiled:
    run = torch.compile(
        llama(mesh, policy),
        backend="simplefsdp",
        fullgraph=True,
        options={"bucketing": "manual", **options},
    )
    log, handler = logging.getLogger("simplefsdp"), Lines()
    level = log.level
    with pytest.MonkeyPatch.context() as patch, no_kernels():
        recorder = Recorder(patch)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            _, codes = run_and_get_code(lambda: step(run))
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
    generated = [events_in(*pair) for pair in zip(codes, recorder.labels, strict=False)]
    return Compiled(
        handler.lines, tuple(recorder.graphs), tuple(generated), recorder.before, recorder.placed
    )


_done: dict[str, Compiled] = {}


@pytest.fixture(params=["aot_eager", "inductor"])
def executor(request) -> str:
    return request.param


@pytest.fixture
def compiled(executor, fake_mesh) -> Compiled:
    """One compilation per executor, whichever test comes first."""
    if executor not in _done:
        _done[executor] = compile_step(fake_mesh(4), executor=executor)
    return _done[executor]


def order_of(compiled: Compiled, executor: str) -> tuple[list[Event], list[Event]]:
    """Events of forward and backward, as they are executed."""
    forward, backward = compiled.generated if executor == "inductor" else compiled.planned
    return forward, backward


def starts(events: Sequence[Event], kind: str = "") -> list[tuple[str, str]]:
    found = [(e.kind, e.label) for e in events if e.what == "start"]
    return [start for start in found if not kind or start[0] == kind]


def at(events: Sequence[Event], what: str, kind: str, label: str) -> list[int]:
    """Positions of the start, or of the waits, of a bucket."""
    return [i for i, e in enumerate(events) if (e.what, e.kind, e.label) == (what, kind, label)]


def most_in_flight(events: Sequence[Event], kind: str) -> int:
    """Buckets launched of which some result is still not waited for, at the worst moment."""
    left: dict[str, int] = {}
    most = 0
    for event in events:
        if event.kind == kind:
            before = left.get(event.label, 0)
            left[event.label] = event.results if event.what == "start" else before - 1
            most = max(most, sum(n > 0 for n in left.values()))
    assert not any(left.values()), left
    return most


@pytest.mark.slow(quick=["inductor"])
def test_a_launch_per_bucket(compiled, executor):
    forward, backward = order_of(compiled, executor)
    assert starts(forward) == FORWARD
    assert starts(backward, "gather") == [("gather", label) for label in MODULES[:-1]]
    assert sorted(starts(backward, "reduce")) == sorted(("reduce", label) for label in MODULES)
    assert len(starts(backward)) == 2 * len(MODULES) - 1


def test_the_code_launches_in_the_sequence_of_the_graph(fake_mesh):
    if "inductor" not in _done:
        _done["inductor"] = compile_step(fake_mesh(4), executor="inductor")
    planned, generated = _done["inductor"].planned, _done["inductor"].generated
    assert len(planned) == len(generated) == 2
    for graph, code in zip(planned, generated, strict=True):
        assert starts(code) == starts(graph)
        assert sorted(code) == sorted(graph)  # and waits for the same, as often


@pytest.mark.slow
def test_the_automatic_plan_is_in_the_code(fake_mesh):
    found = compile_step(fake_mesh(4), bucketing="auto", executor="inductor")
    assert len(found.planned) == len(found.generated) == 2
    for graph, code in zip(found.planned, found.generated, strict=True):
        assert starts(code) == starts(graph)
        assert sorted(code) == sorted(graph)
    forward, backward = found.generated
    for line, events, collectives in zip(found.log, found.generated, (21, 20 + 21), strict=True):
        buckets = sum(map(int, re.findall(r"-> (\d+) buckets", line)))
        assert len(starts(events)) == buckets < collectives, line
        assert "; planned " in line
        exposed = re.search(r"predicted exposed ([\d.]+) -> ([\d.]+) ms on cpu-gloo", line)
        assert exposed and float(exposed[1]) > float(exposed[2]) > 0, line
    assert most_in_flight(forward, "gather") > 1 and most_in_flight(backward, "reduce") > 0
    for in_graph, executed in found.placed:
        assert len(executed) > 14 and executed == in_graph, "the plan counts on this compute"
    for graph, code in zip(found.planned, found.generated, strict=True):
        assert code == graph, "something is launched or waited for elsewhere than planned"


@pytest.mark.slow
def test_a_fused_loop_runs_where_its_first_part_was_planned(fake_mesh):
    """The sum of a norm's weight gradient shares a kernel with its cast, which stands far behind at
    the launch: there it would keep three activations through the attention's backward."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = compile_step(fake_mesh(4), policy, bucketing="auto", executor="inductor")
    _, (in_graph, executed) = found.placed
    assert sum(name.startswith("sum") for name in executed) == 2 * len(LAYERS) + 1
    assert executed == in_graph


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.14", reason="torch moves nothing by default")
def test_without_passes_nothing_is_moved_either(fake_mesh):
    """``bucketing="none"``: torch's own pass, the last of all, is off whatever the default."""
    model, option = llama(fake_mesh(4)), "aten_distributed_optimizations.enable_simple_overlap"
    found = []
    for default in (False, True):
        torch._dynamo.reset()
        run = torch.compile(
            model, backend="simplefsdp", fullgraph=True, options={"bucketing": "none"}
        )
        with config.patch({option: default, "fx_graph_cache": False}), no_kernels():
            _, codes = run_and_get_code(lambda run=run: step(run))
        assert [len(START.findall(code)) for code in codes] == [21, 20 + 21]
        found.append([CALL.search(code)[0].splitlines() for code in codes])
    assert found[1] == found[0]


@pytest.mark.slow(quick=["aot_eager"])
def test_each_gather_starts_before_the_one_before_it_is_waited_for(compiled, executor):
    for events in order_of(compiled, executor):
        labels = [label for _, label in starts(events, "gather")]
        for label, following in itertools.pairwise(labels):
            (start,) = at(events, "start", "gather", following)
            assert start < min(at(events, "wait", "gather", label)), (label, following)


def test_limits_of_the_memory(compiled, executor):
    forward, backward = order_of(compiled, executor)
    assert most_in_flight(forward, "gather") == 2
    assert most_in_flight(backward, "gather") == 2
    assert most_in_flight(backward, "reduce") == 1


def test_in_backward_a_gather_goes_before_the_reduce_that_it_would_wait_behind(compiled, executor):
    _, backward = order_of(compiled, executor)
    sequence = starts(backward)
    for label, following in itertools.pairwise(MODULES[:-1]):
        assert sequence.index(("gather", following)) < sequence.index(("reduce", label))
        # and the reduce before the next module's turn is over: it is not put off
        (launched,) = at(backward, "start", "reduce", label)
        after = MODULES[MODULES.index(following) + 1]
        assert launched < at(backward, "start", "reduce", following)[0]
        if after != "embed_tokens":
            assert launched < at(backward, "start", "gather", after)[0]


def test_log_lines(compiled):
    forward, backward = compiled.log
    assert forward.startswith("forward: 21 gathers (") and "; 21 gathers -> 4 buckets; " in forward
    assert "; 20 gathers -> 3 buckets; 21 reduces -> 4 buckets; " in backward
    for line in compiled.log:
        exposed = re.search(r"predicted exposed ([\d.]+) -> ([\d.]+) ms on cpu-gloo", line)
        assert exposed and float(exposed[1]) > float(exposed[2]) > 0, line


@pytest.mark.slow(
    quick=[
        "1-1-flat",
        "2-3-coalesced",
        "2-3-flat",
        "1-3-coalesced",
        "1-3-flat",
        "20-20-coalesced",
        "20-20-flat",
    ]
)
@pytest.mark.parametrize("layout", get_args(BucketLayout))
@pytest.mark.parametrize(("gathers", "reduces"), [(1, 1), (2, 3), (1, 3), (20, 20)])
def test_other_limits(fake_mesh, layout, gathers, reduces):
    if "aot_eager" not in _done:
        _done["aot_eager"] = compile_step(fake_mesh(4), executor="aot_eager")
    events = []
    for graph, settings in _done["aot_eager"].before:
        policy = OverlapPolicy(gathers, reduces)
        fqn_of, now = simplefsdp.provenance.carried_fqn, copied(graph)
        passes.bucket_and_reorder(now, replace(settings, policy=policy, layout=layout), fqn_of)
        events.append(events_of(fx.read(now, fqn_of).program))
    forward, backward = events
    assert most_in_flight(forward, "gather") == min(gathers, len(FORWARD))
    assert most_in_flight(backward, "gather") == min(gathers, len(MODULES) - 1)
    assert most_in_flight(backward, "reduce") == min(reduces, len(MODULES))
    assert (len(starts(forward)), len(starts(backward))) == (len(FORWARD), 2 * len(MODULES) - 1)
