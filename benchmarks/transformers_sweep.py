"""Every architecture of transformers, made tiny: does it train as one process does?

``models.py`` has chosen models on two ranks, with what is particular to each. This one asks
transformers for all that it knows, and makes each as small as its configuration allows, with eight
layers, so that layers are left out of the traces. Losses and gradients of three steps are compared
with those of the plain model. On one rank nothing is sent, but all that is traced and planned is.

    pip install transformers
    python benchmarks/transformers_sweep.py                        # two hours
    python benchmarks/transformers_sweep.py --kind image --model vit --ranks 2

Not tried are models whose tiny form has more than 30 million parameters, or does not run plain.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx
import torch.distributed as dist
import transformers
import transformers.modeling_utils  # imported once, like Inductor, and not by each process
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from simplefsdp import simple_fsdp

LAYERS, MOST_PARAMETERS, STEPS, TOLERANCE = 8, 30_000_000, 3, 2e-3
KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
# The sizes that configurations have, by value. A configuration gets those that it has.
_NAMES: dict[int, str] = {
    LAYERS: """num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers
        num_decoder_layers""",
    0: "pad_token_id num_kv_shared_layers",
    1: "bos_token_id n_group topk_group first_k_dense_replace n_groups",
    2: """eos_token_id num_key_value_heads num_experts_per_tok moe_k mamba_expand num_key_heads
        linear_num_key_heads""",
    3: "num_channels",
    4: """num_attention_heads n_head num_heads n_heads encoder_attention_heads num_experts
        decoder_attention_heads num_local_experts n_routed_experts moe_num_experts mamba_n_heads
        mamba_num_heads linear_num_value_heads linear_conv_kernel_dim""",
    8: """head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim state_size rotary_dim
        patch_size mamba_d_state ssm_state_size linear_key_head_dim linear_value_head_dim
        attention_head_size d_head sliding_window hidden_size_per_layer_input""",
    16: """q_lora_rank kv_lora_rank mamba_d_head mamba_chunk_size mamba_head_dim chunk_size
        attention_window_size""",
    32: """hidden_size n_embd d_model moe_intermediate_size shared_expert_intermediate_size dim
        embedding_size lru_width image_size projection_dim emb_dim dim_model encoder_hidden_size
        d_embed""",
    64: """intermediate_size max_position_embeddings n_positions n_ctx n_inner d_ff ffn_dim
        ffn_hidden_size encoder_ffn_dim decoder_ffn_dim hidden_dim dff max_seq_len d_inner""",
    128: "vocab_size vocab_size_per_layer_input",
}
TINY: dict[str, int] = {name: value for value, names in _NAMES.items() for name in names.split()}
# Sizes that some configurations derive from others, or want in proportion to them.
_DERIVED = (
    (),
    ("head_dim",),
    ("head_dim", "num_key_value_heads"),
    ("num_key_value_heads",),
    ("rotary_dim",),
    ("layer_types", "mlp_layer_types"),
)


def tiny_configs(model_type: str) -> Iterator[Any]:
    """Configurations of a few small layers, the likeliest to be valid first."""
    kind = CONFIG_MAPPING[model_type]
    base = kind()
    given: dict[str, Any] = {k: v for k, v in TINY.items() if getattr(base, k, None) is not None}
    for name, value in vars(base).items():
        if isinstance(value, float) and "drop" in name:
            given[name] = 0.0
        if isinstance(value, list) and name in ("layer_types", "mlp_layer_types"):
            given[name] = (value * LAYERS)[:LAYERS]
    for left_out in _DERIVED:
        try:
            yield kind(**{k: v for k, v in given.items() if k not in left_out})
        except Exception:  # by many libraries' checks
            continue


def inputs_of(kind: str, config: Any, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 100, (2, 16), generator=generator)
    if kind == "image":
        size = getattr(config, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        pixels = torch.randn(2, config.num_channels, size, size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    more: dict[str, Any] = {"causal": {"use_cache": False}, "seq2seq": {}}.get(
        kind, {"attention_mask": torch.ones_like(ids)}
    )
    return {"input_ids": ids, "labels": ids, **more}


def plain_model(kind: str, model_type: str) -> nn.Module:
    """A tiny model that computes a loss. Raises a ValueError that says why there is none."""
    found = getattr(modeling_auto, KINDS[kind])[model_type]
    cls = getattr(transformers, found if isinstance(found, str) else found[0])
    why = "no configuration is valid"
    for config in tiny_configs(model_type):
        config._attn_implementation = "sdpa" if cls._supports_sdpa else "eager"
        try:
            with torch.device("meta"):
                size = sum(param.numel() for param in cls(config).parameters())
            if size > MOST_PARAMETERS:
                raise ValueError(f"{size:,} parameters")
            torch.manual_seed(0)
            model: nn.Module = cls(config)
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            if model(**inputs_of(kind, config, 0)).loss.isfinite():
                return model
        except Exception as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
    raise ValueError(why)


def train(model: Any, kind: str) -> list[dict[str, Tensor]]:
    """Losses and gradients of a few steps."""
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(**inputs_of(kind, model.config, step)).loss
        loss.backward()
        values = {"loss": loss.detach().clone()}
        for name, param in model.named_parameters():
            if param.grad is not None and param.numel():
                full = getattr(param.grad, "full_tensor", lambda grad=param.grad: grad)()
                values[name] = full.detach().clone()
                with torch.no_grad():
                    param.sub_(0.1 * param.grad)
            param.grad = None
        found.append(values)
    return found


def worst_difference(ours: list[dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> Any:
    """The largest difference relative to the largest value, and where it is."""
    worst: tuple[float, str] = (0.0, "")
    for step, (one, other) in enumerate(zip(ours, wanted, strict=True)):
        for name in one.keys() | other.keys():
            got, value = (some.get(name, torch.zeros(())) for some in (one, other))
            difference = float((got - value).abs().max() / (value.abs().max() + 1e-6))
            if not difference <= worst[0]:  # which a NaN is not, either
                worst = difference, f"{name}, step {step}"
    return worst


def compare(kind: str, model_type: str, executor: str) -> dict[str, Any]:
    try:
        plain = plain_model(kind, model_type)
    except Exception as error:
        return {"status": "not tried", "why": str(error)[:300]}
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    wanted = train(plain, kind)
    plain.load_state_dict(state)
    began = time.monotonic()
    try:
        model = simple_fsdp(plain, init_device_mesh("cpu", (dist.get_world_size(),)))
        model.compile(backend="simplefsdp", options={"bucketing": "auto", "executor": executor})
        worst, where = worst_difference(train(model, kind), wanted)
    except Exception as error:
        return {"status": "raises", "why": f"{type(error).__name__}: {str(error)[:600]}"}
    is_equal = worst <= TOLERANCE
    return {
        "status": "trains as plain" if is_equal else "differs",
        "difference": worst,
        **({} if is_equal else {"where": where}),
        "seconds": round(time.monotonic() - began, 1),
    }


def in_processes(kind: str, model_type: str, args: argparse.Namespace) -> dict[str, Any]:
    """:func:`compare` in forked processes, which may crash or take too long."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        ranks = []
        for rank in range(args.ranks):
            if not (process := os.fork()):
                try:
                    signal.alarm(args.limit_s)
                    warnings.simplefilter("ignore")
                    store = dist.FileStore(f"{folder}/store", args.ranks)
                    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
                    found = compare(kind, model_type, args.executor)
                    if rank == 0:
                        result.write_text(json.dumps(found))
                finally:
                    os._exit(0)
            ranks.append(process)
        for process in ranks:
            os.waitpid(process, 0)
        if result.exists():
            answer: dict[str, Any] = json.loads(result.read_text())
            return answer
    return {"status": "not tried", "why": f"crashed, or took more than {args.limit_s} s"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--model", nargs="*", help="model types, as `vit`; default: all")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--executor", default="aot_eager")
    parser.add_argument("--limit-s", type=int, default=300, help="seconds for one model")
    parser.add_argument("--json", type=Path, help="a file for the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    results: dict[str, dict[str, Any]] = {}
    for kind in args.kind:
        for model_type in getattr(modeling_auto, KINDS[kind]):
            if args.model and model_type not in args.model:
                continue
            found = results[f"{kind} {model_type}"] = in_processes(kind, model_type, args)
            told = (str(value) for value in found.values())
            print(f"{kind:8} {model_type:28} {'  '.join(told)[:160]}", flush=True)
            if args.json:
                versions = {"torch": torch.__version__, "transformers": transformers.__version__}
                args.json.write_text(json.dumps({**versions, "models": results}, indent=1) + "\n")
    print(
        *(f"{n} {status}" for status, n in Counter(r["status"] for r in results.values()).items())
    )


if __name__ == "__main__":
    main()
