"""Which executor a graph gets whose user chose none."""

from __future__ import annotations

import pytest

from simplefsdp.choices import EXECUTORS
from simplefsdp.compiler.executor import MANY_LAYERS, executor_of, most_alike
from simplefsdp.compiler.options import Options, parse_options


def layers(n: int, prefix: str = "layers", width: int = 4) -> dict[str, tuple[int, ...]]:
    parts = {"attention.wq": (width, width), "norm": (width,)}
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
    assert most_alike({f"features.{i}.weight": (2 * i, 2 * i + 2) for i in range(19)}) == 1


@pytest.mark.parametrize(
    ("n", "executor"), [(MANY_LAYERS - 1, "inductor"), (MANY_LAYERS, "regions")]
)
def test_by_default_one_layer_is_compiled_for_many(n, executor):
    assert executor_of(Options(), layers(n)) == executor


@pytest.mark.parametrize("executor", [e for e in EXECUTORS if e != "auto"])
def test_what_the_user_chose_is_taken(executor):
    assert executor_of(parse_options({"executor": executor}), layers(32)) == executor


def test_cuda_graphs_capture_the_whole_graph():
    assert executor_of(parse_options({"cudagraphs": True}), layers(32)) == "inductor"
