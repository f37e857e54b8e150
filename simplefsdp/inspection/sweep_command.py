"""``simplefsdp inspect --fit`` and ``--sweep``: from the command line to tables and files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from inductor_passes.ir.cells import CellError
from inductor_passes.machine.cluster import Cluster, UnknownLinkError
from inductor_passes.rehearsal import USABLE
from simplefsdp.inspection.names import nbytes_text, over_text, time_text
from simplefsdp.inspection.options import InspectOptions, parallel_options, recomputed
from simplefsdp.inspection.subject import as_inputs, called, load, tracing_target, wants_mesh
from simplefsdp.inspection.sweep_document import cell_row, sweep_document
from simplefsdp.inspection.tables import console
from simplefsdp.inspection.working import working
from simplefsdp.launcher.errors import UserError, user_errors
from simplefsdp.models.options import ActivationCheckpointing, ModelOptions
from simplefsdp.simulation.trace import UntraceableError
from simplefsdp.sweep.axes import cells_of, parse_axes
from simplefsdp.sweep.cells import Cell, CellStep
from simplefsdp.sweep.fit import MOST, largest
from simplefsdp.sweep.models import (
    SweptModel,
    swept_llama,
    swept_target,
    swept_transformers,
)
from simplefsdp.sweep.plans import SWEEP_PLANS, SweepPlan
from simplefsdp.sweep.traces import CellSweep
from simplefsdp.words import plural

if TYPE_CHECKING:
    from rich.table import Table


def run(options: InspectOptions, cluster: Cluster) -> int:
    """Run what is asked for; return the exit code."""
    if options.bucketing not in SWEEP_PLANS:
        raise UserError(
            f"--bucketing {options.bucketing}: --fit and --sweep plan by one of "
            f"{', '.join(SWEEP_PLANS)}"
        )
    return _sweep(options, cluster) if options.sweep else _fit(options, cluster)


def _sweep_of(options: InspectOptions, cluster: Cluster) -> CellSweep:
    parallel = parallel_options(options)
    if options.target is not None and options.input is not None:
        swept = _swept_target(options.target, options.input)
    elif options.hf is not None:
        name = ModelOptions("", recomputed(options))
        swept = swept_transformers(options.hf, name, parallel, options.layers)
    else:
        name = ModelOptions(options.model or "", recomputed(options))
        swept = swept_llama(name, parallel, options.layers)
    swept = replace(swept, build=_checked(swept.build))
    bucketing: SweepPlan = options.bucketing  # type: ignore[assignment]  # refused if it is another
    return CellSweep(swept, parallel, cluster, bucketing)


def _swept_target(target: str, example: str) -> SweptModel:
    build, make_input = load("--target", target), load("--input", example)
    takes_mesh = wants_mesh(build)
    return swept_target(
        target,
        lambda mesh: called("--target", target, build, *([mesh] if takes_mesh else [])),
        lambda: as_inputs(called("--input", example, make_input)),
    )


def _checked(build: Callable[[int, DeviceMesh], nn.Module]) -> Callable[..., nn.Module]:
    """``build``; what cannot be built so was asked for."""

    def checked(depth: int, mesh: DeviceMesh) -> nn.Module:
        with user_errors():
            return build(depth, mesh)

    return checked


def _steps(options: InspectOptions, sweep: CellSweep, cells: Sequence[Cell]) -> list[CellStep]:
    """The step in each cell.

    Raises:
        UserError: the model cannot be traced with its sizes left open, or the cluster's figures
            are not enough for it.
    """
    told: AbstractContextManager[None] = nullcontext()
    if options.target is not None and options.input is not None:
        told = tracing_target(options.target, options.input)
    try:
        with told:
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


def _sweep(options: InspectOptions, cluster: Cluster) -> int:
    with user_errors():
        sweep = _sweep_of(options, cluster)
        axes = parse_axes(options.sweep, _cell(options, sweep))
        _check_longest(sweep, axes["seq"])
        axes["ranks"], left_out = _laid_out(sweep, axes["ranks"])
    cells = cells_of(axes)
    with working(f"{sweep.model.name} on {cluster.name} in {plural(len(cells), 'cell')}"):
        steps = _steps(options, sweep, cells)
    document = sweep_document(sweep, axes, steps, _told_options(options))
    out = console()
    out.print(_front(document))
    for why in left_out:
        out.print(f"left out: {why}")
    fitting = [step for step in steps if step.fits]
    out.print(
        f"{len(fitting):,} of {plural(len(steps), 'cell')} fit; "
        f"{plural(len(sweep.traced), 'trace')}. Plans are auto's without its searches, and nothing "
        "was measured."
        if sweep.bucketing == "auto"
        else f"{len(fitting):,} of {plural(len(steps), 'cell')} fit; nothing was measured."
    )
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        out.print(f"wrote {options.json}", soft_wrap=True)
    if options.html is not None:
        from simplefsdp.inspection.sweep_page import sweep_page

        options.html.write_text(sweep_page(document))
        out.print(f"wrote {options.html}", soft_wrap=True)
    return 0


def _laid_out(sweep: CellSweep, ranks: Sequence[int]) -> tuple[tuple[int, ...], list[str]]:
    """The numbers of ranks that can be laid out, and of each other one why it cannot.

    Raises:
        ValueError: none can.
    """
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


def _told_options(options: InspectOptions) -> dict[str, Any]:
    """How the model is made; of a target's all None, as its function decides."""
    told = {"activation_checkpointing": recomputed(options)}
    names = ("mode", "shard_size", "tp", "mixed_precision", "reshard_after_forward", "layers")
    told |= {name: getattr(options, name) for name in names}
    return told if options.target is None else dict.fromkeys(told)


def _front(document: dict[str, Any]) -> Table:
    """The cells on the front."""
    table = _table(
        f"{document['name']} on {document['cluster']}: the best that fit, by sequence length",
        ("seq", "ranks", "batch", "tokens/s", *_COLUMNS),
    )
    rows = [row for row in document["cells"] if row["pareto"]]
    for row in sorted(rows, key=lambda row: (row["seq"], row["ranks"], row["batch"])):
        sizes = [f"{row[name]:,}" for name in ("seq", "ranks", "batch")]
        table.add_row(*sizes, f"{row['tokens_per_second']:,.0f}", *_columns(row))
    return table


_COLUMNS = ("tokens/s/rank", "MFU", "step", "exposed", "peak", "binds")


def _columns(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['tokens_per_second_per_rank']:,.0f}",
        "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
        time_text(row["step_us"]),
        f"{row['exposed_share']:.1%}",
        nbytes_text(row["peak_bytes"]),
        row["binds"],
    ]


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in _WORDS else "right")
    return table


_WORDS = ("activations recomputed", "parameters kept", "binds")


class _Fitted(NamedTuple):
    """A row of what fits.

    Attributes:
        options: of this row.
        sweep: of these.
        fits: the largest step that does, if any.
        more: the next one, which does not, if any.
    """

    options: InspectOptions
    sweep: CellSweep
    fits: CellStep | None
    more: CellStep | None


def _fit(options: InspectOptions, cluster: Cluster) -> int:
    """The largest batch or the longest sequence, by what is recomputed and what is kept."""
    rows = []
    for recomputes, reshard in _variants(options):
        its = replace(options, activation_checkpointing=recomputes, reshard_after_forward=reshard)
        with user_errors():
            sweep = _sweep_of(its, cluster)
            cell = _cell(its, sweep)
            _check_longest(sweep, [cell.seq])
            sweep.layout(cell.ranks)
        variant = f"recomputing {recomputes}, parameters kept: {'no' if reshard else 'yes'}"
        with working(variant if options.target is None else sweep.model.name):
            rows.append(_Fitted(its, sweep, *_largest(its, sweep, cell)))
    _print_fit(options, cluster, rows)
    return 0


def _variants(options: InspectOptions) -> Iterator[tuple[ActivationCheckpointing, bool]]:
    """What is recomputed, and whether parameters are gathered again."""
    if options.target is not None:  # its function decides
        return iter([(recomputed(options), options.reshard_after_forward)])
    ours: list[ActivationCheckpointing] = [*get_args(ActivationCheckpointing)]
    if options.hf is not None:
        ours.remove("selective")
    return itertools.product(ours, (True, False))


def _largest(
    options: InspectOptions, sweep: CellSweep, cell: Cell
) -> tuple[CellStep | None, CellStep | None]:
    what = options.fit or "batch"
    most, multiple = MOST[what], 1
    if what == "seq":
        most = min(most, sweep.model.longest or most)
        multiple = _multiple(sweep)
    return largest(
        lambda sizes: _steps(options, sweep, [cell._replace(**{what: n}) for n in sizes]),
        most,
        multiple,
    )


def _multiple(sweep: CellSweep) -> int:
    """Of which sequences are looked at."""
    return min(128, sweep.model.longest or 128)


def _print_fit(options: InspectOptions, cluster: Cluster, rows: Sequence[_Fitted]) -> None:
    fit = options.fit or "batch"
    what = {"batch": "batch", "seq": "sequence"}[fit]
    sweep = rows[0].sweep
    cell = _cell(options, sweep)
    given = f"{cell.seq:,} tokens" if fit == "batch" else f"batch {cell.batch}"
    columns = ("activations recomputed", "parameters kept", f"largest {what}", *_COLUMNS)
    title = f"{sweep.model.name} on {options.ranks} ranks of {cluster.name}, {given}"
    if options.target is None:
        title += f", {options.mode}, {options.mixed_precision}"
    table = _table(title, (*columns, f"one more {what}"))
    found_json = []
    for row in rows:
        told = _told_options(row.options)
        recomputes = told["activation_checkpointing"]
        reshard = told["reshard_after_forward"]
        fits = None if row.fits is None else cell_row(row.sweep, row.fits)
        more = None if row.more is None else cell_row(row.sweep, row.more)
        table.add_row(
            recomputes or "-",
            {True: "no", False: "yes", None: "-"}[reshard],
            "none" if fits is None else f"{fits[fit]:,}",
            *(["-"] * len(_COLUMNS) if fits is None else _columns(fits)),
            "-" if more is None else over_text(more["peak_bytes"], more["room_bytes"]),
        )
        found_json.append(
            {
                "activation_checkpointing": recomputes,
                "reshard_after_forward": reshard,
                "largest": fits,
                "next": more,
            }
        )
    out = console()
    out.print(table)
    room = nbytes_text(round(USABLE * cluster.memory_gb * 1e9))
    looked_at = f"; of sequences, multiples of {_multiple(sweep)} were looked at"
    out.print(
        f"a device has {cluster.memory_gb:g} GB, of which {room} are taken to be usable; nothing "
        f"was measured{looked_at if fit == 'seq' else ''}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"version": 1, "fit": found_json}, indent=1) + "\n")
        out.print(f"wrote {options.json}", soft_wrap=True)
