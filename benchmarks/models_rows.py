"""The rows of the matrix: models of text, of media, of torch itself, and with adapters by PEFT."""

from __future__ import annotations

import torch
from models_media import MEDIA
from models_text import GROUPED, TEXT
from models_zoo import (
    HEADS,
    INNER,
    LAYERS,
    VOCAB,
    WIDTH,
    Entry,
    Sample,
    hugging_face,
    labelled,
)
from torch import Tensor, nn


class _Between(nn.Module):
    """Some layers between an embedding and a head, with a loss."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = layers
        self.head = nn.Linear(WIDTH, VOCAB)

    def compute(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.compute(input_ids, labels))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class _Recurrent(_Between):
    def compute(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.layers(self.embed(input_ids))[0]


class _Transformer(_Between):
    def compute(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.layers(self.embed(input_ids), self.embed(labels))


def recurrent(cls: type[nn.RNNBase]) -> Sample:
    return Sample(_Recurrent(cls(WIDTH, WIDTH, num_layers=LAYERS, batch_first=True)), labelled)


def transformer() -> Sample:
    layers = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, INNER, dropout=0.0, batch_first=True)
    return Sample(_Transformer(layers), labelled, ("dropout=0.1",))


def lora(dtype: torch.dtype) -> Sample:
    """Adapters, which PEFT keeps in fp32, on a frozen Llama."""
    from peft import LoraConfig, get_peft_model

    base = hugging_face("LlamaForCausalLM", **GROUPED).build().model.to(dtype)
    return Sample(get_peft_model(base, LoraConfig(r=4)).train(), labelled)


MODELS: dict[str, Entry] = {
    **TEXT,
    **MEDIA,
    "lstm": Entry(lambda: recurrent(nn.LSTM)),
    "gru": Entry(lambda: recurrent(nn.GRU)),
    "transformer": Entry(transformer),
    "lora": Entry(lambda: lora(torch.float32)),
    "lora_bf16": Entry(lambda: lora(torch.bfloat16), 3e-2, "a frozen base in bf16"),
}
