"""Models of text: decoders, mixtures of experts, state spaces, encoders, and both."""

from __future__ import annotations

from typing import Any

import torch
from models_zoo import (
    HEADS,
    INNER,
    LAYERS,
    LENGTH,
    ROWS,
    VOCAB,
    WIDTH,
    Batch,
    Entry,
    hugging_face,
    labelled,
    texts,
)

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {"num_key_value_heads": 2}
HEAD = {**GROUPED, "head_dim": 8}
OWN: dict[str, Any] = {"base": {}, "vocab_size": VOCAB}  # names of their own for the rest
GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
BLOOM = {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
DISTILBERT = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": INNER}
BART = {
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER,
    "max_position_embeddings": 64,
}
T5 = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": INNER,
    "num_heads": HEADS,
    "num_layers": LAYERS,
    "decoder_start_token_id": 0,
}
EXPERTS = {**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS = {**HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    "num_key_value_heads": HEADS,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MAMBA = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8}
MAMBA2 = {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}


def padded() -> Batch:
    """Texts of two lengths: an attention mask, and a loss over fewer tokens on one of the ranks."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[-1, LENGTH // 2 :] = 0
    batch = labelled()
    return {**batch, "attention_mask": mask, "labels": batch["labels"].where(mask.bool(), -100)}


def pairs() -> Batch:
    """Texts in, other texts out."""
    return {"input_ids": texts(), "labels": texts(length=12)}


TEXT: dict[str, Entry] = {
    "llama": hugging_face("LlamaForCausalLM", **GROUPED),
    "llama_padded": hugging_face("LlamaForCausalLM", padded, **GROUPED),
    "qwen3": hugging_face("Qwen3ForCausalLM", **HEAD),
    "gemma3": hugging_face("Gemma3ForCausalLM", **HEAD),
    "mistral": hugging_face("MistralForCausalLM", **GROUPED),
    "gpt2": hugging_face("GPT2LMHeadModel", **OWN, **GPT2, bos_token_id=1, eos_token_id=2),
    "gpt_neox": hugging_face("GPTNeoXForCausalLM"),
    "opt": hugging_face("OPTForCausalLM", ffn_dim=INNER, word_embed_proj_dim=WIDTH),
    "phi3": hugging_face("Phi3ForCausalLM", **SPECIAL),
    "bloom": hugging_face("BloomForCausalLM", **OWN, **BLOOM),
    "falcon": hugging_face("FalconForCausalLM"),
    "stablelm": hugging_face("StableLmForCausalLM", num_key_value_heads=HEADS),
    "olmo2": hugging_face("Olmo2ForCausalLM", **SPECIAL),
    "cohere": hugging_face("CohereForCausalLM", **SPECIAL),
    "mixtral": hugging_face("MixtralForCausalLM", **EXPERTS),
    "qwen3_moe": hugging_face("Qwen3MoeForCausalLM", **QWEN_EXPERTS),
    "deepseek_v3": hugging_face("DeepseekV3ForCausalLM", **DEEPSEEK),
    "gpt_oss": hugging_face("GptOssForCausalLM", **EXPERTS),
    "mamba": hugging_face("MambaForCausalLM", **OWN, **MAMBA),
    "mamba2": hugging_face("Mamba2ForCausalLM", **OWN, **MAMBA2),
    "bert": hugging_face("BertForMaskedLM"),
    "roberta": hugging_face("RobertaForMaskedLM"),
    "xlm_roberta": hugging_face("XLMRobertaForMaskedLM"),
    "modernbert": hugging_face("ModernBertForMaskedLM", **SPECIAL, cls_token_id=1, sep_token_id=2),
    "electra": hugging_face("ElectraForMaskedLM", embedding_size=16),
    "distilbert": hugging_face("DistilBertForMaskedLM", **OWN, **DISTILBERT),
    "albert": hugging_face("AlbertForMaskedLM", embedding_size=16),
    "deberta_v2": hugging_face("DebertaV2ForMaskedLM"),
    "t5": hugging_face("T5ForConditionalGeneration", pairs, **OWN, **T5),
    "mt5": hugging_face("MT5ForConditionalGeneration", pairs, **OWN, **T5),
    "bart": hugging_face("BartForConditionalGeneration", pairs, **OWN, **BART),
    "pegasus": hugging_face("PegasusForConditionalGeneration", pairs, **OWN, **BART),
}
