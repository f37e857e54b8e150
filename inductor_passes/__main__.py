"""Run passes on a program in text form, and print what each makes of it.

    python -m inductor_passes program.txt -p merge,order,simulate

The text form is that of :mod:`inductor_passes.ir.text`; what this prints can be read again. The
logs in ``TORCH_TRACE`` contain the program of every graph that the backend compiles, before and
after the passes. No torch is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from inductor_passes.ir.buckets import assign_by_module
from inductor_passes.ir.program import Program
from inductor_passes.ir.text import parse, to_text
from inductor_passes.machine.bound import lower_bound_us
from inductor_passes.machine.cluster import ClusterCost
from inductor_passes.machine.cluster_file import as_cluster
from inductor_passes.machine.cost import CostModel, LinearCost
from inductor_passes.machine.presets import PRESETS
from inductor_passes.machine.simulate import memory, simulate
from inductor_passes.planner.auto import plan_auto
from inductor_passes.transform.merge import merge
from inductor_passes.transform.order import OverlapPolicy, overlapped
from inductor_passes.transform.windows import buckets_by_module

Pass = Callable[[Program, CostModel], Program]


def by_module(program: Program, cost: CostModel) -> Program:
    """Merge the collectives of each module, as ``bucketing="manual"`` does."""
    return merge(program, buckets_by_module(program, assign_by_module(_fqns(program))))


def planned(program: Program, cost: CostModel) -> Program:
    """Merge the buckets that the planner chooses, as ``bucketing="auto"`` does."""
    return merge(program, plan_auto(program, cost, _fqns(program)).buckets)


def ordered(program: Program, cost: CostModel) -> Program:
    """Move starts and waits to where compute hides what is sent."""
    return overlapped(program, OverlapPolicy())


def simulated(program: Program, cost: CostModel) -> Program:
    """Change nothing; print when each transfer runs, what is exposed, and the memory."""
    timeline, found = simulate(program, cost), memory(program)
    for span in timeline.spans:
        if span.lane != "compute":
            exposed = timeline.exposed_us[span.op]
            when = f"{span.begin_us:9.1f} to {span.end_us:9.1f} us"
            print(f"# {when}, exposed {exposed:8.1f}: {span.op} on {span.lane}")
    print(
        f"# {timeline.total_us:.1f} us (no plan is below {lower_bound_us(program, cost):.1f}), "
        f"{timeline.stalled_us:.1f} exposed; peak {found.peak_nbytes:,} bytes in {found.peak_op}"
    )
    return program


PASSES: dict[str, Pass] = {
    "merge": by_module,
    "auto": planned,
    "order": ordered,
    "simulate": simulated,
}


def _fqns(program: Program) -> list[str]:
    return list(dict.fromkeys(fqn for c in program.sent.values() for fqn in c.fqns))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for bad input, which one line on stderr names."""
    parser = argparse.ArgumentParser(
        prog="python -m inductor_passes",
        description="Run passes on a program, and print it after each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="passes:\n" + "\n".join(f"  {name:10}{f.__doc__}" for name, f in PASSES.items()),
    )
    parser.add_argument("program", help="a file in the language of inductor_passes.ir.text, or -")
    parser.add_argument(
        "-p", "--passes", default="merge,order,simulate", help="in turn; default: %(default)s"
    )
    parser.add_argument(
        "--cluster",
        help=f"what time is told for: {', '.join(PRESETS)}, or a file of `simplefsdp calibrate`. "
        "Default: latency and bandwidth of 8 H100",
    )
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.passes.split(",")]
    unknown = [name for name in names if name not in PASSES]
    if unknown:
        parser.error(f"--passes: there is no {unknown[0]!r}; expected of {', '.join(PASSES)}")
    try:
        text = sys.stdin.read() if options.program == "-" else Path(options.program).read_text()
        cost = ClusterCost(as_cluster(options.cluster)) if options.cluster else LinearCost()
        program = parse(text)
        for name in names:
            print(f"# {name}")
            program = PASSES[name](program, cost)
            if name != "simulate":
                print(to_text(program))
    except BrokenPipeError:  # `| head` has read enough
        sys.stderr.close()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
