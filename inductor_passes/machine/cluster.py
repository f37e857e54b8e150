"""What a machine is, as data: compute peaks, memory and links; and what ops cost on it.

All ranks must use the same cluster, so that they make the same plan: take a preset, or a file that
one rank wrote; never measure while compiling.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from inductor_passes.ir.json_file import shown
from inductor_passes.ir.program import Collective, CollectiveKind, Op, Program
from inductor_passes.machine.links import (
    Link,
    Ramp,
    between,
    check_count,
    check_number,
    check_ramp,
    fraction,
)

log = logging.getLogger("simplefsdp")

WorkKind = Literal["matmul", "attention", "pointwise", "view"]
LINK_KINDS: tuple[CollectiveKind, ...] = ("gather", "reduce", "all_reduce")


@dataclass(frozen=True)
class Work:
    """What a compute op does, on whatever machine."""

    # Floating-point operations of a matmul or attention; 0 for other ops, which memory limits.
    flops: float = 0
    nbytes: float = 0  # read from and written to memory, without what stays in a fused kernel
    kind: WorkKind = "pointwise"  # a ``"view"`` does nothing
    dtype: str = "float32"  # of the operands that are multiplied
    kernels: int = 1  # launches: 1, or 0 for an op that runs inside another's kernel


@dataclass(frozen=True)
class Peak:
    """What one device computes with one dtype.

    Raises:
        TypeError, ValueError: as for :class:`Link`, but a ramp may fall.
    """

    tflops: float  # the peak: 1e12 floating-point operations per second
    matmul: Ramp = ()  # fraction of the peak that a matmul reaches, by its operations
    attention: Ramp = ()  # likewise for attention, forward and backward

    def __post_init__(self) -> None:
        check_number("tflops", self.tflops)
        check_ramp("matmul", self.matmul, falls=True)
        check_ramp("attention", self.attention, falls=True)


@dataclass(frozen=True)
class Wire:
    """A link, and the kind of collective and of group it is for."""

    kind: CollectiveKind  # ``"gather"``, ``"reduce"`` or ``"all_reduce"``
    ranks: int  # in the group
    nodes: int  # that the group spans
    link: Link  # what it costs

    def __post_init__(self) -> None:
        if self.kind not in LINK_KINDS:
            raise ValueError(
                f"kind: expected one of {', '.join(LINK_KINDS)}, got {shown(self.kind)}"
            )
        for name in ("ranks", "nodes"):
            check_count(name, getattr(self, name))
        if self.ranks < max(2, self.nodes):
            raise ValueError(f"ranks: {self.ranks} ranks cannot communicate on {self.nodes} nodes")


class UnknownLinkError(ValueError):
    """A cluster does not say what a collective in such a group costs."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices, one per rank.

    Raises:
        TypeError, ValueError: a figure that is no number, negative, NaN or zero (``launch_us`` may
            be zero); ``ranks_per_node`` that is no whole number, or less than a wire has on a node;
            no peaks, or no wires. The message names the figure.
    """

    name: str  # for messages
    ranks_per_node: int  # devices of a node
    peaks: Mapping[str, Peak]  # by dtype, named as torch does: ``"bfloat16"``
    memory_gb_s: float  # peak bandwidth of a device's memory: 1e9 bytes per second
    memory_fraction: float  # fraction of that peak which a kernel of fused loops reaches
    launch_us: float  # per kernel, on top of its arithmetic and memory traffic
    memory_gb: float  # 1e9 bytes of memory of a device
    wires: tuple[Wire, ...]  # the links that are known, any order
    source: str = ""  # where the figures come from
    # Fraction of its speed that compute keeps while anything is in transfer: communication takes
    # cores or SMs, and memory bandwidth. 1 where it is not known.
    compute_beside: float = 1.0
    # Whether its communication library can average, as NCCL can; if not, gradients are summed, and
    # divided in kernels of their own.
    averages: bool = False

    def __post_init__(self) -> None:
        who, fractions = f"cluster {self.name!r}", ("memory_fraction", "compute_beside")
        check_count(f"{who}: ranks_per_node", self.ranks_per_node)
        for name in ("memory_gb_s", "memory_gb", *fractions):
            check_number(f"{who}: {name}", getattr(self, name))
        check_number(f"{who}: launch_us", self.launch_us, zero=True)
        for name in fractions:
            if getattr(self, name) > 1:
                raise ValueError(f"{who}: {name} is above 1: {getattr(self, name)}")
        if not isinstance(self.averages, bool):
            raise ValueError(f"{who}: averages: expected true or false, got {shown(self.averages)}")
        if not self.peaks or not self.wires:
            raise ValueError(f"{who}: it has no {'wires' if self.peaks else 'peaks'}")
        for wire in self.wires:
            if wire.ranks > wire.nodes * self.ranks_per_node:
                raise ValueError(
                    f"{who}: ranks_per_node is {self.ranks_per_node}, but it has a {wire.kind} "
                    f"among {wire.ranks} ranks on {wire.nodes} node{'s'[: wire.nodes > 1]}"
                )

    def compute_us(self, work: Work) -> float:
        """The roofline: the longer of arithmetic and memory traffic, and the launch."""
        by_bytes = work.nbytes / (self.memory_gb_s * self.memory_fraction * 1e3)
        if not work.flops:
            return by_bytes + work.kernels * self.launch_us
        peak = self.peak(work.dtype)
        ramp = peak.attention if work.kind == "attention" else peak.matmul
        by_flops = work.flops / (peak.tflops * fraction(ramp, work.flops) * 1e6)
        return max(by_bytes, by_flops) + work.kernels * self.launch_us

    def peak(self, dtype: str) -> Peak:
        """The peak of a dtype. If it is not listed, the slowest listed peak (for float8 that of
        bfloat16, if listed), with a warning."""
        if dtype in self.peaks:
            return self.peaks[dtype]
        name = min(self.peaks, key=lambda name: self.peaks[name].tflops)
        if dtype.startswith("float8") and "bfloat16" in self.peaks:
            name = "bfloat16"
        _warn(f"cluster {self.name!r} has no peak for {dtype}; counted as {name}")
        return self.peaks[name]

    def link_of(self, collective: Collective, nodes: int | None) -> Link:
        """The link of a collective whose group spans ``nodes``; None for as few as can hold it.

        Raises:
            UnknownLinkError: as for :meth:`link`.
        """
        fewest = -(-collective.ranks // self.ranks_per_node)
        return self.link(collective.kind, collective.ranks, fewest if nodes is None else nodes)

    def link(self, kind: CollectiveKind, ranks: int, nodes: int) -> Link:
        """The link of a group: a known one, or one interpolated between known ones.

        Within a node the known links are compared by ranks, across nodes by nodes; see
        :func:`inductor_passes.machine.links.between`. Across nodes, every device is taken to have a
        network card of its own: bandwidth is proportional to the ranks that a group has on each
        node. A collective that is not data parallelism's costs as much as an all-reduce. A group
        of one rank only copies.

        Raises:
            UnknownLinkError: too little is known for such a group; names the known links.
        """
        if ranks < 1:
            raise UnknownLinkError(
                f"a {kind} among {ranks} ranks: its process group is unknown here"
            )
        if ranks == 1:
            return Link(self.launch_us, self.memory_gb_s * self.memory_fraction / 2)
        kind = kind if kind in LINK_KINDS else "all_reduce"
        wires = [w for w in self.wires if w.kind == kind and (w.nodes > 1) == (nodes > 1)]
        size = nodes if nodes > 1 else ranks
        points = {w.nodes if nodes > 1 else w.ranks: _for_group(w, ranks, nodes) for w in wires}
        if size in points:
            return points[size]
        if len(points) < 2:
            raise UnknownLinkError(self._unknown(kind, ranks, nodes))
        if size > 2 * max(points):
            where = f"{size} {'nodes' if nodes > 1 else 'ranks'}"
            _warn(f"cluster {self.name!r}: {kind} on {where} is extrapolated from {max(points)}")
        return between(sorted(points.items()), size)

    def with_flat_buckets(self) -> Cluster:
        """The same cluster for buckets that travel as one buffer: no cost per member."""
        wires = [replace(w, link=replace(w.link, member_us=0.0)) for w in self.wires]
        return replace(self, wires=tuple(wires))

    def with_nodes_of(self, ranks: int) -> Cluster:
        """The same devices and network cards with ``ranks`` of them per node, for when only a part
        of each node is used, or nodes have another size. Larger nodes are taken to send across
        nodes no faster than the known ones."""
        return replace(
            self,
            ranks_per_node=ranks,
            wires=tuple(wire for kind in LINK_KINDS for wire in self._wires_of(kind, ranks)),
        )

    def _wires_of(self, kind: CollectiveKind, per_node: int) -> Iterator[Wire]:
        """The links of a kind, for ``per_node`` ranks on each node."""
        within = {w.ranks for w in self.wires if w.kind == kind and w.nodes == 1}
        nodes = {w.nodes for w in self.wires if w.kind == kind and w.nodes > 1}
        if within and per_node > 1:
            for ranks in sorted({n for n in within if n < per_node} | {per_node}):
                yield Wire(kind, ranks, 1, self.link(kind, ranks, 1))
        known = min(per_node, self.ranks_per_node)
        for n in sorted(nodes):
            yield Wire(kind, n * per_node, n, self.link(kind, n * known, n))

    def _unknown(self, kind: CollectiveKind, ranks: int, nodes: int) -> str:
        known = sorted((w.ranks, w.nodes) for w in self.wires if w.kind == kind)
        sizes = "; ".join(f"{r} ranks on {n} node{'s'[: n > 1]}" for r, n in known)
        return (
            f"cluster {self.name!r} cannot tell what a {kind} among {ranks} ranks on {nodes} "
            f"node{'s'[: nodes > 1]} costs: it knows {sizes or 'none'}. Run `simplefsdp calibrate` "
            f"with {ranks} ranks, or use a preset"
        )


def _for_group(wire: Wire, ranks: int, nodes: int) -> Link:
    if nodes == 1:
        return wire.link
    per_node = (ranks / nodes) / (wire.ranks / wire.nodes)
    return replace(wire.link, gb_s=wire.link.gb_s * per_node)


@functools.cache
def _warn(message: str) -> None:
    """Say it once."""
    log.warning("%s", message)


@dataclass(frozen=True, eq=False)
class ClusterCost:
    """The cost model of a program on a cluster."""

    cluster: Cluster  # the machine
    # Number of nodes that each process group spans; a group that is not listed spans as few as can
    # hold its ranks.
    nodes_of: Mapping[str, int] = field(default_factory=dict)
    # Work of compute ops by name, from :func:`inductor_passes.adapters.roofline.work_of`. An op
    # that is not listed reads and writes its buffers, in a kernel of its own.
    work: Mapping[str, Work] = field(default_factory=dict)
    _links: dict[tuple[str, str, int], Link] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def compute_beside(self) -> float:
        return self.cluster.compute_beside

    def with_flat_buckets(self) -> ClusterCost:
        """The same cost model for buckets that travel as one buffer."""
        return replace(self, cluster=self.cluster.with_flat_buckets())

    def compute_us(self, program: Program, op: Op) -> float:
        work = self.work.get(op.name) or Work(nbytes=program.touched_nbytes(op))
        return self.cluster.compute_us(work)

    def collective_us(self, collective: Collective) -> float:
        key = (collective.kind, collective.group, collective.ranks)
        if key not in self._links:
            nodes = self.nodes_of.get(collective.group)
            self._links[key] = self.cluster.link_of(collective, nodes)
        return self._links[key].us(collective.nbytes, collective.ranks, collective.members)


def nodes_spanned(ranks: Sequence[int], world_size: int, ranks_per_node: int) -> int:
    """How many nodes a process group spans; the same for all groups of a mesh dimension.

    A mesh cuts the world into groups of equal stride, and a cut need not fall on the edge of a
    node; so the answer is for the group of this dimension that spans the most nodes. If the group
    has no constant stride, or does not fit the world, it is the most that any group of its size
    could span.

    Args:
        ranks: global ranks of one group.
        world_size: ranks in all.
        ranks_per_node: consecutive ranks share a node.
    """
    ranks = sorted(ranks)
    size, stride = len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
    block = size * stride
    is_regular = ranks == list(range(ranks[0], ranks[0] + block, stride))
    if not is_regular or ranks[0] % block >= stride or block > world_size:
        return min(size, -(-world_size // ranks_per_node))
    firsts = (b + i for b in range(0, world_size - block + 1, block) for i in range(stride))
    return max(
        len({(first + i * stride) // ranks_per_node for i in range(size)}) for first in firsts
    )
