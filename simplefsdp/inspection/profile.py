"""Reads a measured run from the trace-event JSON of torch's profiler, or of ours.

If there are GPU kernels in the trace, collectives are NCCL's kernels, and compute is every other
kernel or copy, on any stream. Otherwise collectives are the events of gloo's threads, and compute
is what the other threads do, except for launching collectives and waiting for them. A trace that
``simplefsdp inspect --perfetto`` wrote is read by its categories.

For traces with a modelled wire (``benchmarks/wire.py``) see
:mod:`simplefsdp.inspection.wire_events`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from inductor_passes.ir.program import COLLECTIVE_KINDS
from simplefsdp.inspection.intervals import difference, union
from simplefsdp.inspection.trace_json import Event, Trace, read_trace
from simplefsdp.inspection.wire_events import Told, told_by, transfer_of_launches

STEP = "ProfilerStep"
"""Prefix of the name of the event around a step."""
_NCCL = re.compile(r"^(void )?nccl\w*Kernel")
_KIND_OF = {"allgather": "gather", "reducescatter": "reduce", "allreduce": "all_reduce"}
_LAUNCH = re.compile(r"^c10d::_?(all_?gather|reduce_?scatter|all_?reduce)")
_WAIT = re.compile(r"^(_c10d_functional|c10d_functional)::wait_tensor|^c10d::(barrier|monitored)")
_SPAN = attrgetter("span")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NBYTES = {
    "float": 4, "float32": 4, "double": 8, "float64": 8, "half": 2, "float16": 2, "bfloat16": 2,
    "long": 8, "long int": 8, "int64": 8, "int": 4, "int32": 4, "char": 1, "byte": 1, "bool": 1,
    "uint8": 1, "unsigned char": 1, "signed char": 1,
}  # fmt: skip


class Transfer(NamedTuple):
    """A measured collective; times are in the trace's clock."""

    kind: str  # as in :class:`inductor_passes.ir.program.Collective`
    name: str  # name of the event
    begin_us: float
    end_us: float
    nbytes: int | None  # bytes of the full tensors; None if the trace has no sizes
    launch: int = 0  # number of its launch; one launch may have several transfers


class Kernel(NamedTuple):
    """A span of compute."""

    begin_us: float
    end_us: float
    name: str
    launched_us: float | None = None  # when the host launched it; None if the trace has no launch


@dataclass(frozen=True)
class Profile:
    """The measured run of one rank."""

    name: str  # of the rank, or, for a predicted trace, of the plan
    transfers: tuple[Transfer, ...]  # in the order in which they began
    kernels: tuple[Kernel, ...]  # likewise
    steps: tuple[tuple[float, float], ...] = ()  # begin and end of each step that was marked


def read_profiles(path: Path) -> list[Profile]:
    """The profiles in a trace file: several if it has several devices or plans.

    Raises:
        ValueError: the file is no (complete) JSON, no trace, or has no collectives; the message
            says what to do.
        OSError: the file cannot be read.
    """
    trace = read_trace(path)
    events = trace.events
    name = path.stem if trace.rank is None else f"rank {trace.rank}"
    on_host = _on_wire if any(map(told_by, events)) else _on_threads
    found = _on_devices(events, name) or _predicted(trace) or [on_host(events, name)]
    # With a GPU there is a second event for each step, around its kernels.
    around = (e for e in events if e.name.startswith(STEP) and e.category != "gpu_user_annotation")
    steps = tuple(sorted(e.span for e in around))
    found = [replace(profile, steps=steps) for profile in found if profile.transfers]
    if not found:
        raise ValueError(f"{path}: {_why_none(events)}")
    return found


def _why_none(events: Sequence[Event]) -> str:
    if any(e.name.startswith("nccl:") for e in events):
        return (
            "it has NCCL's host calls and no GPU kernels; profile with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    return (
        f"none of its {len(events):,} timed events is a collective (NCCL's kernels, "
        "ncclDevKernel_* or older, gloo:*, or wire:*); profile a step that communicates"
    )


def _on_devices(events: Sequence[Event], name: str) -> list[Profile]:
    """One profile for each device that has kernels."""
    by_device: defaultdict[Any, list[Event]] = defaultdict(list)
    launched: dict[Any, Event] = {}
    for e in events:
        if e.category in _ON_DEVICE:
            by_device[e.args.get("device", e.thread[0])].append(e)
        elif e.category in ("cuda_runtime", "cuda_driver") and "correlation" in e.args:
            launched[e.args["correlation"]] = e
    on_wire = transfer_of_launches(events, launched)
    profiles = []
    for device, found in by_device.items():
        transfers, kernels = _on_lanes(found, on_wire), []
        for e in found:
            call = e.args.get("correlation")
            if call in on_wire:
                continue
            if _NCCL.match(e.name):
                transfers.append(_nccl(e))
            else:
                launched_us = launched[call].begin_us if call in launched else None
                kernels.append(Kernel(*e.span, e.name, launched_us))
        title = f"{name}, device {device}" if len(by_device) > 1 else name
        profiles.append(_profile(title, transfers, kernels))
    return profiles


def _on_lanes(found: Iterable[Event], on_wire: Mapping[Any, Told]) -> list[Transfer]:
    """Transfers of a modelled wire; each lasts from its first kernel or copy to the end of its
    last."""
    of_one: defaultdict[Told, list[Event]] = defaultdict(list)
    for e in found:
        if (transfer := on_wire.get(e.args.get("correlation"))) is not None:
            of_one[transfer].append(e)
    return [
        Transfer(
            t.kind,
            f"wire:{t.kind}",
            min(e.begin_us for e in parts),
            max(e.end_us for e in parts),
            t.nbytes,
        )
        for t, parts in of_one.items()
    ]


def _profile(name: str, transfers: Iterable[Transfer], kernels: Iterable[Kernel]) -> Profile:
    ordered = sorted(transfers, key=lambda t: (t.begin_us, t.end_us))
    if not any(t.launch for t in ordered):
        ordered = [t._replace(launch=n) for n, t in enumerate(ordered)]
    return Profile(name, tuple(ordered), tuple(sorted(kernels, key=lambda kernel: kernel[:3])))


def _nccl(e: Event) -> Transfer:
    numels = [e.args.get("In msg nelems"), e.args.get("Out msg nelems")]
    each = _NBYTES.get(str(e.args.get("dtype", "")).lower())
    known = [n for n in numels if isinstance(n, int)]
    nbytes = max(known) * each if known and each else None
    # Collectives that NCCL groups run as one "Generic" kernel: the kind is in "Collective name".
    kind = _kind(f"{e.name} {e.args.get('Collective name', '')}")
    return Transfer(kind, e.name, *e.span, nbytes)


def _kind(name: str) -> str:
    plain = name.replace("_", "").lower()
    return next((kind for word, kind in _KIND_OF.items() if word in plain), "other")


def _predicted(trace: Trace) -> list[Profile]:
    """One profile for each plan of a trace of ours."""
    profiles = []
    for pid, name in trace.processes.items():
        if name.startswith("simplefsdp, "):
            mine = [e for e in trace.events if e.thread[0] == pid]
            transfers = [
                Transfer(e.category, e.name, *e.span, e.args.get("bytes"))
                for e in mine
                if e.category in COLLECTIVE_KINDS
            ]
            kernels = [Kernel(*e.span, e.name) for e in mine if e.category == "compute"]
            profiles.append(_profile(name.removeprefix("simplefsdp, "), transfers, kernels))
    return profiles


def _on_threads(events: Sequence[Event], name: str) -> Profile:
    """The profile of a rank that computes on the CPU and communicates by gloo."""
    sent = sorted((e for e in events if e.name.startswith("gloo:")), key=_SPAN)
    theirs = {e.thread[1] for e in sent}
    own = [e for e in events if e.thread[1] not in theirs and not _is_frame(e)]
    launches = sorted((e for e in own if _LAUNCH.match(e.name)), key=_SPAN)
    # gloo's events do not tell kinds: it does a reduce-scatter as an all-reduce per tensor. The
    # launches tell.
    causes = [cause for n, e in enumerate(launches) for cause in _causes(e, n)]
    if len(causes) != len(sent):
        causes = [(_kind(e.name), 0, n) for n, e in enumerate(sent)]
    transfers = [_gloo(e, *cause) for e, cause in zip(sent, causes, strict=True)]
    apart = [e for e in own if _WAIT.match(e.name) or _LAUNCH.match(e.name)]
    return _profile(name, transfers, _computed(own, apart))


def _on_wire(events: Sequence[Event], name: str) -> Profile:
    """The profile of a rank that computes on the CPU and whose wire is modelled."""
    own = [e for e in events if not _is_frame(e)]
    transfers = []
    for t in filter(None, map(told_by, own)):
        begin = t.launch[0] + t.after_us
        transfers.append(Transfer(t.kind, f"wire:{t.kind}", begin, begin + t.takes_us, t.nbytes))
    apart = [e for e in own if e.name.startswith("wire:") or _WAIT.match(e.name)]
    return _profile(name, transfers, _computed(own, apart))


def _computed(own: Iterable[Event], apart: Iterable[Event]) -> list[Kernel]:
    """The times in which a rank's threads are busy with compute: with ``own`` and not ``apart``."""
    busy = difference(union(map(_SPAN, own)), union(map(_SPAN, apart)))
    return [Kernel(begin, end, "compute") for begin, end in busy]


def _is_frame(e: Event) -> bool:
    """Whether an event only encloses other events, and so says nothing about compute."""
    return e.category in ("Trace", "python_function") or e.name.startswith(STEP)


def _causes(launch: Event, number: int) -> list[tuple[str, int, int]]:
    """The transfers that a launch hands to gloo's threads; for each its kind, the elements of the
    full tensors (the larger of input and output), and the number of the launch."""
    dims = [d for d in launch.args.get("Input Dims", ())[:2] if isinstance(d, list)]
    kind = _kind(launch.name)
    if kind == "reduce" and "coalesced" in launch.name and len(dims) == 2:
        return [(kind, _numel(tensor), number) for tensor in dims[1]]
    return [(kind, max(map(_numel, dims), default=0), number)]


def _gloo(e: Event, kind: str, numel: int, launch: int) -> Transfer:
    types = {str(t).rpartition("::")[2].lower() for t in e.args.get("Input type", ())}
    each = _NBYTES.get(types.pop()) if len(types) == 1 else None
    nbytes = numel * each if numel and each else None
    return Transfer(kind, e.name, *e.span, nbytes, launch)


def _numel(dims: Any) -> int:
    """Number of elements, from the sizes of a tensor or of a list of tensors."""
    if not isinstance(dims, list) or not dims:
        return 0
    if isinstance(dims[0], list):
        return sum(map(_numel, dims))
    n = 1
    for size in dims:
        if type(size) is not int or not 0 <= n < 2**63:
            return 0  # no tensor has such a size
        n *= size
    return n
