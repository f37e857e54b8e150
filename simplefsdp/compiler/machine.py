"""The machine that plans are made for: named by an option, else found by its devices' name."""

from __future__ import annotations

import logging
from os import PathLike

import torch
import torch.distributed as dist

from inductor_passes.adapters.devices import cluster_of
from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.cluster_file import as_cluster
from inductor_passes.machine.presets import PRESETS
from simplefsdp._torch import ranks_per_node
from simplefsdp.rank_logging import speaks

log = logging.getLogger("simplefsdp")


def cluster_for(given: Cluster | str | PathLike[str] | None, device: torch.device) -> Cluster:
    """The cluster of this run.

    A preset or an estimate gets as many ranks per node as the launcher says, where that makes a
    difference; if nodes differ, their mean, rounded up.

    Args:
        given: ``options["cluster"]``; None for what
            :func:`~inductor_passes.adapters.devices.cluster_of` gives for ``device``. If that is an
            estimate, a warning says so once.
        device: of the parameters.

    Raises:
        TypeError, ValueError: there is no such cluster; or a cluster that was measured or made by
            hand has another number of ranks per node than this run.
    """
    cluster = as_cluster(given) if given is not None else cluster_of(device)
    if given is None and cluster.name not in PRESETS:
        _say_estimated(cluster)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    known, told = cluster.ranks_per_node, ranks_per_node(ranks)
    if told is None or told == known or ranks <= min(told, known):
        return cluster
    if given is None or (isinstance(given, str) and given in PRESETS):
        return cluster.with_nodes_of(told)
    raise ValueError(
        f"options['cluster']: {cluster.name!r} has {known} ranks on a node, but the {ranks} ranks "
        f"of this run were started {told} to a node; run `simplefsdp calibrate` under the same "
        f"launcher, or pass cluster.with_nodes_of({told})"
    )


def is_an_example(cluster: Cluster) -> bool:
    """Whether ``cluster`` is the preset for CPUs, with any number of ranks per node: the memory
    that it states is an example, which no machine has exactly."""
    of_cpus = PRESETS["cpu-gloo"]
    return (cluster.name, cluster.source) == (of_cpus.name, of_cpus.source)


_said: set[str] = set()


def _say_estimated(cluster: Cluster) -> None:
    if cluster.name in _said or not speaks():
        return
    _said.add(cluster.name)
    log.warning(
        "there is no preset for %s: plans are made for an estimate (%.0f TFLOP/s in bf16, %.0f "
        "GB/s and %.0f GB of memory, %.0f GB/s among eight on a node); `simplefsdp calibrate` "
        "measures it, for options={'cluster': ...}",
        cluster.name,
        cluster.peaks["bfloat16"].tflops,
        cluster.memory_gb_s,
        cluster.memory_gb,
        cluster.link("gather", 8, 1).gb_s,
    )
