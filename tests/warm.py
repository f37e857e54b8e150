"""What each rank would do first, done once in the server that forks them: imports, and a compile.

It is imported by that server alone, see ``ranks.py``.
"""

from __future__ import annotations

import gc
from contextlib import suppress

import torch
import torch.distributed.tensor
import torch.profiler
from graphs import no_kernels

import simplefsdp.compiler.backend  # noqa: F401
from simplefsdp import clip_grad_norm_, inspect, microbatch  # noqa: F401  which import their files

with suppress(ImportError):
    import transformers  # noqa: F401  the models of which are imported where they are used

torch.set_num_threads(1)
# Without gradients: on a machine with a GPU, backward starts threads, which a fork would lose.
with no_kernels(), torch.no_grad():
    torch.compile(lambda x: torch.relu(x @ x + 1))(torch.ones(2, 2))
torch._dynamo.reset()
gc.collect()
gc.freeze()  # as in conftest.py, for all ranks
