"""What the README shows is run as it stands there; the tables of RESULTS.md are the results'."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launched import launch

from simplefsdp.compiler.options import Options

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
sys.path.insert(0, str(ROOT / "benchmarks"))

import results_tables  # noqa: E402


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)


def written(folder: Path, code: str) -> Path:
    script = folder / "readme.py"
    script.write_text(code)
    return script


def on_ranks(folder: Path, code: str, ranks: int) -> str:
    return launch(written(folder, code), ranks)


def test_python_of_the_readme_runs(tmp_path):
    train, resume = blocks("python")
    train = train.replace('"auto"}', '"auto", "executor": "aot_eager"}')
    assert "aot_eager" in train
    moments = "optimizer.state_dict()['state'][0]['exp_avg'].full_tensor()"
    values = f"{moments}.abs().sum().item(), model[0].weight.full_tensor().sum().item()"
    show = f"values = {values}\nif dist.get_rank() == 0: print(*values)\n"
    end = "dist.destroy_process_group()\n"
    assert train.endswith(end)
    # What each step learns from is seeded here: ten losses of other data say little.
    seeded = train.replace("for step in", "torch.manual_seed(dist.get_rank())\nfor step in", 1)
    printed = on_ranks(tmp_path, seeded.replace(end, show + end), 2)
    losses = {step: float(x) for step, x in re.findall(r"step (\d): loss ([\d.]+), norm", printed)}
    assert len(losses) == 10 and losses["9"] < 0.95 * losses["0"]

    made, *_ = train.partition("for step in")
    before = printed.splitlines()[-1]
    after = on_ranks(tmp_path, made + resume + show + end, 2).splitlines()[-1]
    assert before == after

    (load,) = re.findall(r"`(dcp\.load\(\{.*plain.*?\))`", README)
    build = re.search(r"model = (nn\.Sequential.*)", train)
    assert build
    plain = "import torch.distributed.checkpoint as dcp\nfrom torch import nn\n"
    plain += f"plain = {build[1]}\n{load}\nprint(plain[0].weight.sum().item())"
    loaded = on_ranks(tmp_path, plain, 1)
    assert float(loaded) == pytest.approx(float(before.split()[1]), abs=1e-4)


PRELUDE = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module
)
from simplefsdp import simple_fsdp
device = "cpu"
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
hybrid = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
hybrid.load_state_dict(model.state_dict())
"""
COMPARE = """
x = torch.ones(2, 8)
torch.testing.assert_close(model(x), hybrid(x))
for part in (hybrid, model):
    options = {"executor": "aot_eager"}
    torch.compile(part, backend="simplefsdp", options=options)(x).sum().backward()
    assert all(p.grad is not None and p.grad.placements == p.placements for p in part.parameters())
assert {p.placements for p in hybrid.parameters()} == {(Replicate(), Shard(0))}
assert model[2].weight.device_mesh.mesh_dim_names == ("tp", "dp")
assert model[2].weight.placements == (Shard(1), Shard(0))
print("fine")
dist.destroy_process_group()
"""


def test_hybrid_and_tensor_parallel(tmp_path):
    (code,) = blocks("python four")
    printed = on_ranks(tmp_path, PRELUDE + code + COMPARE, 4)
    assert printed.count("fine") == 4


def test_options_and_figures_of_the_readme_are_those_of_the_code():
    named = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert sorted(named) == sorted(field.name for field in fields(Options))
    variants = json.loads((results_tables.RESULTS / "step_default.json").read_text())["variants"]
    rows = {"auto takes": "auto", "manual": "manual", "FSDP2 compiled": "fsdp2_compiled"}
    told = " ".join(README.split())
    for shown, name in rows.items():
        assert f"{shown} {variants[name]['to_limit']:.2f}" in told
    cells = json.loads((results_tables.GPU / "wire.json").read_text())["cells"].values()
    measured = [cell["variants"] for cell in cells if "variants" in cell]
    for shown, name in {"eager's": "fsdp2_eager", "compiled's": "fsdp2_compiled"}.items():
        peaks = [{n: v["memory_nbytes"] for n, v in of.items()} for of in measured]
        ratios = [of["auto"]["total_peak"] / of[name]["total_peak"] for of in peaks]
        assert f"{min(ratios):.2f} to {max(ratios):.2f} of {shown}" in told
    rows = {"eager takes": ["fsdp2_eager"], "compiled": ["fsdp2_compiled"]}
    rows |= {"torch's passes": ["torch_manual", "torch_auto"]}
    for shown, names in rows.items():
        ratios = [of[name]["step_s"] / of["auto"]["step_s"] for of in measured for name in names]
        assert f"{shown} {min(ratios):.2f} to {max(ratios):.2f}" in told


MODEL = """
import copy, torch, torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, TrainingArguments
import simplefsdp
from simplefsdp import simple_fsdp
config = LlamaConfig(
    vocab_size=67, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1,
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 67, (8, 9))]
"""
SOON = '.compile(backend="simplefsdp", options={"executor": "aot_eager"})'


def recipe(kind: str) -> str:
    (code,) = blocks(f"python {kind}")
    return MODEL + code.replace('.compile(backend="simplefsdp")', SOON)


@pytest.mark.slow
def test_a_whole_step(tmp_path):
    (code,) = blocks("python step")
    code = code.replace("max_norm=1.0", "max_norm=1.0, options={'executor': 'aot_eager'}")
    start = "import simplefsdp\nsimple_fsdp(model)\nx = torch.randn(4, 8)\n"
    start += "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
    check = """
assert all(step(x).loss < loss for _ in range(3)) and norm > 0
dist.destroy_process_group()
"""
    on_ranks(tmp_path, PRELUDE + start + code + check, 2)


@pytest.mark.slow
def test_a_folder_of_hugging_face(tmp_path):
    pytest.importorskip("transformers")
    start = "dist.init_process_group('gloo')\nfolder = 'given'\n"
    given = "if dist.get_rank() == 0: model.save_pretrained(folder)\ndist.barrier()\n"
    check = """
for fqn, param in AutoModelForCausalLM.from_pretrained("trained").named_parameters():
    assert torch.equal(param, model.get_parameter(fqn).full_tensor())
dist.destroy_process_group()
"""
    code = recipe("folder")
    code = code.replace(MODEL, MODEL + start + given) + check
    on_ranks(tmp_path, code, 2)
    assert (tmp_path / "trained" / "config.json").exists()


@pytest.mark.slow
def test_trainer_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    code = recipe("transformers").replace(
        'TrainingArguments("out")',
        'TrainingArguments("out", use_cpu=True, num_train_epochs=1, report_to=[])',
    )
    assert "use_cpu" in code
    on_ranks(tmp_path, code + "\ndist.destroy_process_group()\n", 2)
    assert (tmp_path / "out" / "checkpoint-1" / "simplefsdp" / ".metadata").exists()


def test_adapters_of_peft(tmp_path):
    pytest.importorskip("peft")
    start = "from peft import LoraConfig, get_peft_model\ndist.init_process_group('gloo')\n"
    code = recipe("peft").replace(MODEL, MODEL + start)
    on_ranks(tmp_path, code + "dist.destroy_process_group()\n", 2)
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_names_that_other_libraries_are_given(tmp_path):
    code = ""
    (name,) = re.findall(r"`(import simplefsdp\.integrations\.lightning)`", README)
    (module,) = re.findall(r"`Accelerator` from `([\w.]+)`", README)
    if find_spec("accelerate"):  # test_accelerate.py trains with it
        code += f"from {module} import Accelerator\nAccelerator(cpu=True)\n"
    (strategy,) = re.findall(r"`Trainer\((strategy=\"\w+\")\)`", README)
    if find_spec("lightning"):
        code += f"{name}\nfrom lightning import Trainer\nTrainer({strategy}, accelerator='cpu')\n"
    ((module, config),) = re.findall(r"`--module ([\w.]+) --config (\w+)`", README)
    if find_spec("torchtitan") and find_spec("triton") and torch.__version__ >= "2.13":
        code += f"import {module} as ours\nassert ours.{config}().model_spec\n"
    on_ranks(tmp_path, code, 1)


def test_it_is_of_one_sitting():
    assert len(README.encode()) <= 10_000


def test_tables_of_results_are_those_of_the_files():
    path = ROOT / "benchmarks" / "RESULTS.md"
    assert results_tables.rewritten(path.read_text()) == path.read_text()
    assert len(results_tables.MARKED.findall(path.read_text())) == 11
