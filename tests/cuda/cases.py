"""Write the CUDA code of a small wrapped Llama, and let Triton compile its kernels for an H100.

    echo NAME OUT | python tests/cuda/cases.py

NAME is one of ``CASES``; each line is a case, and is answered by a line. OUT, a JSON file, tells
what was planned and what was generated, for forward and backward, and of each kernel that Triton
refuses, why.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fake_gpu import NotRun, fake_gpu, written

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from inductor_passes.adapters._torch_calls import call_of
from inductor_passes.executor import regional
from inductor_passes.rehearsal import Rehearsal
from simplefsdp import simple_fsdp
from simplefsdp.compiler.observers import CompiledGraph, observing
from simplefsdp.launcher.ranks import fake_ranks
from simplefsdp.models import LlamaConfig
from simplefsdp.models.build import cross_entropy
from simplefsdp.models.llama3 import Llama
from simplefsdp.models.tensor_parallel import apply_tensor_parallel


@dataclass(frozen=True)
class Case:
    """A model, how it is wrapped and how it is compiled."""

    bucketing: str = "auto"
    executor: str = "inductor"
    checkpointing: str = "none"
    attention: str = "flash"
    mode: str = "fully_shard"
    tp: int = 1
    cudagraphs: bool = False
    vocab: int = 4096
    ffn: int = 1536
    layers: int = 2
    width: int = 512
    tokens: int = 1024


RANKS, HEAD = 8, 128
CASES = {
    "auto": Case(),
    "manual": Case(bucketing="manual", checkpointing="selective", attention="cudnn"),
    "none": Case(bucketing="none"),
    "regions": Case(executor="regions"),
    "hybrid": Case(mode="hybrid_shard", checkpointing="full", attention="cudnn"),
    # Rows, and strides that Inductor would like to pad.
    "uneven": Case(vocab=4099, ffn=1537, checkpointing="selective"),
    "tensor_parallel": Case(tp=2),
    "cudagraphs": Case(cudagraphs=True),
    "flex": Case(attention="flex"),
}
_ATTENTION = {
    "flash": torch.ops.aten._scaled_dot_product_flash_attention.default,
    "cudnn": torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
_OTHERS = {"all_gather_into_tensor": "gather", "all_reduce": "all_reduce"}  # tensor parallelism's
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def _causal(q: Tensor) -> BlockMask:
    """As ``create_block_mask`` makes it, of sizes that the model knows."""
    blocks = q.shape[-2] // 128
    counts = torch.ones(1, 1, blocks, dtype=torch.int32, device=q.device)
    at = torch.zeros(1, 1, blocks, blocks, dtype=torch.int32, device=q.device)
    shape = q.shape[-2], q.shape[-2]
    return BlockMask.from_kv_blocks(
        counts, at, counts, at, mask_mod=lambda b, h, i, j: i >= j, seq_lengths=shape
    )


@contextmanager
def _attending_by(name: str) -> Iterator[None]:
    """Take that kernel; torch's own choice asks the device."""

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Any:
        if name == "flex":
            return flex_attention(q, k, v, block_mask=_causal(q), enable_gqa=enable_gqa)
        if name == "cudnn":
            return _ATTENTION[name](q, k, v, None, True, 0.0, is_causal, False)[0]
        return _ATTENTION[name](q, k, v, 0.0, is_causal, False)[0]

    with mock.patch.object(F, "scaled_dot_product_attention", attend):
        yield


def _mesh(case: Case) -> Any:
    if case.mode == "hybrid_shard":
        return init_device_mesh("cuda", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    if case.tp > 1:
        shape = (RANKS // case.tp, case.tp)
        return init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cuda", (RANKS,), mesh_dim_names=("dp",))


def _wrapped(case: Case) -> Llama:
    heads = case.width // HEAD
    config = LlamaConfig(
        vocab_size=case.vocab,
        dim=case.width,
        n_layers=case.layers,
        n_heads=heads,
        n_kv_heads=heads // 2,
        ffn_dim=case.ffn,
        max_seq_len=case.tokens,
        rope_scaling=None,
    )
    with torch.device("meta"):
        model = Llama(config, activation_checkpointing=case.checkpointing)
    mesh = _mesh(case)
    if case.tp > 1:
        apply_tensor_parallel(model, mesh["tp"])
        mesh = mesh["dp"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    simple_fsdp(model, mesh, mode=case.mode, mp_policy=policy)
    return model


def node_name(nodes: dict[str, tuple[Any, ...]], op: str) -> str:
    """Of the operator that an op calls."""
    found = nodes.get(op, ())
    return str(getattr(call_of(found[0]).target, "__name__", "")).split(".")[0] if found else ""


def events_of(rehearsal: Rehearsal) -> list[str]:
    """What was planned to run, in its order: launches, waits, and computes that are not fused."""
    program, nodes = rehearsal.after, rehearsal.reading.nodes
    found, launches = [], {}
    for i, op in enumerate(program.ops):
        if op.kind == "start" and op.collective is not None:
            launches[i] = len(launches)
            kind = _OTHERS.get(node_name(nodes, op.name), op.collective.kind)
            found.append(f"{kind} of {len(op.writes)}")
        elif op.kind == "wait":
            found += [f"wait for launch {launches[at]}" for at in program.start_of[i]]
        elif op.kind == "compute":
            name = node_name(nodes, op.name)
            found += ["product"] if name in _PRODUCTS else []
            found += ["attention"] if "attention" in name else []
    return found


def compiled(case: Case) -> dict[str, Any]:
    """What a case was planned to run and the code that it became."""
    programs: list[str] = []
    planned: dict[str, list[str]] = {}
    straight_line = regional.straight_line

    def noted(*args: Any) -> Any:
        program = straight_line(*args)
        programs.append(program.source)
        return program

    def observe(graph: CompiledGraph) -> None:
        planned[graph.part] = events_of(graph.rehearsal)

    options: dict[str, object] = {"bucketing": case.bucketing, "executor": case.executor}
    options |= {"cudagraphs": True} if case.cudagraphs else {}
    options |= {"cluster": "h100"} if case.bucketing == "auto" else {}
    torch._dynamo.reset()
    with (
        fake_ranks(RANKS),
        fake_gpu(),
        written() as made,
        observing(observe),
        _attending_by(case.attention),
        inductor_config.patch(force_disable_caches=True, joint_graph_constant_folding=False),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        mock.patch.object(regional, "straight_line", noted),
    ):
        model = _wrapped(case)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cuda")
            tokens = torch.zeros(1, case.tokens, dtype=torch.long, device="cuda")

            def step(tokens: Tensor) -> Tensor:
                return cross_entropy(model(tokens), tokens)

            run = torch.compile(
                step, backend="simplefsdp", options=options, fullgraph=True, dynamic=False
            )
            try:
                run(tokens)
            except NotRun:
                pass
            else:
                raise RuntimeError("the code was called, and did not stop")
    found = {"case": asdict(case), "planned": planned, "programs": programs}
    return {**found, "codes": made.codes, "copied": made.copied}


_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)


@functools.cache
def refused(source: str) -> str:
    """Why Triton does not compile ``kernel`` for an H100, empty if it does."""
    from torch._inductor.codecache import PyCodeCache

    kernel = PyCodeCache.load(source).kernel
    kernel.configs = kernel.configs[:1]  # of those that would be tried on the device
    try:
        kernel.precompile(warm_cache_only=True)
        (made,) = kernel.compile_results
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    target = made.kernel.metadata.target
    is_for_h100 = (target.backend, target.arch) == ("cuda", 90)
    return "" if is_for_h100 and made.kernel.asm.get("cubin") else f"made for {target}"


def answer(name: str, out: Path) -> None:
    """Compile a case, then its kernels; those that differ in their name alone once."""
    found = compiled(CASES[name])
    sources = dict(pair for code in found["codes"] for pair in _KERNEL.findall(code))
    # torch's own launcher keeps nothing of what Triton made.
    with fake_gpu(), inductor_config.patch(use_static_cuda_launcher=False):
        said = {n: refused(source.replace(n, "kernel")) for n, source in sources.items()}
    found["refused"] = {n: why for n, why in said.items() if why}
    found["kernels"] = list(sources)
    out.write_text(json.dumps(found))


def main() -> None:
    """Answer until there is no more to read."""
    for line in sys.stdin:
        name, out = line.split(maxsplit=1)
        try:
            answer(name, Path(out.strip()))
            print("done", flush=True)
        except Exception:
            print(json.dumps(traceback.format_exc()), flush=True)


if __name__ == "__main__":
    main()
