"""What a rank of two_hosts.py does: measure the link, predict and step the variants, put both
ranks together.

A variant that fails on both ranks is left out; one that fails on one rank only ends the run.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import compare
import report
import torch
import torch.distributed as dist
import torch_passes
import variants
from measure import Result, Runner, Sample, workload
from predict import VARIANTS, predictions, step_nbytes
from rows import Row
from torch.fx import Node
from transfers import link as modelled_link
from two_hosts import ADDRESSES, INTERFACE, RANKS, Options

from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.cluster_file import as_json
from simplefsdp.calibrate.measure import sweep_for
from simplefsdp.calibrate.session import (
    CalibrationReport,
    measure_beside,
    measure_compute,
    measure_wires,
)
from simplefsdp.launcher.ranks import Rank

PROBE_NBYTES = 64 << 20


@dataclass(frozen=True)
class TcpSample(Sample):
    """A step, with the bytes that this rank sent over the link."""

    sent_nbytes: int


def _sent() -> int:
    """Bytes sent through this end of the link since it is there, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counters = next(x.split(":")[1] for x in lines if x.strip().startswith(f"{INTERFACE}:"))
    return int(counters.split()[8])


class LockstepRunner(Runner):
    """A Runner whose steps begin on both ranks at once."""

    def __init__(self, *args: Any, store: dist.Store, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._store, self._turn = store, 0

    def meet(self, what: str) -> None:
        """Wait for the other rank; end this process if that one is about to do something else."""
        self._turn += 1
        keys = [f"two_hosts/{self._turn}/{rank}" for rank in RANKS]
        self._store.set(keys[dist.get_rank()], what)
        said = [value.decode() for value in self._store.multi_get(keys)]
        if len(set(said)) > 1:
            sys.exit(f"the ranks are not in step: rank 0 {said[0]}, rank 1 {said[1]}")

    def build(self, names: Any) -> None:
        """As the base class; a variant must have failed on both ranks or on none."""
        for name in names:
            self.meet(f"builds {name}")
            super().build([name])
            self.meet(f"{'built' if name in self.variants else 'failed to build'} {name}")

    def _memory(self, name: str) -> None:
        self.meet(f"watches the memory of {name}")
        super()._memory(name)

    def sample(self, name: str, *, update: bool = True) -> Sample:
        """As the base class, and both ranks start together."""
        self.meet(f"steps {name}")
        dist.barrier()  # leaves them closer together than the store does
        sent = _sent()
        sample = super().sample(name, update=update)
        return TcpSample(**vars(sample), sent_nbytes=_sent() - sent)


def measure_link(rate_mbit: int) -> dict[str, float]:
    """What gloo gets out of the link, in each direction.

    Returns:
        Gbit/s: `rate` as set; `wire`: bytes sent during an all-reduce; the rest is payload, half
        the full tensor per rank: `gather` of 64 MiB, with which gloo does not fill the link;
        `gathers`, 32 of 2 MiB at once; `reduce`, a reduce-scatter, in gloo an all-reduce. And
        `latency_us`, a tiny all-gather.

    Raises:
        RuntimeError: more went through than the rate allows, so nothing limits it.
    """
    full, shard = torch.ones(PROBE_NBYTES // 4), torch.ones(PROBE_NBYTES // 8)
    few, one = torch.ones(len(RANKS)), torch.ones(1)

    def many() -> None:
        pieces = zip(full.chunk(32), shard.chunk(32), strict=True)
        for work in [dist.all_gather_into_tensor(*pair, async_op=True) for pair in pieces]:
            work.wait()

    all_reduce_s, sent = _timed(lambda: dist.all_reduce(full), 3)
    gather_s, _ = _timed(lambda: dist.all_gather_into_tensor(full, shard), 3)
    gathers_s, _ = _timed(many, 3)
    reduce_s, _ = _timed(lambda: dist.reduce_scatter_tensor(shard, full), 3)
    tiny_s, _ = _timed(lambda: dist.all_gather_into_tensor(few, one), 20)
    payload_gbit = PROBE_NBYTES / 2 * 8 / 1e9
    link = {
        "rate_gbit_s": rate_mbit / 1e3,
        "wire_gbit_s": sent * 8 / 1e9 / all_reduce_s,
        "gather_gbit_s": payload_gbit / gather_s,
        "gathers_gbit_s": payload_gbit / gathers_s,
        "reduce_gbit_s": payload_gbit / reduce_s,
        "latency_us": tiny_s * 1e6,
    }
    if link["wire_gbit_s"] > 1.02 * link["rate_gbit_s"]:
        raise RuntimeError(f"the link is not limited to its rate: {link}")
    return link


def _timed(action: Callable[[], object], times: int) -> tuple[float, float]:
    """Median seconds of the slower rank, and bytes sent per call; one call before counting."""
    action()
    seconds = []
    sent = _sent()
    for _ in range(times):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    nbytes = (_sent() - sent) / times
    both: list[Any] = [None, None]
    dist.all_gather_object(both, statistics.median(seconds))
    return max(both), nbytes


def tell_torch_passes(link: dict[str, float], store: dist.Store) -> None:
    """Let PyTorch's passes plan with the link as measured, and alike on both ranks.

    torch_passes.py measures matrix products on this core; different times would mean different
    plans, and a hang, so rank 0's are used.
    """
    modelled_link.latency_s = link["latency_us"] / 1e6
    modelled_link.bandwidth = len(RANKS) * link["gather_gbit_s"] / 8 * 1e9
    measure_ms = torch_passes._measured_ms
    count = iter(range(sys.maxsize))

    def rank_0s(node: Node) -> float:
        key = f"two_hosts/estimate/{next(count)}"
        if dist.get_rank() == 0:
            store.set(key, repr(measure_ms(node)))
        return float(store.get(key))

    torch_passes._measured_ms = rank_0s


def calibrated() -> Cluster:
    """What the two hosts are, as `simplefsdp calibrate` finds it; rank 0's figures are both's."""
    rank = Rank(dist.get_rank(), len(RANKS), torch.device("cpu"))
    sweep, silent = sweep_for("cpu", quick=False, nbytes_max=None), CalibrationReport(enabled=False)
    wires = measure_wires(sweep, rank, 1, silent)
    beside = measure_beside(sweep, rank, silent)
    compute = measure_compute(sweep, rank, silent)
    rank_0s = [Cluster("two hosts", 1, wires=wires, compute_beside=beside, **compute)]
    if dist.get_rank() != 0:
        rank_0s = [None]
    dist.broadcast_object_list(rank_0s)
    return rank_0s[0]


def predicted(
    load: variants.Workload, cluster: Cluster, names: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Seconds and bytes that are expected of a step of each variant.

    The planner is told of the same machine.
    """
    variants.cluster_here = lambda row, device: cluster
    found = predictions(load, cluster, list(names))
    return {
        name: {
            "step_s": sum(graph.timeline.total_us for graph in step.graphs) / 1e6,
            "exposed_s": step.exposed_us / 1e6,
            "step_nbytes": step_nbytes(step),
        }
        for name, step in found.items()
    }


def plain(result: Result) -> dict[str, Any]:
    """What the other rank needs to know of a result."""
    if not result.ok:
        return {"failure": result.failure or "never ran"}
    keys = ("step_s", "optimizer_s", "loss", "sent_nbytes")
    columns = {key: [getattr(sample, key) for sample in result.samples] for key in keys}
    nbytes = result.memory.step_peak if result.memory else None
    return {
        **columns,
        "first_loss": result.first_loss,
        "build_s": result.compile_s,
        "step_nbytes": nbytes,
    }


def together(ranks: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Of one variant: the slower rank of each round, the busier rank of each step."""
    both = [rank["variants"][name] for rank in ranks]
    for one in both:
        if "failure" in one:
            return one
    steps = [max(pair) for pair in zip(*(one["step_s"] for one in both), strict=True)]
    spread = statistics.quantiles(steps, n=4, method="inclusive") if steps[1:] else steps * 3
    return {
        "step_s": statistics.median(steps),
        "step_quartiles_s": [spread[0], spread[2]],
        "rounds_s": steps,
        "optimizer_s": max(statistics.median(one["optimizer_s"]) for one in both),
        "sent_nbytes": max(statistics.median(one["sent_nbytes"]) for one in both),
        "build_s": max(one["build_s"] for one in both),
        "step_nbytes": max(one["step_nbytes"] or 0 for one in both),
        "loss": [one["loss"][-1] for one in both],
        "first_loss": [one["first_loss"] for one in both],
    }


def put_together(options: Options, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole run as plain data; `ranks`: what each rank measured."""
    link = ranks[0]["link"]
    found = {name: together(ranks, name) for name in ranks[0]["variants"]}
    ran = {name: v for name, v in found.items() if "failure" not in v}
    if "floor" not in ran:
        sys.exit(f"floor failed, and nothing can be said without it: {found['floor']}")
    floor_s = ran["floor"]["step_s"]
    for v in ran.values():
        v["wire_s"] = v["sent_nbytes"] * 8 / 1e9 / link["wire_gbit_s"]
        v["to_floor"] = v["step_s"] / floor_s
        for other in ("fsdp2_eager", "fsdp2_compiled"):
            v[f"{other}_over_this"] = ran[other]["step_s"] / v["step_s"] if other in ran else None
    for name, expected in ranks[0]["predicted"].items():
        if name in ran:
            ran[name]["predicted"] = expected
            for key in ("step_s", "step_nbytes"):
                ran[name][f"{key}_error"] = expected[key] / ran[name][key] - 1
    source = next((n for n in ("manual", "none", "fsdp2_eager") if n in ran), "floor")
    return {
        "settings": {k: v for k, v in vars(options).items() if k != "json"},
        "environment": report.environment(torch.device("cpu")),
        "link": link,
        "cluster": ranks[0]["cluster"],
        "wire_to_compute": ran[source]["wire_s"] / floor_s,
        "wire_of": source,
        "agreement": _agreement(ranks, ran),
        "notes": _notes(link, found),
        "variants": found,
    }


def _agreement(ranks: list[dict[str, Any]], ran: dict[str, Any]) -> list[str]:
    """Sentences: how far each variant's losses, and shards of gradients, are from FSDP2's.

    The ranks have different batches, so a variant that reduced nothing would be seen in the loss
    after the last update; the floor, which does just that, is held against it in the first only.
    """
    others = [name for name in ran if name != "floor"]
    if not others:
        return []
    reference = "fsdp2_eager" if "fsdp2_eager" in others else others[0]
    tolerance, lines = report.TOLERANCE["fp32"], []
    for name in (n for n in ran if n != reference):
        keys = ("first_loss",) if name == "floor" else ("first_loss", "loss")
        far = {key: _furthest(ran[name][key], ran[reference][key]) for key in keys}
        if name in ranks[0]["gradients"]:
            far["gradient"] = max(rank["gradients"][name] for rank in ranks)
        exact = max(v for k, v in far.items() if k != "loss")
        # Updates amplify rounding: AdamW's first ones are the signs of the gradients.
        agrees = exact <= tolerance and far.get("loss", 0.0) <= 10 * tolerance
        said = ", ".join(f"{key} {value:.1e}" for key, value in far.items())
        verdict = f"{name} {'agrees' if agrees else 'DIFFERS'} with {reference}"
        lines.append(f"{verdict} (tolerance {tolerance:g}): {said}")
    return lines


def _furthest(ones: list[float], others: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ones, others, strict=True))


def _notes(link: dict[str, float], found: dict[str, Any]) -> list[str]:
    notes = [f"{name} failed: {v['failure']}" for name, v in found.items() if "failure" in v]
    if link["wire_gbit_s"] < 0.85 * link["rate_gbit_s"]:
        notes.append("SLOW LINK: an all-reduce got less than 0.85 of the rate; a core is the limit")
    floor = found["floor"]["rounds_s"]
    slow = sum(seconds > 1.25 * min(floor) for seconds in floor)
    if 4 * slow > len(floor):
        notes.append(f"NOISY: in {slow} of {len(floor)} rounds the floor took 1.25 x its fastest")
    if {"torch_manual", "torch_auto"} & set(found):
        notes.append(torch_passes.GPU_PROBES_REPLACED + "; the wire is the link measured here")
    return notes


def _end_with_parent() -> None:
    """Kill this session when the parent is gone, however it went: its end of stdin closes."""
    os.read(0, 1)  # not sys.stdin, whose lock would be held when the interpreter ends
    os.killpg(0, signal.SIGKILL)


def _load(options: Options) -> variants.Workload:
    keys = ("layers", "dim", "vocab", "seq_len", "batch")
    row = Row(**{key: getattr(options, key) for key in keys}, world_size=len(RANKS))
    load = workload(row, torch.device("cpu"))
    torch.manual_seed(1 + dist.get_rank())  # a batch of its own for each rank
    load.tokens, load.targets = torch.randint(row.vocab, (2, row.batch, row.seq_len))
    return load


def run(options: Options, rank: int, out: Path) -> None:
    """Be one rank; rank 0 writes the results of both to `out`."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # the variants share the code of the model
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{ADDRESSES[0]}:29500",
        rank=rank,
        world_size=len(RANKS),
        timeout=timedelta(minutes=5),
    )
    link = measure_link(options.rate_mbit)
    print("link:", " ".join(f"{key} {value:.3f}" for key, value in link.items()), flush=True)
    store = dist.distributed_c10d._get_default_store()
    tell_torch_passes(link, store)
    names = dict.fromkeys(("floor", *(options.variants or variants.DEFAULT)))
    load = _load(options)
    ours = [name for name in VARIANTS if name in names]
    cluster = calibrated() if ours else None
    expected = predicted(load, cluster, ours) if cluster else {}
    runner = LockstepRunner(load, say=lambda x: print(x, flush=True), store=store)
    runner.build(names)
    runner.rounds(options.warmup, options.rounds)
    runner.memory()
    sharded = {n: r for n, r in runner.results.items() if n not in ("floor", "ddp")}
    mine = {
        "link": link,
        "cluster": as_json(cluster) if cluster else None,
        "predicted": expected,
        "variants": {name: plain(result) for name, result in runner.results.items()},
        "gradients": {n: a.gradient for n, a in compare.agreements(sharded).items()},
    }
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, mine)
    if rank == 0:
        out.write_text(json.dumps(put_together(options, ranks)))
    dist.destroy_process_group()
