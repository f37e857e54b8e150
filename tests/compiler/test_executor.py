"""Which executor a graph gets whose user chose none."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config

from simplefsdp.choices import EXECUTORS
from simplefsdp.compiler.executor import MANY_LAYERS, executor_of, most_alike
from simplefsdp.compiler.options import Options, parse_options

CPU = torch.device("cpu")
DEEP = 4 * MANY_LAYERS


def layers(n: int, prefix: str = "layers", width: int = 4) -> dict[str, tuple[int, ...]]:
    parts = {"attention.wq": (width, width), "mlp.up": (width, width), "norm": (width,)}
    return {f"{prefix}.{i}.{name}": shape for i in range(n) for name, shape in parts.items()}


def test_layers_that_are_alike_are_counted():
    ends = {"embed.weight": (8, 4), "head.weight": (8, 4)}
    assert most_alike({**layers(12), **ends}) == 12
    assert most_alike(layers(6, "encoder.layers") | layers(6, "decoder.layers")) == 12
    assert most_alike(layers(5, "encoder.layers") | layers(6, "decoder.layers", width=8)) == 6
    every_second = {f"layers.{i}.moe.weight": (4, 4) for i in range(0, 12, 2)}
    assert most_alike(layers(12) | every_second) == 6
    assert most_alike(ends) == most_alike({}) == 0


def test_a_list_of_layers_that_differ_is_no_repetition():
    shapes = {f"features.{i}.{j}.weight": (2 * i, 2 * i + 2) for i in range(19) for j in range(2)}
    assert most_alike(shapes) == 1


def test_tables_and_heads_are_no_layers():
    assert most_alike({f"tables.{i}.weight": (100, 8) for i in range(26)}) == 0
    heads = {f"heads.{i}.{name}": shape for i in range(16) for name, shape in HEAD.items()}
    assert most_alike(heads) == 0


HEAD = {"weight": (10, 8), "bias": (10,)}
AROUND = [(MANY_LAYERS - 1, "inductor"), (MANY_LAYERS, "regions")]


@pytest.mark.parametrize(("n", "executor"), AROUND)
def test_by_default_one_layer_is_compiled_for_many(n, executor, caplog):
    caplog.set_level("INFO", "simplefsdp")
    assert executor_of(Options(), layers(n), CPU) == executor
    assert (f"{n} layers are alike: one is compiled for all" in caplog.text) == (n == MANY_LAYERS)


@pytest.mark.parametrize("executor", [e for e in EXECUTORS if e != "auto"])
def test_what_the_user_chose_is_taken(executor):
    assert executor_of(parse_options({"executor": executor}), layers(DEEP), CPU) == executor


def test_what_is_unmeasured_or_without_gain_is_compiled_whole():
    assert executor_of(Options(), layers(DEEP), torch.device("cuda")) == "inductor"
    assert executor_of(parse_options({"bucketing": "none"}), layers(DEEP), CPU) == "inductor"


@pytest.mark.parametrize(
    "setting",
    [
        {"cpp_wrapper": True},
        {"fx_wrapper": True},
        {"triton.cudagraphs": True},
        {"post_grad_custom_pre_pass": lambda graph: None},
        {"post_grad_custom_post_pass": lambda graph: None},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_the_user_gave_inductor_sees_whole_graphs(setting):
    with inductor_config.patch(setting):
        assert executor_of(Options(), layers(DEEP), CPU) == "inductor"
