"""A measured run, read from torch profiler's (or our own) trace-event JSON.

With GPU kernels in the trace, collectives are NCCL's kernels and compute is every other kernel or
copy, on any stream. Without, collectives are what gloo's threads record, and compute is what the
other threads do but for launching collectives and waiting for them. A trace that
``simplefsdp inspect --perfetto`` wrote is read by its categories.

Of a wire that is modelled (``benchmarks/wire.py``) see :mod:`simplefsdp.inspection.wire_events`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from inductor_passes.ir.json_file import shown
from simplefsdp.inspection.intervals import Intervals, difference, union
from simplefsdp.inspection.trace_json import events_of, load_trace, spans_of
from simplefsdp.inspection.wire_events import Told, told_by, transfer_of_launches

Event = dict[str, Any]

STEP = "ProfilerStep"
"""Begin of the name of the event around a step."""
_NCCL = re.compile(r"^(void )?nccl\w*Kernel")
_KIND_OF = {"allgather": "gather", "reducescatter": "reduce", "allreduce": "all_reduce"}
_LAUNCH = re.compile(r"^c10d::_?(all_?gather|reduce_?scatter|all_?reduce)")
_WAIT = re.compile(r"^(_c10d_functional|c10d_functional)::wait_tensor|^c10d::(barrier|monitored)")
_OURS = ("gather", "reduce", "all_reduce", "other")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NBYTES = {
    "float": 4, "float32": 4, "double": 8, "float64": 8, "half": 2, "float16": 2, "bfloat16": 2,
    "long": 8, "long int": 8, "int64": 8, "int": 4, "int32": 4, "char": 1, "byte": 1, "bool": 1,
    "uint8": 1, "unsigned char": 1, "signed char": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    """A measured collective.

    Attributes:
        kind: as of :class:`inductor_passes.ir.program.Collective`.
        name: of the event.
        begin_us: in the trace's clock.
        end_us: likewise.
        nbytes: of the full tensors; None if the trace does not tell.
        launch: number of the launch that it is of, which may have several.
    """

    kind: str
    name: str
    begin_us: float
    end_us: float
    nbytes: int | None
    launch: int = 0


@dataclass(frozen=True)
class Profile:
    """What one rank did.

    Attributes:
        name: of the rank, or of the plan of a predicted trace.
        transfers: in the order in which they began.
        compute: when something is computed.
        kernels: the compute events, (begin, end, name), in order.
        launched_us: when the host launched each of ``kernels``; None where the trace does not tell.
        steps: when the profiler's steps ran, in order; none if nobody told it of them.
    """

    name: str
    transfers: tuple[Transfer, ...]
    compute: Intervals
    kernels: tuple[tuple[float, float, str], ...]
    launched_us: tuple[float | None, ...]
    steps: tuple[tuple[float, float], ...] = ()


def read_profiles(path: Path) -> list[Profile]:
    """What a trace file tells; several profiles if it is of several devices or plans.

    Raises:
        ValueError: it is no (whole) JSON, no trace, or has no collectives; says what to do.
        OSError: it cannot be read.
    """
    trace = load_trace(path)
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise ValueError(
            f"{path}: expected the trace-event JSON of torch.profiler's export_chrome_trace, an "
            f'object with "traceEvents"; got {_outline(trace)}'
        )
    events = events_of(events)
    try:
        spans = spans_of(events)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    told = trace.get("distributedInfo") if isinstance(trace, dict) else None
    rank = told.get("rank") if isinstance(told, dict) else None
    name = f"rank {rank}" if isinstance(rank, int) else path.stem
    on_host = _on_wire if any(told_by(e) for e in spans) else _on_threads
    found = _on_devices(spans, name) or _predicted(spans, events) or on_host(spans, name)
    steps = tuple(sorted(_span(e) for e in spans if _is_step(e)))
    found = [replace(profile, steps=steps) for profile in found if profile.transfers]
    if not found:
        raise ValueError(f"{path}: {_why_none(spans)}")
    return found


def _outline(trace: object) -> str:
    return f"keys {', '.join(sorted(trace)[:5]):.200}" if isinstance(trace, dict) else shown(trace)


def _why_none(spans: Sequence[Event]) -> str:
    if any(str(e.get("name", "")).startswith("nccl:") for e in spans):
        return (
            "it has NCCL's host calls and no GPU kernels; profile with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    return (
        f"none of its {len(spans):,} timed events is a collective (NCCL's kernels, ncclDevKernel_* "
        "or older, gloo:*, or wire:*); profile a step that communicates"
    )


def _on_devices(spans: Sequence[Event], name: str) -> list[Profile]:
    """One profile for each device that has kernels."""
    by_device: defaultdict[object, list[Event]] = defaultdict(list)
    launched = {}
    for e in spans:
        if e.get("cat") in _ON_DEVICE:
            by_device[_args(e).get("device", e.get("pid"))].append(e)
        elif e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in _args(e):
            launched[_args(e)["correlation"]] = e
    on_wire = transfer_of_launches(spans, launched)
    profiles = []
    for device, found in by_device.items():
        own = [e for e in found if _args(e).get("correlation") not in on_wire]
        kernels = [e for e in own if not _NCCL.match(e["name"])]
        transfers = [_nccl(e) for e in own if _NCCL.match(e["name"])]
        transfers += _on_lanes(found, on_wire)
        title = f"{name}, device {device}" if len(by_device) > 1 else name
        profile = _profile(title, transfers, kernels)
        starts = sorted(kernels, key=lambda e: float(e["ts"]))
        by = (launched.get(_args(e).get("correlation")) for e in starts)
        us = tuple(None if e is None else float(e["ts"]) for e in by)
        profiles.append(replace(profile, launched_us=us))
    return profiles


def _on_lanes(found: Iterable[Event], on_wire: Mapping[object, Told]) -> list[Transfer]:
    """Transfers of a modelled wire, each from its first kernel or copy to the end of its last."""
    of_one: defaultdict[Told, list[tuple[float, float]]] = defaultdict(list)
    for e in found:
        if (transfer := on_wire.get(_args(e).get("correlation"))) is not None:
            of_one[transfer].append(_span(e))
    return [
        Transfer(t.kind, f"wire:{t.kind}", min(spans)[0], max(end for _, end in spans), t.nbytes)
        for t, spans in of_one.items()
    ]


def _profile(name: str, transfers: Iterable[Transfer], kernels: Iterable[Event]) -> Profile:
    spans = sorted((*_span(e), str(e["name"])) for e in kernels)
    ordered = sorted(transfers, key=lambda t: (t.begin_us, t.end_us))
    if not any(t.launch for t in ordered):
        ordered = [replace(t, launch=n) for n, t in enumerate(ordered)]
    return Profile(
        name,
        tuple(ordered),
        union((begin, end) for begin, end, _ in spans),
        tuple(spans),
        (None,) * len(spans),
    )


def _nccl(e: Event) -> Transfer:
    args = _args(e)
    numels = [args.get("In msg nelems"), args.get("Out msg nelems")]
    each = _NBYTES.get(str(args.get("dtype", "")).lower())
    known = [n for n in numels if isinstance(n, int)]
    nbytes = max(known) * each if known and each else None
    # Several that were grouped run as one "Generic" kernel.
    kind = _kind(f"{e['name']} {args.get('Collective name', '')}")
    return Transfer(kind, str(e["name"]), *_span(e), nbytes)


def _kind(name: str) -> str:
    plain = name.replace("_", "").lower()
    return next((kind for word, kind in _KIND_OF.items() if word in plain), "other")


def _predicted(spans: Sequence[Event], events: Sequence[Event]) -> list[Profile]:
    """One profile for each plan of a trace of ours."""
    plans = {
        e.get("pid"): _args(e)["name"].removeprefix("simplefsdp, ")
        for e in events
        if e["name"] == "process_name" and str(_args(e).get("name", "")).startswith("simplefsdp, ")
    }
    profiles = []
    for pid, name in plans.items():
        mine = [e for e in spans if e.get("pid") == pid]
        transfers = [
            Transfer(e["cat"], str(e["name"]), *_span(e), _args(e).get("bytes"))
            for e in mine
            if e.get("cat") in _OURS
        ]
        kernels = (e for e in mine if e.get("cat") == "compute")
        profiles.append(_profile(name, transfers, kernels))
    return profiles


def _on_threads(spans: Sequence[Event], name: str) -> list[Profile]:
    """The profile of a rank that computes on the CPU and communicates by gloo."""
    sent = sorted((e for e in spans if e["name"].startswith("gloo:")), key=_span)
    theirs = {e.get("tid") for e in sent}
    own = [e for e in spans if e.get("tid") not in theirs and not _is_frame(e)]
    launches = sorted((e for e in own if _LAUNCH.match(e["name"])), key=_span)
    # gloo reduces to shards by all-reduce, tensor by tensor: the launches tell what it is for.
    causes = [cause for n, e in enumerate(launches) for cause in _causes(e, n)]
    if len(causes) != len(sent):
        causes = [_Cause(_kind(e["name"]), 0, n) for n, e in enumerate(sent)]
    transfers = [_gloo(e, cause) for e, cause in zip(sent, causes, strict=True)]
    apart = [e for e in own if _WAIT.match(e["name"]) or _LAUNCH.match(e["name"])]
    return [_profile(name, transfers, _computed(own, apart))]


def _on_wire(spans: Sequence[Event], name: str) -> list[Profile]:
    """The profile of a rank that computes on the CPU and whose wire is modelled."""
    own = [e for e in spans if not _is_frame(e)]
    transfers = []
    for t in filter(None, map(told_by, own)):
        begin = t.launch[0] + t.after_us
        transfers.append(Transfer(t.kind, f"wire:{t.kind}", begin, begin + t.takes_us, t.nbytes))
    apart = [e for e in own if e["name"].startswith("wire:") or _WAIT.match(e["name"])]
    return [_profile(name, transfers, _computed(own, apart))]


def _computed(own: Sequence[Event], apart: Sequence[Event]) -> list[Event]:
    """When a rank's own threads are at work, but for what is no compute."""
    busy = difference(union(map(_span, own)), union(map(_span, apart)))
    return [{"ts": begin, "dur": end - begin, "name": "compute"} for begin, end in busy]


def _is_frame(e: Event) -> bool:
    """Whether an event is around others, whatever they do."""
    return e.get("cat") in ("Trace", "python_function") or e["name"].startswith(STEP)


def _is_step(e: Event) -> bool:
    # On a device there is one more event for each, of the kernels of the step.
    return str(e["name"]).startswith(STEP) and e.get("cat") != "gpu_user_annotation"


class _Cause(NamedTuple):
    kind: str
    numel: int
    launch: int


def _causes(launch: Event, number: int) -> list[_Cause]:
    """What a launch hands to gloo's threads: of the full tensors, the larger of in and out."""
    dims = [d for d in _args(launch).get("Input Dims", ())[:2] if isinstance(d, list)]
    kind = _kind(launch["name"])
    if kind == "reduce" and "coalesced" in launch["name"] and len(dims) == 2:
        return [_Cause(kind, _numel(tensor), number) for tensor in dims[1]]
    return [_Cause(kind, max(map(_numel, dims), default=0), number)]


def _gloo(e: Event, cause: _Cause) -> Transfer:
    types = {str(t).rpartition("::")[2].lower() for t in _args(e).get("Input type", ())}
    each = _NBYTES.get(types.pop()) if len(types) == 1 else None
    nbytes = cause.numel * each if cause.numel and each else None
    return Transfer(cause.kind, str(e["name"]), *_span(e), nbytes, cause.launch)


def _numel(dims: Any) -> int:
    """Elements of a tensor's, or of a list of tensors', sizes."""
    if not isinstance(dims, list) or not dims:
        return 0
    if isinstance(dims[0], list):
        return sum(map(_numel, dims))
    n = 1
    for size in dims:
        if type(size) is not int or not 0 <= n < 2**63:
            return 0  # no tensor has it
        n *= size
    return n


def _args(e: Event) -> Event:
    args = e.get("args")
    return args if isinstance(args, dict) else {}


def _span(e: Event) -> tuple[float, float]:
    begin = float(e["ts"])
    return begin, begin + float(e["dur"])
