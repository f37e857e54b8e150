"""What the wrap makes of ``reshard_after_forward``, and who are the neighbours that have parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch.distributed as dist

from simplefsdp._torch import group_of_neighbours, ranks_per_node
from simplefsdp.frontend.placement import DataParallel
from simplefsdp.rank_guard import have_the_same, ranks_of, waiting_s


def after_forward(dp: DataParallel, wanted: bool | int | Literal["auto"]) -> dict[str, Any]:
    """What ``reshard_after_forward=wanted`` stands for, as fields of a ``GatherSpec``. A number
    other than those that stand for True and False makes process groups, collectively; and so does
    ``"auto"``, if the ranks that share the shards are on several machines.

    Raises:
        ValueError: the number does not divide the ranks that share the shards.
    """
    name, ranks = dp.group_of(dp.shard_dim)
    if isinstance(wanted, bool):
        return {"reshard_after_forward": wanted}
    if wanted == "auto":
        neighbours = _of_one_machine(dp)
        return _of_neighbours(name, neighbours) | {"reshard_after_forward": "auto"}
    if wanted < 1 or ranks % wanted:
        raise ValueError(
            f"reshard_after_forward: got {wanted}, which does not divide the {ranks} ranks that "
            "share the shards; expected True, False, 'auto' or a divisor, such as the number of "
            "ranks of one machine"
        )
    if wanted in (1, ranks):
        return {"reshard_after_forward": wanted > 1}
    return _of_neighbours(name, wanted) | {"reshard_after_forward": True}


def _of_neighbours(name: str, ranks: int) -> dict[str, Any]:
    if ranks == 1:
        return {}
    group, place = group_of_neighbours(name, ranks)
    return {
        "post_forward_group": group,
        "post_forward_ranks": ranks,
        "post_forward_rank": place,
    }


def _of_one_machine(dp: DataParallel) -> int:
    """How many neighbours among the ranks that share the shards are on one machine, if on each as
    many are; 1 if that is not known, or all of them are. The same on all ranks."""
    per_machine = ranks_per_node(dist.get_world_size())
    found = 1
    if dp.shard_dim is not None and per_machine:
        ranks = dist.get_process_group_ranks(dp.mesh.get_group(dp.shard_dim))
        found = neighbours(ranks, per_machine)
    what = "the number of ranks that are neighbours on a machine"
    return found if have_the_same(what, str(found), ranks_of([dp.mesh]), waiting_s()) else 1


def neighbours(ranks: Sequence[int], ranks_per_machine: int) -> int:
    """How many of ``ranks``, one after the other, are on one machine; 1 if that differs between the
    machines, or if one has all."""
    machines = [rank // ranks_per_machine for rank in ranks]
    numbers = set(Counter(machines).values())
    in_turn = machines == sorted(machines)
    return numbers.pop() if in_turn and len(numbers) == 1 < len(set(machines)) else 1
