"""The README's Python, run as one script by torchrun on two ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_python_of_the_readme_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 6  # wrap, compile, train, checkpoint, resume
    script = tmp_path / "readme.py"
    tail = "dist.destroy_process_group()\n"
    script.write_text("\n".join(blocks).replace('"inductor"', '"aot_eager"') + tail)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert (tmp_path / "checkpoint" / ".metadata").exists()
