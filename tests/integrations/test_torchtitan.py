"""torchtitan's own trainer on ``simple_fsdp``, against itself on FSDP2."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

pytestmark = pytest.mark.skipif(
    None in map(find_spec, ("torchtitan", "triton")) or torch.__version__ < "2.13",
    reason="torchtitan 0.3 is missing, or what it imports: triton, and torch 2.13",
)

OURS, THEIRS = "simplefsdp.integrations.torchtitan", "llama3"


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("titan")
    write_assets(folder)
    return folder


def write_assets(folder: Path) -> None:
    """A tokenizer of bytes and a little text, under the names that torchtitan looks for."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*alphabet, "<|begin|>", "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assets = folder / "tests" / "assets"
    (assets / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    (assets / "c4_test").mkdir()
    lines = [json.dumps({"text": f"{n} times {n} is {n * n}. " * (n % 7 + 2)}) for n in range(200)]
    (assets / "c4_test" / "data.json").write_text("\n".join(lines))


def _train(folder: Path, *arguments: Any) -> Any:
    import titan_on_cpu

    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ |= {"LOCAL_RANK": "0", "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.chdir(folder)
    return titan_on_cpu.train(*arguments)


def check_alike(trained: list[Any], expected: list[Any]) -> None:
    (steps, parameters, _), (expected_steps, expected_parameters, _) = trained[0], expected[0]
    assert sorted(steps) == [3, 4]
    for step, (loss, norm) in steps.items():
        np.testing.assert_allclose(loss, expected_steps[step][0], rtol=1e-5)
        # The norm alone shows whether gradients are summed; it is less exact over copies.
        np.testing.assert_allclose(norm, expected_steps[step][1], rtol=1e-3)
    for name, values in parameters.items():
        np.testing.assert_allclose(values, expected_parameters[name], atol=1e-5, err_msg=name)


@pytest.fixture
def train(own_ranks: RankPool, assets: Path, tmp_path: Path) -> Callable[..., list[Any]]:
    """Four steps, or two after those of ``after``; all is saved after the second."""

    def trained(module: str, folder: str, *arguments: str, after: str = "") -> list[Any]:
        if after:
            step = str(tmp_path / after / "checkpoint" / "step-2")
            arguments = (*arguments, "--checkpoint.initial_load_path", step)
        common = ["--training.steps", "4", "--dump_folder", str(tmp_path / folder)]
        return own_ranks.run(_train, assets, module, "llama3_debugmodel", *common, *arguments)

    return trained


@pytest.mark.slow
def test_trains_and_resumes_as_fsdp2_does(train):
    ours = train(OURS, "ours")
    check_alike(train(THEIRS, "theirs", after="ours"), ours)
    again = train(OURS, "ours", "--checkpoint.load_step", "2")
    assert sorted(again[0].steps) == [3, 4]
    assert [rank.digest for rank in again] == [rank.digest for rank in ours]


@pytest.mark.slow
def test_goes_on_where_fsdp2_stopped_not_compiled(train):
    theirs = train(THEIRS, "theirs")
    arguments = ["--compile.no-enable", "--parallelism.data_parallel_replicate_degree", "2"]
    check_alike(train(OURS, "ours", *arguments, after="theirs"), theirs)


@pytest.mark.slow
def test_shards_what_tensor_parallelism_split(train):
    arguments = ["--parallelism.tensor_parallel_degree", "2"]
    theirs = train(THEIRS, "theirs", *arguments)
    check_alike(train(OURS, "ours", *arguments, "--compile.no-enable", after="theirs"), theirs)


@pytest.mark.slow
def test_pipelines(assets, tmp_path):
    """Two stages on two ranks each. The loss in chunks has a backward of its own, which torch runs
    once on uninitialised memory."""
    common = ["--parallelism.pipeline_parallel_degree", "2", "--training.steps", "4"]
    common += ["--parallelism.pipeline_parallel_schedule", "1F1B"]
    ranks = RankPool(4)

    def trained(module, *arguments):
        folder = ["--dump_folder", str(tmp_path / module)]
        options = (*common, *folder, *arguments)
        return ranks.run(_train, assets, module, "llama3_debugmodel", *options, timeout=240.0)

    try:
        theirs = trained(THEIRS)
        step = str(tmp_path / THEIRS / "checkpoint" / "step-2")
        ours = trained(OURS, "--checkpoint.initial_load_path", step)
    finally:
        ranks.stop()
    for rank in (0, 3):  # of each stage one
        check_alike(ours[rank:], theirs[rank:])


def test_the_loss_in_chunks_gathers_once_and_reduces_once(own_ranks):
    own_ranks.run(_loss_in_chunks)


def _loss_in_chunks() -> None:
    import titan_on_cpu  # noqa: F401  before torchtitan, in whichever order these tests run
    from sent import Sent
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    from simplefsdp import simple_fsdp
    from simplefsdp.integrations.torchtitan import OneReduceChunkedLoss

    hidden = torch.randn(2, 8, 4)
    labels = torch.randint(6, (2, 8))
    found = {}
    for cls in (ChunkedLossWrapper, OneReduceChunkedLoss):
        torch.manual_seed(0)
        head = simple_fsdp(torch.nn.Linear(4, 6, bias=False), init_device_mesh("cpu", (2,)))
        config = cls.Config(num_chunks=4, loss_fn=CrossEntropyLoss.Config(global_vocab_size=6))
        loss_fn = config.build()
        loss_fn.set_lm_head(head)
        leaf = hidden.clone().requires_grad_()
        sent = Sent()
        sent.start()
        loss, _ = loss_fn(leaf, labels, torch.tensor(16))
        loss.backward()
        counts = sent.stop()
        found[cls] = loss.detach(), leaf.grad, head.weight.grad.full_tensor(), counts
        with torch.no_grad():
            torch.testing.assert_close(loss_fn(hidden, labels, torch.tensor(16))[0], loss.detach())
    (*theirs, many), (*ours, once) = found.values()
    torch.testing.assert_close(ours, theirs)
    assert many == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}
    assert once == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}


def test_refuses_what_it_cannot_do(own_ranks):
    own_ranks.run(_refusals)


def _refusals() -> None:
    from dataclasses import replace
    from types import SimpleNamespace

    import titan_on_cpu  # noqa: F401  as above

    import simplefsdp.integrations.torchtitan as ours

    config = ours.llama3_debugmodel()
    dims = SimpleNamespace(pp=1, cp=2, ep=1)
    parts = {
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": None,
        "dump_folder": "",
    }
    with pytest.raises(ValueError, match="context_parallel_degree: expected"):
        config.model_spec.parallelize_fn(None, parallel_dims=dims, **parts)
    dims.cp, parts["training"] = 1, replace(config.training, enable_cpu_offload=True)
    with pytest.raises(ValueError, match="enable_cpu_offload"):
        config.model_spec.parallelize_fn(None, parallel_dims=dims, **parts)
    for name in ("llama3_none", "none"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(ours, name)
