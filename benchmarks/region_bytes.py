"""Bytes that the Triton kernels of a step read and write: the whole graph against regions.

    python benchmarks/region_bytes.py [--tokens 4096] [--json benchmarks/results/region_bytes.json]

Needs no GPU: Inductor writes its CUDA code for an H100 that is not there (``tests/cuda``), and says
of each kernel how many bytes it moves. Four layers of the row ``gpu`` (4,096 wide, bf16), on 8
ranks. Matrix products, attention and collectives are the same in both and are not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "cuda"))
from cases import CASES, compiled  # type: ignore[import-not-found]  # before torch

# isort: split
import torch
from report import environment
from torch._inductor import config as inductor_config

from inductor_passes.executor import regional

_KERNEL = re.compile(r"(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", re.DOTALL)
_NGB = re.compile(r"'kernel_num_gb': ([0-9.e-]+)")
_RUN = re.compile(r"(\w+)\.run\(")


def moved(code: str) -> tuple[int, float]:
    """Launches of Triton kernels by one call of generated code, and 1e9 bytes that these move."""
    ngb = {}
    for name, source in _KERNEL.findall(code):
        found = _NGB.search(source)
        ngb[name] = float(found[1]) if found else 0.0
    body = code[code.rindex("def call(") :].split("\ndef benchmark", 1)[0]
    launched = [name for name in _RUN.findall(body) if name in ngb]
    return len(launched), sum(ngb[name] for name in launched)


def of_executor(executor: str, tokens: int) -> dict[str, Any]:
    """What forward and backward move, under the plan of auto."""
    calls: list[tuple[bool, int]] = []  # of regions: whether in backward, and which code
    known: dict[object, int] = {}
    code_of = regional.Codes.code_of

    def noted(codes: regional.Codes, region: Any, *, is_backward: bool) -> Any:
        key = regional.structure_of(region), is_backward
        calls.append((is_backward, known.setdefault(key, len(known))))
        return code_of(codes, region, is_backward=is_backward)

    case = replace(
        CASES["auto"], executor=executor, layers=4, width=4096, vocab=32000, ffn=11008,
        tokens=tokens, attention="cudnn", checkpointing="selective",
    )  # fmt: skip
    regional.Codes.code_of = noted  # type: ignore[method-assign, assignment]
    try:
        with inductor_config.patch(benchmark_kernel=True):  # which has bytes counted
            codes = compiled(case)["codes"]
    finally:
        regional.Codes.code_of = code_of  # type: ignore[method-assign]
    each = [moved(code) for code in codes]
    if executor == "inductor":
        calls = [(False, 0), (True, 1)]
    launches, ngb = Counter[bool](), Counter[bool]()
    for is_backward, at in calls:
        launches[is_backward] += each[at][0]
        ngb[is_backward] += each[at][1]  # type: ignore[assignment]
    return {
        "codes": len(codes),
        "launches": [launches[False], launches[True]],
        "gb": [round(ngb[False], 3), round(ngb[True], 3)],
    }


def main() -> None:
    """Compare the two executors."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {name: of_executor(name, args.tokens) for name in ("inductor", "regions")}
    for name, row in found.items():
        forward, backward = row["gb"]
        print(f"{name}: {row['codes']} codes, {row['launches']} launches, "
              f"{forward:.3f} + {backward:.3f} GB")  # fmt: skip
    if args.json:
        cells = {
            "environment": environment(torch.device("cpu")),
            "tokens": args.tokens,
            "executors": found,
        }
        args.json.write_text(json.dumps(cells, indent=1) + "\n")


if __name__ == "__main__":
    main()
