"""Which members of a bucket share one buffer, and which are tensors of its call by themselves.

A tensor more in a call takes the wire longer, and what the wire takes slows what is computed
beside it. A buffer takes copies, which compute waits for: of gradients into it, of parameters out
of it. (Shards are cast anyway, and reduced shards are views.) So small members share one, if they
are enough to pay for the kernel.

The planner prices every bucket without a shared buffer. As one is chosen only where it takes
compute less time, and the wire never more, a plan takes at most what was predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.ir.program import Collective
from inductor_passes.machine.cluster import Cluster


def members_to_pack(
    members: Sequence[Collective], cluster: Cluster, nodes: int | None = None
) -> tuple[int, ...]:
    """Places of the members that are worth a buffer of their own, even if the wire is hidden.

    The same on all ranks that launch the bucket, for they share its sizes.

    Args:
        members: of one bucket, all of a kind and a group.
        cluster: what the machine is.
        nodes: that the group spans; None for the fewest that hold its ranks.
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
