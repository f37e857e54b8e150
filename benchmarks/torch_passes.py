"""PyTorch's own bucketing passes on a model wrapped by simplefsdp, set up as torchtitan does.

Dynamo backends that share simplefsdp's part before partitioning (one gather per parameter,
recompute tags) and put PyTorch's pass where ours goes.

On CPU the passes cannot probe their GPU (both ask, even the manual one, which has no use for the
answer), so three things are replaced here, each by what the probe stands for: collectives take
what the modelled wire takes; matrix products take what they measure on this CPU; and buckets of
the automatic pass's pre-bucketing hold what saturates the modelled wire to the 90 % that the pass
asks of NCCL. On CUDA only the wire stands for NCCL: collectives take what it takes, and what ranks
would tell each other is what this one has found; compute is timed on the GPU, as the pass does it.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule, Node
from transfers import link

from simplefsdp.compiler.dedupe import dedupe_gathers
from simplefsdp.compiler.recompute import tag_for_recompute
from simplefsdp.inspection.torch_passes import module_stack

GPU_PROBES_REPLACED = (
    "torch_manual and torch_auto on CPU: GPU probes replaced in benchmarks/torch_passes.py "
    "(collective times by the modelled wire, matrix products timed on this CPU, pre-bucket size by "
    "90 % saturation of the wire, within torch's own bounds)"
)

Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]

# What torchtitan sets for these passes, so that Inductor leaves their order alone.
_ORDER_STAYS = {
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "allow_buffer_reuse": False,
    "aten_distributed_optimizations.insert_overlap_deps": True,
}


def manual_backend(plan: Sequence[str | Sequence[str]]) -> Backend:
    """A Dynamo backend with ``manual_overlap_bucketing``.

    Args:
        plan: module FQNs, a list for those that share a bucket.
    """

    def run(graph: Graph) -> None:
        from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

        with _without_gpu_probe():
            manual_overlap_bucketing(
                graph.owning_module,
                module_bucket_plans=[p if isinstance(p, str) else list(p) for p in plan],
                insert_overlap_deps=True,
                **_known(manual_overlap_bucketing, {"module_stack_fn": module_stack}),
            )

    return _backend(run)


def auto_backend() -> Backend:
    """A Dynamo backend with ``schedule_overlap_bucketing``, its other settings the defaults."""

    def run(graph: Graph) -> None:
        from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

        logging.getLogger("torch._inductor.fx_passes.fsdp").setLevel(logging.WARNING)
        gpu_free: dict[str, Any] = {}
        if not torch.cuda.is_available():
            gpu_free = {
                "custom_runtime_estimation": _estimate_ms,
                "pre_bucketing_fsdp_collectives_bucket_cap_mb": _saturating_mib(),
            }
        with _without_gpu_probe(), _without_nccl():
            schedule_overlap_bucketing(
                graph.owning_module,
                collective_bucketing=True,
                insert_overlap_deps=True,
                **_known(schedule_overlap_bucketing, gpu_free),
            )

    return _backend(run)


def _without_gpu_probe() -> AbstractContextManager[object]:
    """Time matrix products where the passes would ask the GPU's peak FLOP/s and bandwidth."""
    from torch._inductor.fx_passes import overlap_scheduling

    if torch.cuda.is_available():
        return nullcontext()
    return patch.object(
        overlap_scheduling,
        "estimate_roofline_runtime_ms",
        lambda node: _measured_ms(node) if overlap_scheduling.is_compute_node(node) else 0.0,
        create=True,  # torch 2.11 has another probe
    )


@contextmanager
def _without_nccl() -> Iterator[None]:
    """Where NCCL would be asked what a collective takes, the wire is; where ranks would gather what
    each has measured, all have measured the same. And 2.11 fails to count the operations of
    attention whose queries have more heads than keys."""
    from torch._inductor import comm_analysis
    from torch.utils import flop_counter

    def of_all_heads(count: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*shapes: Sequence[int]) -> Any:
            *others, key, value = shapes
            batch, heads = others[-1][:2]  # of the queries
            return count(*others, (batch, heads, *key[2:]), (batch, heads, *value[2:]))

        return counted

    def gather(found: list[Any], mine: Any, *_: Any) -> None:
        found[:] = [mine] * len(found)

    with (
        patch.object(
            comm_analysis, "estimate_nccl_collective_runtime_from_fx_node", _collective_ms
        ),
        patch.object(dist, "all_gather_object", gather),
        ExitStack() as stack,
    ):
        for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
            stack.enter_context(
                patch.object(flop_counter, name, of_all_heads(getattr(flop_counter, name)))
            )
        yield


def _known(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of ``arguments`` that this release of torch has."""
    return {k: v for k, v in arguments.items() if k in inspect.signature(function).parameters}


def _backend(post_grad: Callable[[Graph], None]) -> Backend:
    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._functorch import config as functorch_config
        from torch._inductor.compile_fx import compile_fx

        dedupe_gathers(gm, inputs)
        patches = {
            **_ORDER_STAYS,
            "joint_custom_post_pass": _uncached(tag_for_recompute),
            "post_grad_custom_post_pass": _uncached(post_grad),
        }
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(gm, inputs, config_patches=patches)

    return backend


def _uncached(function: Callable[[Graph], None]) -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            function(graph)

        def uuid(self) -> None:
            return None  # not served from the cache: the plan depends on the wire

    return Pass()


def _estimate_ms(node: Node, override_nbytes: int | None = None) -> float | None:
    """Milliseconds of a collective or matrix product; None: the pass counts nothing for it."""
    from torch._inductor.fx_passes.overlap_scheduling import is_compute_node

    if _collective_kind(node) is not None:
        return _collective_ms(node, override_nbytes)
    return _measured_ms(node) if is_compute_node(node) else None


def _collective_ms(node: Node, override_nbytes: int | None = None, *_: Any, **__: Any) -> float:
    kind = _collective_kind(node)
    if kind is None:
        return 0.0
    nbytes = _moved_nbytes(node, kind) if override_nbytes is None else override_nbytes
    return 1e3 * link.seconds(kind, nbytes)


def _collective_kind(node: Node) -> str | None:
    name = str(node.target)
    if "all_gather" in name:
        return "gather"
    if "reduce_scatter" in name:
        return "reduce"
    return "all_reduce" if "all_reduce" in name else None


def _moved_nbytes(node: Node, kind: str) -> int:
    source = node if kind == "gather" else node.all_input_nodes[0]
    values = source.meta["val"]
    tensors = values if isinstance(values, (list, tuple)) else [values]
    return sum(t.numel() * t.element_size() for t in tensors)


_measured: dict[str, float] = {}


def _measured_ms(node: Node) -> float:
    from torch._dynamo.testing import rand_strided
    from torch._inductor.fx_utils import get_fake_args_kwargs
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import _disable_current_modes

    known, args, kwargs = get_fake_args_kwargs(node)
    if not known:
        return 0.0
    key = f"{node.target}" + "".join(
        f" {tuple(t.shape)} {t.stride()} {t.dtype}"
        for t in pytree.tree_leaves((args, kwargs))
        if isinstance(t, torch.Tensor)
    )
    if key not in _measured:
        with _disable_current_modes(), torch.no_grad():
            args, kwargs = pytree.tree_map_only(
                torch.Tensor,
                lambda t: rand_strided(t.shape, t.stride(), device=t.device, dtype=t.dtype),
                (args, kwargs),
            )
            _measured[key] = 1e3 * min(_seconds(node.target, args, kwargs) for _ in range(4))
    return _measured[key]


def _seconds(function: Any, args: Any, kwargs: Any) -> float:
    start = time.perf_counter()
    function(*args, **kwargs)
    return time.perf_counter() - start


def _saturating_mib() -> float:
    """MiB at which 90 % of a transfer is bandwidth, within the bounds torch sets."""
    from torch._inductor import config

    options = config.aten_distributed_optimizations
    # Where a release has no such bounds, its pass takes no such size either.
    least = getattr(options, "pre_bucketing_fsdp_collectives_min_bucket_cap_mb", 10.0)
    most = getattr(options, "pre_bucketing_fsdp_collectives_max_bucket_cap_mb", 500.0)
    return min(most, max(least, 9 * link.latency_s * link.bandwidth / 2**20))
