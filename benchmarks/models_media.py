"""Models of pictures, of pictures and text, of speech, and those that make pictures."""

from __future__ import annotations

from typing import Any

import torch
from models_text import BART, GROUPED, SPECIAL
from models_zoo import (
    HEADS,
    LAYERS,
    LENGTH,
    ROWS,
    SIZES,
    VOCAB,
    WIDTH,
    Batch,
    Entry,
    Sample,
    hugging_face,
    texts,
)
from torch import Tensor, nn

VISION = {**SIZES, "image_size": 32, "patch_size": 8}
SWIN = {
    "base": {},
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
STAGES: dict[str, Any] = {"base": {}, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
TEXT_AND_VISION: dict[str, Any] = {"base": {}, "text_config": SIZES, "vision_config": VISION}
PICTURE_TOKEN = 5
LLAVA: dict[str, Any] = {
    "base": {},
    "text_config": {**SIZES, "model_type": "llama"},
    "vision_config": {**VISION, "model_type": "clip_vision_model"},
    "image_token_index": PICTURE_TOKEN,
}
QWEN2_VL: dict[str, Any] = {
    "base": {},
    "text_config": {
        **SIZES,
        **GROUPED,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [1, 1, 2],
        },
    },
    "vision_config": {
        "depth": LAYERS,
        "embed_dim": WIDTH,
        "hidden_size": WIDTH,
        "num_heads": HEADS,
        "patch_size": 8,
    },
    "image_token_id": PICTURE_TOKEN,
    "vision_start_token_id": 3,
    "video_token_id": 4,
    "vision_end_token_id": 6,
}
WAV2VEC2: dict[str, Any] = {
    "conv_dim": [16] * 3,
    "conv_stride": [5, 4, 4],
    "conv_kernel": [10, 4, 4],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "note": "masks of SpecAugment by numpy, seeded alike",
}
WHISPER: dict[str, Any] = {
    "base": {},
    "vocab_size": VOCAB,
    **{key: value for key, value in BART.items() if key != "max_position_embeddings"},
    **SPECIAL,
    "num_mel_bins": 16,
    "max_source_positions": 30,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
}
UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (16, 16, 32, 32),
    "norm_num_groups": 8,
    "layers_per_block": 1,
    "cross_attention_dim": WIDTH,
}
FLUX: dict[str, Any] = {
    "in_channels": 4,
    "num_layers": LAYERS,
    "num_single_layers": LAYERS,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "axes_dims_rope": (4, 6, 6),
    "joint_attention_dim": WIDTH,
    "pooled_projection_dim": WIDTH,
}


def pictures() -> Tensor:
    return torch.randn(ROWS, 3, 32, 32)


def classified() -> Batch:
    """Pictures of two classes."""
    return {"pixel_values": pictures(), "labels": torch.arange(ROWS) % 2}


def captioned() -> Batch:
    """Pictures and their texts, which are told from the other ones of a rank."""
    return {"input_ids": texts(), "pixel_values": pictures(), "return_loss": True}


def with_picture_tokens(tokens: int) -> Batch:
    ids = texts(length=LENGTH + tokens)
    ids[:, 1 : 1 + tokens] = PICTURE_TOKEN
    return {"input_ids": ids, "labels": ids.clone()}


def asked() -> Batch:
    """A question about a picture of 4 x 4 patches."""
    return {**with_picture_tokens(16), "pixel_values": pictures()}


def asked_in_patches() -> Batch:
    """Likewise, as Qwen2-VL has it: patches of all pictures in a row, and four of them a token."""
    batch = with_picture_tokens(4)
    return {
        **batch,
        "pixel_values": torch.randn(ROWS * 16, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
        "mm_token_type_ids": (batch["input_ids"] == PICTURE_TOKEN).long(),
    }


def spoken() -> Batch:
    return {"input_values": torch.randn(ROWS, 3200), "labels": texts(length=3)}


def heard() -> Batch:
    return {"input_features": torch.randn(ROWS, 16, 60), "labels": texts(length=12)}


def noised() -> Batch:
    return {
        "sample": torch.randn(ROWS, 4, 8, 8),
        "timestep": torch.arange(ROWS),
        "encoder_hidden_states": torch.randn(ROWS, 6, WIDTH),
    }


def noised_patches() -> Batch:
    return {
        "hidden_states": torch.randn(ROWS, 16, 4),
        "encoder_hidden_states": torch.randn(ROWS, 6, WIDTH),
        "pooled_projections": torch.randn(ROWS, WIDTH),
        "timestep": torch.rand(ROWS),
    }


def unet() -> Sample:
    from diffusers import UNet2DConditionModel

    return Sample(UNet2DConditionModel(**UNET).train(), noised)


class _Flux(nn.Module):
    """Flux with its positions, which have no row per sample and so are no part of a batch."""

    def __init__(self) -> None:
        from diffusers import FluxTransformer2DModel

        super().__init__()
        self.transformer = FluxTransformer2DModel(**FLUX)

    def forward(self, **batch: Tensor) -> Any:
        words, patches = batch["encoder_hidden_states"], batch["hidden_states"]
        return self.transformer(
            **batch,
            txt_ids=words.new_zeros(words.shape[1], 3),
            img_ids=patches.new_ones(patches.shape[1], 3),
        )


MEDIA: dict[str, Entry] = {
    "vit": hugging_face("ViTForImageClassification", classified, base=VISION),
    "dinov2": hugging_face("Dinov2ForImageClassification", classified, base=VISION),
    "swin": hugging_face("SwinForImageClassification", classified, **SWIN),
    "convnext": hugging_face("ConvNextForImageClassification", classified, **STAGES, num_stages=4),
    "segformer": hugging_face(
        "SegformerForImageClassification", classified, **STAGES, decoder_hidden_size=32
    ),
    "resnet": hugging_face(
        "ResNetForImageClassification",
        classified,
        **STAGES,
        embedding_size=8,
        note="BatchNorm: each rank's own statistics, in the reference, too",
    ),
    "clip": hugging_face("CLIPModel", captioned, **TEXT_AND_VISION, projection_dim=16),
    "siglip": hugging_face("SiglipModel", captioned, **TEXT_AND_VISION),
    "llava": hugging_face("LlavaForConditionalGeneration", asked, **LLAVA),
    "qwen2_vl": hugging_face("Qwen2VLForConditionalGeneration", asked_in_patches, **QWEN2_VL),
    "wav2vec2": hugging_face("Wav2Vec2ForCTC", spoken, **WAV2VEC2),
    "whisper": hugging_face("WhisperForConditionalGeneration", heard, **WHISPER),
    "unet": Entry(unet),
    "flux": Entry(lambda: Sample(_Flux().train(), noised_patches)),
}
