"""How good the model is: loss on held-out text, and a sample of what it writes.

Both run the wrapped model without the compiler: they need no gradients, so compiling would mean
one more graph of the whole model for a few forwards. Every rank must make the same calls, because
they gather parameters from all ranks.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from simplefsdp.frontend.control import reshard, unshard
from simplefsdp.models.build import cross_entropy
from simplefsdp.train import preflight
from simplefsdp.train.data import PROMPT_NBYTES
from simplefsdp.train.metrics import EvalRecord
from simplefsdp.train.session import Session

_WINDOW = 128
_SMALL_NBYTES = 10**9  # of parameters in fp32; they are kept gathered in their compute dtype
_TEMPERATURE = 0.8
_BYTE_VALUES = 256


@torch.no_grad()
def evaluate(session: Session) -> EvalRecord:
    """Mean loss over the held-out batches, which never change; the same result on every rank."""
    session.display.busy("evaluating")
    plan, device = session.plan, session.rank.device
    batches = preflight.batches(
        plan.config, session.corpus, plan.batch, session.dp_rank, held_out=True
    )
    n_batches = min(plan.config.run.eval_batches, batches.batches_per_epoch)
    total = torch.zeros((), device=device)
    with _gathered_once(session.model):
        for inputs, targets in itertools.islice(batches, n_batches):
            at_once = (part.split(plan.batch.at_once) for part in (inputs, targets))
            for some, wanted in zip(*at_once, strict=True):
                part = cross_entropy(session.model(some.to(device)), wanted.to(device))
                total += part * (len(some) / len(inputs))
    dist.all_reduce(total)
    loss = total.item() / (n_batches * session.rank.world_size)
    record = EvalRecord(session.step, loss, loss / math.log(2))
    if session.metrics:
        session.metrics.write(record)
    return record


@contextmanager
def _gathered_once(model: nn.Module) -> Iterator[None]:
    """Keep a small model's full parameters: gathers would take most of the time of its forward."""
    nbytes = sum(param.nbytes for param in model.parameters())  # full parameters, not shards
    if nbytes > _SMALL_NBYTES or dist.get_world_size() == 1:
        yield
        return
    unshard(model)
    try:
        yield
    finally:
        reshard(model)


@torch.no_grad()
def sample(session: Session) -> str:
    """Continue the beginning of the held-out text; the same result on every rank.

    Rank 0 chooses each byte, so that rounding cannot lead ranks to different texts.
    """
    config, device = session.plan.config, session.rank.device
    generator = torch.Generator().manual_seed(config.optim.seed)
    text = session.corpus.validation[:PROMPT_NBYTES].long()
    with _gathered_once(session.model):
        for _ in range(config.run.sample_tokens):
            window = text[-_WINDOW:][None].to(device)
            logits = session.model(window)[0, -1, :_BYTE_VALUES].float().cpu()
            weights = torch.softmax(logits / _TEMPERATURE, dim=-1)
            chosen = torch.multinomial(weights, 1, generator=generator).to(device)
            dist.broadcast(chosen, src=0)
            text = torch.cat((text, chosen.cpu()))
    return bytes(text.tolist()).decode(errors="replace")
