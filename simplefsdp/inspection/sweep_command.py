"""``simplefsdp inspect --fit`` and ``--sweep``: from the command line to tables and files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from operator import itemgetter
from typing import Any, get_args

from rich.table import Table

from inductor_passes.ir.cells import CellError
from inductor_passes.machine.cluster import Cluster, UnknownLinkError
from inductor_passes.rehearsal import USABLE
from simplefsdp.choices import Bucketing
from simplefsdp.frontend.post_forward_groups import neighbours
from simplefsdp.inspection.names import nbytes_text, over_text, time_text
from simplefsdp.inspection.options import InspectOptions, parallel_options, recomputed
from simplefsdp.inspection.subject import Target
from simplefsdp.inspection.sweep_document import cell_row, sweep_document
from simplefsdp.inspection.terminal import console, save, save_json, table_of, working
from simplefsdp.launcher.apart import shared_out
from simplefsdp.launcher.errors import UserError, user_errors
from simplefsdp.models.layout import plan_layout
from simplefsdp.models.options import ActivationCheckpointing, ModelOptions, ParallelOptions
from simplefsdp.simulation.trace import UntraceableError
from simplefsdp.sweep.axes import cells_of, parse_axes
from simplefsdp.sweep.cells import Cell, CellStep
from simplefsdp.sweep.fit import MOST, largest
from simplefsdp.sweep.models import swept_llama, swept_target, swept_transformers
from simplefsdp.sweep.plans import SWEEP_PLANS
from simplefsdp.sweep.traces import CellSweep
from simplefsdp.words import plural

_AT_ONCE = 4  # processes, each of which takes 1 GB
_COLUMNS = ("tokens/s/rank", "MFU", "step", "exposed", "peak", "binds")


def run(options: InspectOptions, cluster: Cluster) -> None:
    if options.bucketing not in SWEEP_PLANS:
        raise UserError(
            f"--bucketing {options.bucketing}: --fit and --sweep plan by one of "
            f"{', '.join(SWEEP_PLANS)}"
        )
    if options.sweep:
        _sweep(options, cluster)
    else:
        _fit(options, cluster)


def _sweep_of(options: InspectOptions, cluster: Cluster) -> CellSweep:
    parallel = parallel_options(options)
    if options.target is not None and options.input is not None:
        target = Target(options.target, options.input)
        swept = swept_target(target.name, target.build, target.inputs)
        swept = replace(swept, tracing=target.tracing)
    else:
        model = ModelOptions(options.model or "", recomputed(options))
        if options.hf is not None:
            swept = swept_transformers(options.hf, model, parallel, options.layers)
        else:
            swept = swept_llama(model, parallel, options.layers)
    # A model that cannot be built is a mistake in the user's options.
    swept = replace(swept, build=user_errors()(swept.build))
    bucketing: Bucketing = options.bucketing  # type: ignore[assignment]  # refused if it is another
    return CellSweep(swept, parallel, cluster, bucketing)


def _steps(sweep: CellSweep, cells: Sequence[Cell]) -> list[CellStep]:
    """The predicted step of each cell."""
    try:
        with sweep.model.tracing():
            return sweep.steps(cells)
    except (CellError, UntraceableError, UnknownLinkError) as error:
        raise UserError(str(error)) from error


def _cell(options: InspectOptions, sweep: CellSweep) -> Cell:
    if "seq" not in sweep.model.open_sizes:
        asked = options.seq_len or options.fit == "seq"
        if asked or any(axis.startswith("seq") for axis in options.sweep):
            raise ValueError(
                f"{sweep.model.name} takes no tokens, integers [batch, seq], so it has no sequence "
                "to choose: leave out --seq-len, --fit seq and --sweep seq=...; what is told as "
                "tokens is samples"
            )
        return Cell(options.batch_size, 1, options.ranks)
    seq = options.seq_len or min(8192, sweep.model.longest or 8192)
    return Cell(options.batch_size, seq, options.ranks)


def _sweep(options: InspectOptions, cluster: Cluster) -> None:
    with user_errors():
        sweep = _sweep_of(options, cluster)
        axes = parse_axes(options.sweep, _cell(options, sweep))
        _check_longest(sweep, axes["seq"])
        axes["ranks"], left_out = _laid_out(sweep, axes["ranks"])
    cells = cells_of(axes)
    with working(f"{sweep.model.name} on {cluster.name} in {plural(len(cells), 'cell')}"):
        steps = _steps(sweep, cells)
    document = sweep_document(sweep, axes, steps, _told_options(options))
    out = console()
    out.print(_fastest(document))
    for why in left_out:
        out.print(f"left out: {why}")
    fitting = sum(step.fits for step in steps)
    auto = (
        f"; {plural(len(sweep.traced), 'trace')}. Plans are auto's without its searches, and"
        if sweep.bucketing == "auto"
        else ";"
    )
    out.print(f"{fitting:,} of {plural(len(steps), 'cell')} fit{auto} nothing was measured.")
    save_json(out, options.json, document)
    if options.html is not None:
        from simplefsdp.inspection.page import sweep_page

        save(out, options.html, sweep_page(document))


def _laid_out(sweep: CellSweep, ranks: Sequence[int]) -> tuple[tuple[int, ...], list[str]]:
    """The numbers of ranks for which there is a layout; and for each of the others, why not."""
    left_out: dict[int, ValueError] = {}
    for n in ranks:
        try:
            sweep.layout(n)
        except ValueError as error:
            left_out[n] = error
    if len(left_out) == len(ranks):
        raise left_out[ranks[0]]
    kept = tuple(n for n in ranks if n not in left_out)
    return kept, [f"ranks {n}: {error}" for n, error in left_out.items()]


def _check_longest(sweep: CellSweep, lengths: Sequence[int]) -> None:
    longest = sweep.model.longest
    if longest is not None and max(lengths) > longest:
        raise ValueError(f"seq {max(lengths)} is longer than {sweep.model.name} takes ({longest})")


_OF_PARALLEL = tuple(field.name for field in fields(ParallelOptions) if field.name != "ranks")


def _told_options(options: InspectOptions) -> dict[str, Any]:
    """The options with which the model is made; for a target they are None, as its function
    decides."""
    told = {"activation_checkpointing": recomputed(options)}
    told |= {name: getattr(options, name) for name in (*_OF_PARALLEL, "layers")}
    return told if options.target is None else dict.fromkeys(told)


def _fastest(document: dict[str, Any]) -> Table:
    """For each sequence length and number of ranks, the cell with the most tokens per second; if
    none fits, the peak memory of the smallest one."""
    title = f"{document['name']} on {document['cluster']}: the fastest that fits"
    sizes = ("seq", "ranks", "batch")
    table = table_of(*sizes, "tokens/s", *_COLUMNS, words=("binds",), title=title)
    place = itemgetter("seq", "ranks")
    for _, group in itertools.groupby(sorted(document["cells"], key=place), key=place):
        cells = list(group)
        if fitting := [row for row in cells if row["fits"]]:
            row = max(fitting, key=itemgetter("tokens_per_second"))
            told = [f"{row['tokens_per_second']:,.0f}", *_columns(row)]
        else:
            row = min(cells, key=itemgetter("peak_bytes"))
            told = ["-"] * (len(_COLUMNS) - 1) + [nbytes_text(row["peak_bytes"]), "does not fit"]
        table.add_row(*(f"{row[name]:,}" for name in sizes), *told)
    return table


def _columns(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['tokens_per_second_per_rank']:,.0f}",
        "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
        time_text(row["step_us"]),
        f"{row['exposed_share']:.1%}",
        nbytes_text(row["peak_bytes"]),
        row["binds"],
    ]


def _fit(options: InspectOptions, cluster: Cluster) -> None:
    """Print the largest batch, or the longest sequence, for each choice of activation checkpointing
    and of keeping parameters."""
    with user_errors():
        chosen = _variants(options, cluster)
        sweep = _sweep_of(chosen[0], cluster)
        cell = _cell(options, sweep)
        _check_longest(sweep, [cell.seq])
        sweep.layout(cell.ranks)
    at_once = min(os.cpu_count() or 1, _AT_ONCE)
    with working(f"{sweep.model.name}, {plural(len(chosen), 'way')} to train it") as say:
        row_of = partial(_fit_row, cluster=cluster, cell=cell)
        rows = shared_out(row_of, chosen, at_once, lambda its: say(f"done: {_variant(its)}"))
    given = f"batch {cell.batch}" if options.fit == "seq" else f"{cell.seq:,} tokens"
    title = f"{sweep.model.name} on {options.ranks} ranks of {cluster.name}, {given}"
    if options.target is None:
        title += f", {options.mode}, {options.mixed_precision}"
    out = console()
    out.print(_fit_table(title, options.fit or "batch", rows))
    room = nbytes_text(round(USABLE * cluster.memory_gb * 1e9))
    looked_at = f"; of sequences, multiples of {_multiple(sweep)} were looked at"
    out.print(
        f"a device has {cluster.memory_gb:g} GB, of which {room} are taken to be usable; nothing "
        f"was measured{looked_at if options.fit == 'seq' else ''}"
    )
    save_json(out, options.json, {"version": 1, "fit": rows})


def _fit_row(options: InspectOptions, cluster: Cluster, cell: Cell) -> dict[str, Any]:
    """The largest that fits, and the next, which does not."""
    with user_errors():
        sweep = _sweep_of(options, cluster)
    told = _told_options(options)
    names = ("activation_checkpointing", "reshard_after_forward", "post_forward_ranks")
    row = {name: told[name] for name in names}
    fits, more = _largest(options, sweep, cell)
    row["largest"] = None if fits is None else cell_row(sweep, fits)
    row["next"] = None if more is None else cell_row(sweep, more)
    return row


def _variant(options: InspectOptions) -> str:
    if options.target is not None:
        return options.target
    kept = _kept(options.reshard_after_forward, options.post_forward_ranks)
    return f"recomputing {options.activation_checkpointing}, parameters kept: {kept}"


def _kept(reshard: bool | None, post_forward_ranks: int | None) -> str:
    if reshard is None:
        return "-"
    if post_forward_ranks is not None:
        return f"1/{post_forward_ranks}"
    return "no" if reshard else "yes"


def _variants(options: InspectOptions, cluster: Cluster) -> list[InspectOptions]:
    """The choices that ``--fit`` compares: activation checkpointing, and whether backward gathers
    parameters again: from all ranks, from those of one node, if there are several, or not."""
    if options.target is not None:  # its function decides
        return [replace(options, activation_checkpointing=recomputed(options))]
    ours: list[ActivationCheckpointing] = [*get_args(ActivationCheckpointing)]
    if options.hf is not None:
        ours.remove("selective")
    again: list[tuple[bool, int | None]] = [(True, None), (False, None)]
    layout = plan_layout(parallel_options(options), options.ranks, cluster.ranks_per_node)
    sharing = range(0, layout.shard * layout.tp, layout.tp)
    if (here := neighbours(sharing, cluster.ranks_per_node)) > 1:
        again.insert(1, (True, here))
    return [
        replace(
            options,
            activation_checkpointing=recomputes,
            reshard_after_forward=reshard,
            post_forward_ranks=ranks,
        )
        for recomputes, (reshard, ranks) in itertools.product(ours, again)
    ]


def _largest(
    options: InspectOptions, sweep: CellSweep, cell: Cell
) -> tuple[CellStep | None, CellStep | None]:
    what = options.fit or "batch"
    most, multiple = MOST[what], 1
    if what == "seq":
        most = min(most, sweep.model.longest or most)
        multiple = _multiple(sweep)
    return largest(
        lambda sizes: _steps(sweep, [cell._replace(**{what: n}) for n in sizes]),
        most,
        multiple,
    )


def _multiple(sweep: CellSweep) -> int:
    """Only sequence lengths that are multiples of this are tried."""
    return min(128, sweep.model.longest or 128)


def _fit_table(title: str, fit: str, rows: Sequence[dict[str, Any]]) -> Table:
    what = "sequence" if fit == "seq" else fit
    words = ("activations recomputed", "parameters kept")
    numbers = (f"largest {what}", *_COLUMNS, f"one more {what}")
    table = table_of(*words, *numbers, words=(*words, "binds"), title=title)
    for row in rows:
        fits, more = row["largest"], row["next"]
        table.add_row(
            row["activation_checkpointing"] or "-",
            _kept(row["reshard_after_forward"], row["post_forward_ranks"]),
            "none" if fits is None else f"{fits[fit]:,}",
            *(["-"] * len(_COLUMNS) if fits is None else _columns(fits)),
            "-" if more is None else over_text(more["peak_bytes"], more["room_bytes"]),
        )
    return table
