"""Which members of a bucket share one buffer, and which are tensors of its call by themselves.

Each further tensor in a call costs time on the wire, and transfers slow the compute beside them. A
shared buffer costs copies, which compute waits for: gradients are copied into it, parameters out of
it. (Shards need no copy of their own: they are cast anyway, and reduced shards are views.) So small
members share a buffer if there are enough of them to pay for the copy kernel.

The planner prices every bucket without a shared buffer. A shared buffer is chosen only where it
costs compute less time, and it never costs the wire more; so a plan takes at most the predicted
time.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.ir.program import Collective
from inductor_passes.machine.cluster import Cluster


def members_to_pack(
    members: Sequence[Collective], cluster: Cluster, nodes: int | None = None
) -> tuple[int, ...]:
    """Places of the members that should share a buffer, even if the bucket's transfer is hidden.

    The result is the same on all ranks that launch the bucket, because they share its sizes.

    Args:
        members: of one bucket, so of one kind and group.
        cluster: the machine.
        nodes: number of nodes that the group spans; None for as few as can hold its ranks.
    """
    first = members[0]
    if first.kind == "other" or first.ranks < 2 or any(c.dtype != first.dtype for c in members):
        return ()
    link = cluster.link_of(first, nodes)
    member_us = link.member_us * (1 - cluster.compute_beside)
    copied = cluster.memory_gb_s * cluster.memory_fraction * 1e3 / 2  # bytes per us, there and back
    smallest = sorted(range(len(members)), key=lambda i: (members[i].nbytes, i))
    best, worth, spent = 0, 0.0, cluster.launch_us
    for n, i in enumerate(smallest):
        spent += members[i].nbytes / copied
        if n * member_us - spent > worth:
            best, worth = n + 1, n * member_us - spent
    return tuple(sorted(smallest[:best]))
