"""``--microbatch-size auto``: as many sequences at once as a rank has memory for, by prediction."""

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import torch

from inductor_passes.adapters.devices import cluster_of
from inductor_passes.machine.cluster import Cluster
from inductor_passes.machine.cluster_file import as_cluster
from simplefsdp.launcher.apart import processes
from simplefsdp.models.layout import RankLayout
from simplefsdp.sweep.cells import Cell, CellStep
from simplefsdp.sweep.fit import largest
from simplefsdp.sweep.models import swept_llama
from simplefsdp.sweep.traces import CellSweep
from simplefsdp.train.config import TrainConfig
from simplefsdp.train.dry_run import plan_memory
from simplefsdp.words import plural


def fitted(config: TrainConfig, layout: RankLayout, device: str) -> TrainConfig:
    """``config`` with a number of sequences where it says ``auto``, and a limit for later starts.

    The step is traced without allocating tensors, in a separate process: this process may be a
    rank, which has a process group already, or a launcher, which must not occupy a device.
    """
    if config.optim.microbatch_size != "auto":
        return config
    _check(config)
    precision = config.parallel.mixed_precision
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "none"
    shard = layout.shard if config.parallel.mode == "hybrid_shard" else None
    parallel = replace(config.parallel, mixed_precision=precision, shard_size=shard)
    print("--microbatch-size auto: predicting what fits ...", flush=True)
    try:
        with processes(1) as apart:
            asked = replace(config, parallel=parallel)
            size = apart.submit(_predicted, asked, layout, device).result()
    except BrokenProcessPool as error:
        raise ValueError(
            "--microbatch-size auto: the process that predicts what fits ended without an answer, "
            "killed for want of memory, it may be; what it printed is above; give a number"
        ) from error
    limit = config.optim.microbatch_limit or size
    why = (
        f"what each of {layout.dp} data-parallel ranks has memory and work for"
        if size <= limit
        else f"--microbatch-limit, by default what the run began with; {size} would fit"
    )
    taken = f"{plural(min(size, limit), 'sequence')} of "
    taken += f"{config.data.seq_len:,} tokens at once"
    print(f"--microbatch-size auto: {taken}: {why}", flush=True)
    optim = replace(config.optim, microbatch_size=min(size, limit), microbatch_limit=limit)
    return replace(config, optim=optim)


def _check(config: TrainConfig) -> None:
    given = {
        "--no-compile": not config.compile.compile,
        "--executor aot_eager": config.compile.executor == "aot_eager",
        "--memory-budget-gb": config.compile.memory_budget_gb is not None,
        "--gradient-accumulation-steps": config.optim.gradient_accumulation_steps is not None,
    }
    for option, is_given in given.items():
        if is_given:
            raise ValueError(
                f"--microbatch-size auto predicts what compiled kernels take under the plan's own "
                f"memory, and decides how many micro-batches there are; got {option}: leave that "
                "out, or give a number"
            )


def largest_microbatch(config: TrainConfig, layout: RankLayout, cluster: Cluster) -> int:
    """The most sequences at once that fit in nine tenths of a device's memory, at most a rank's
    part of the global batch; a ValueError says how much one sequence takes, if not even one fits.

    If the whole part does not fit, it is cut into micro-batches, and the full gradients that wait
    for the last micro-batch are counted as used memory.
    """
    part = max(1, config.data.global_batch_size // layout.dp)
    sweep = CellSweep(
        swept_llama(config.model, config.parallel),
        config.parallel,
        cluster,
        config.compile.bucketing,
    )
    cell = Cell(part, config.data.seq_len, layout.world_size)
    (whole,) = sweep.steps([cell])
    if whole.fits:
        return part
    pieces = replace(config, optim=replace(config.optim, microbatch_size=1))
    waiting = plan_memory(pieces, layout).deferred_nbytes

    def steps(sizes: Sequence[int]) -> list[CellStep]:
        found = sweep.steps([cell._replace(batch=size) for size in sizes])
        return [replace(step, room_nbytes=step.room_nbytes - waiting) for step in found]

    fits, not_ = largest(steps, part)
    if fits is not None:
        return fits.cell.batch
    recomputes = config.model.activation_checkpointing == "full"
    need = whole if part == 1 else not_
    assert need is not None  # part is at least 1, and it does not fit
    short = need.peak_nbytes - need.room_nbytes
    raise ValueError(
        f"--microbatch-size auto: one sequence of {cell.seq:,} tokens takes "
        f"{need.peak_nbytes / 1e9:.1f} GB"
        + (f" beside {waiting / 1e9:.1f} GB of full gradients that wait" if part > 1 else "")
        + f", and a device of {cluster.name} has {whole.room_nbytes / 1e9:.1f} GB to use, "
        f"{short / 1e6:,.0f} MB too little; give "
        + ("" if recomputes else "--activation-checkpointing full, ")
        + "a shorter --seq-len, or more ranks"
    )


def _predicted(config: TrainConfig, layout: RankLayout, device: str) -> int:
    """:func:`largest_microbatch` for the cluster of ``--cluster``, or for this machine's device."""
    if config.compile.cluster is not None:
        return largest_microbatch(config, layout, as_cluster(config.compile.cluster))
    try:
        cluster = cluster_of(torch.device(device))
    except ValueError as error:
        raise ValueError(
            f"--microbatch-size auto: there are no figures of this machine's {device} devices; "
            "give --cluster, a preset or a file of `simplefsdp calibrate`, or a number"
        ) from error
    return largest_microbatch(config, layout, cluster)
