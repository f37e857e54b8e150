"""Part e: what a step takes of the host; the optimizer and clipping at the shapes of 8B on 8 ranks;
a matrix product that writes fp32 against one that is cast.

The wire sends nothing here: else the host would launch two kernels and record events for each
collective, in Python, as no user's does. (Torch's ``fake`` group would launch a copy for each rank
and gathered tensor.) What NCCL's own launches take is not in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import measure as measuring
import torch
import wire
from graphed import GRAPHED
from ledger import Part, part, seconds
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from variants import BUILDERS
from workloads import disconnect, pretend, rows, use_calibration

from simplefsdp import clip_grad_norm_, simple_fsdp
from simplefsdp.models.configs import CONFIGS
from simplefsdp.models.llama3 import Llama

VARIANTS = ("floor", "fsdp2_eager", "fsdp2_compiled", "manual", "auto", "auto_regions")
CAPTURED = ("auto_graphs", "auto_cudagraphs")
SMALLEST = ("fsdp2_eager", "auto")
GB_S = 400.0  # of the wire that auto is planned for, and that nothing waits for: an H100's NVLink


def host_s(run: Part, variant: str) -> dict[str, Any]:
    """Seconds until forward and backward are launched; the device is idle before, and not waited
    for."""
    row = next(iter(rows(run).values()))
    wire.connect(row.world_size)
    wire.set_link(row.latency_us / 1e6, GB_S * 1e9)
    wire.link.sends = False
    with run.turns.shared():
        load = measuring.workload(row, run.device)
        built = (BUILDERS | GRAPHED)[variant](load)

        def launched() -> tuple[float, float]:
            built.optimizer.zero_grad(set_to_none=True)
            _synchronize(run)
            begin = time.perf_counter()
            loss = built.step(load.tokens, load.targets)
            between = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            _synchronize(run)
            return between - begin, end - between

        launched()  # compiles
    with run.turns.alone():
        steps = [launched() for _ in range(1 if run.smallest else 12)][-10:]
    forward, backward = map(statistics.median, zip(*steps, strict=True))
    found = {"forward_host_s": forward, "backward_host_s": backward}
    return {"sends": wire.link.sends, **found}


def _synchronize(run: Part) -> None:
    if run.device.type == "cuda":
        torch.cuda.synchronize()


def shards_of_8b(run: Part) -> nn.Module:
    """Rank 0's shards of Llama 3 8B on 8 ranks, with gradients."""
    pretend(8)
    mesh = init_device_mesh(run.device.type, (8,))
    with torch.device("meta"):
        model = Llama(CONFIGS["debug" if run.smallest else "8b"])
    simple_fsdp(model, mesh)
    model.to_empty(device=run.device)
    for param in model.parameters():
        with torch.no_grad():
            param.normal_(std=0.02)
            param.grad = torch.full_like(param, 1e-3)
    return model


def optimizers(run: Part) -> dict[str, Any]:
    """AdamW, each way that torch has, and clipping; seconds."""
    model = shards_of_8b(run)
    repeats = 2 if run.smallest else 10
    found: dict[str, Any] = {}
    ways: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}}
    for name, way in ways.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, **way)
        found[f"adamw_{name}_s"] = seconds(optimizer.step, run.device, repeats)
        optimizer.state.clear()
        del optimizer
    params = list(model.parameters())
    plain = [_local(p) for p in params]
    clips: dict[str, Callable[[], object]] = {
        "simplefsdp": lambda: clip_grad_norm_(model, 1e9),
        "torch": lambda: torch.nn.utils.clip_grad_norm_(params, 1e9),
        "torch_on_plain_shards": lambda: torch.nn.utils.clip_grad_norm_(plain, 1e9),
    }
    for name, clip in clips.items():
        found[f"clip_{name}_s"] = seconds(clip, run.device, repeats)
    return found


def _local(param: nn.Parameter) -> nn.Parameter:
    """The shard as a parameter of its own, with its gradient."""
    assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
    plain = nn.Parameter(param.to_local().detach())
    plain.grad = param.grad.to_local()
    return plain


def mm_dtype(run: Part) -> dict[str, Any]:
    """Weight gradients of 8B's layers, of 8k tokens: bf16 and a cast to fp32, or fp32 at once."""
    tokens, found = 8192, {}
    for rows_, columns in ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)):
        sizes, how = (rows_, columns), {"device": run.device, "dtype": torch.bfloat16}
        grad, x = (torch.randn(tokens, n, **how) for n in sizes)

        def cast(g: Tensor = grad, x: Tensor = x) -> Tensor:
            return torch.mm(g.t(), x).float()

        def at_once(g: Tensor = grad, x: Tensor = x) -> Tensor:
            return torch.mm(g.t(), x, out_dtype=torch.float32)

        exact = grad.double().t() @ x.double()
        found[f"{rows_}x{columns}"] = {
            name: {
                "us": 1e6 * seconds(way, run.device, 20),
                "error": float((way() - exact).norm() / exact.norm()),
            }
            for name, way in (("cast", cast), ("at_once", at_once))
        }
    return {"shapes": found}


def apart(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """With a process group of its own, and nothing left of it."""
    try:
        return find()
    finally:
        wire.link.sends = True
        disconnect()


def measure(run: Part) -> None:
    """The part."""
    use_calibration(run)
    for variant in SMALLEST if run.smallest else VARIANTS:
        run.cell(f"host, {variant}", lambda v=variant: apart(partial(host_s, run, v)))
    for variant in CAPTURED:
        if not run.needs_cuda(f"host, {variant}", "the host's time where a step is a CUDA graph"):
            run.cell(f"host, {variant}", lambda v=variant: apart(partial(host_s, run, v)))
    run.cell("optimizer and clip", run.alone(lambda: apart(partial(optimizers, run))))
    if not run.needs_cuda("mm.dtype", "weight gradients of 8B's layers in fp32 at once"):
        run.cell("mm.dtype", run.alone(lambda: mm_dtype(run)))
    hosts = {
        name.removeprefix("host, "): found["forward_host_s"] + found["backward_host_s"]
        for name, found in run.cells.items()
        if "forward_host_s" in found
    }
    clip = run.cells["optimizer and clip"]
    fused, foreach = (clip.get(f"adamw_{n}_s", float("nan")) * 1e3 for n in ("fused", "foreach"))
    told = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in hosts.items())
    run.finish(f"host ms per step: {told}; AdamW fused {fused:.3g} ms, foreach {foreach:.3g}")


if __name__ == "__main__":
    measure(part(__doc__))
