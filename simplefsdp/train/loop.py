"""The training loop of one rank: step, report, save; and at the end evaluate and sample."""

import math
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from simplefsdp.compiler.compilation import begin_preparing
from simplefsdp.frontend.accumulation import microbatch
from simplefsdp.frontend.grad_norm import clip_grad_norm_
from simplefsdp.launcher.errors import RunFailed
from simplefsdp.launcher.ranks import Rank, from_rank_zero
from simplefsdp.models import config_of, flops_per_token
from simplefsdp.train import runs
from simplefsdp.train.build import learning_rate
from simplefsdp.train.evaluate import evaluate, sample
from simplefsdp.train.metrics import EvalRecord, StepRecord, peak_flops, peak_memory_nbytes
from simplefsdp.train.preflight import RunPlan
from simplefsdp.train.runs import TrainerState
from simplefsdp.train.session import Session, open_session
from simplefsdp.train.state import training_state


class _Update(NamedTuple):
    """What one update measured on this rank; tensors, so that nothing waits for the device yet."""

    loss: Tensor
    grad_norm: Tensor
    lr: float


def train(plan: RunPlan, rank: Rank) -> int:
    """Train on this rank, together with all others; return the exit code.

    0 at the end of the run; 128 + signal if Ctrl-C, SIGTERM or SIGHUP ended it early. A checkpoint
    is saved before that, unless ``--checkpoint-every`` is 0.

    Raises:
        RunFailed: the loss is no longer finite, or the last checkpoint could not be saved.
    """
    with open_session(plan, rank) as session:
        if plan.config.compile.compile:
            begin_preparing(plan.config.compile.executor, rank.device.type)
        before = evaluate(session) if session.step == 0 else None
        if before:
            session.display.report_eval(before)
        reports = _train_steps(session)
        session.checkpoints.wait()
        save_error = from_rank_zero(session.checkpoints.error)  # only rank 0 publishes them
        if save_error:
            raise RunFailed(f"the last checkpoint was not saved: {save_error}")
        if session.stopped_by:
            session.display.say(f"stopped at step {session.step}; {_how_to_go_on(session)}")
            dist.barrier()  # a launcher ends rank 0 as soon as another has left
            return 128 + session.stopped_by
        after = evaluate(session)
        _summarise(session, reports, before, after)
    return 0


def _train_steps(session: Session) -> list[StepRecord]:
    """Run to the last step, or to a stop request; return the first and the last report."""
    config = session.plan.config
    reports: list[StepRecord] = []
    session.display.busy("compiling (first step)" if config.compile.compile else "first step")
    clock, step_then = time.perf_counter(), session.step
    while session.step < config.last_step and not session.stopped_by:
        update = _update(session)
        session.step += 1
        session.stopped_by = _agree_to_stop(session.stop.received)
        if not _is_report_due(session):
            # Puts a finished save in place now: if a rank is lost before the next report, the run
            # resumes from that save instead of an older one.
            session.checkpoints.poll()
            continue
        loss = _mean(update.loss)
        seconds = (time.perf_counter() - clock) / (session.step - step_then)
        record = _record(session, update, loss, seconds)
        reports = [*reports[:1], record]
        _report(session, record)
        _save_or_poll(session)
        if _is_due(session, config.run.eval_every) and session.step != config.last_step:
            session.display.report_eval(evaluate(session))
        session.stop.listen()
        clock, step_then = time.perf_counter(), session.step
    return reports


def _update(session: Session) -> _Update:
    optim = session.plan.config.optim
    device = session.rank.device
    inputs, targets = (t.to(device, non_blocking=True) for t in next(session.batches))
    lr = learning_rate(session.step, optim)
    for group in session.optimizer.param_groups:
        group["lr"] = lr
    count = session.plan.batch.microbatches
    parts = list(zip(inputs.chunk(count), targets.chunk(count), strict=True))
    if session.whole_step is not None:
        loss = _accumulate(session, parts[:-1], count)
        last, grad_norm = session.whole_step(*parts[-1])
        return _Update(loss + last, grad_norm, lr)
    loss = _accumulate(session, parts, count)
    grad_norm = clip_grad_norm_(session.model, optim.max_grad_norm)
    session.optimizer.step()
    session.optimizer.zero_grad()
    return _Update(loss, grad_norm, lr)


def _accumulate(session: Session, parts: list[tuple[Tensor, Tensor]], count: int) -> Tensor:
    """Run forward and backward of ``parts``: the first of this rank's ``count`` micro-batches, or
    all of them. Returns their share of this rank's mean loss."""
    total = torch.zeros((), device=session.rank.device)
    for i, (part, wanted) in enumerate(parts):
        with microbatch(session.model, is_last=i == count - 1):
            loss = session.loss(part, wanted) / count
            loss.backward()
        total += loss.detach()
    return total


def _is_report_due(session: Session) -> bool:
    """Whether to report this step; the same on every rank, because a report is a collective.

    The first step has its own report because it compiles: the next one then covers only steps that
    do not.
    """
    run, plan = session.plan.config.run, session.plan
    at_ends = session.step in (plan.first_step + 1, plan.config.last_step)
    every = (run.log_every, run.eval_every, run.checkpoint_every)
    return at_ends or session.stopped_by != 0 or any(_is_due(session, n) for n in every)


def _is_due(session: Session, every: int) -> bool:
    return every > 0 and session.step % every == 0


def _agree_to_stop(signal: int) -> int:
    """The signal that any rank received, or 0: the same on every rank. Reduced on the CPU, so that
    nothing waits for the device."""
    signals = torch.tensor(signal)
    dist.all_reduce(signals, op=dist.ReduceOp.MAX)
    return int(signals.item())


def _mean(loss: Tensor) -> float:
    """Mean loss over all ranks.

    Each data-parallel rank counts once per tensor-parallel rank, so this is also their mean.
    """
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _record(session: Session, update: _Update, loss: float, step_s: float) -> StepRecord:
    config, rank = session.plan.config, session.rank
    tokens_per_s = session.plan.batch.sequences * config.data.seq_len / step_s
    peak = peak_flops(rank.device)
    flops = flops_per_token(config_of(config.model.model), config.data.seq_len)
    return StepRecord(
        step=session.step,
        loss=loss,
        lr=update.lr,
        grad_norm=update.grad_norm.item(),
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        peak_memory_nbytes=peak_memory_nbytes(rank.device),
        mfu=tokens_per_s * flops / (peak * rank.world_size) if peak else None,
    )


def _report(session: Session, record: StepRecord) -> None:
    if not math.isfinite(record.loss) or not math.isfinite(record.grad_norm):
        session.checkpoints.wait()  # a running save is of an earlier step, which was finite
        saved = runs.complete_checkpoints(session.plan.out) if session.rank.rank == 0 else []
        # Rank 0 has put the save in place; another rank might look before that.
        last = from_rank_zero(str(saved[-1]) if saved else "none")
        raise RunFailed(
            f"step {record.step}: loss {record.loss}, gradient norm {record.grad_norm}. Lower --lr "
            f"or lengthen --warmup-steps; last checkpoint: {last}"
        )
    session.display.report(record)
    if session.metrics:
        session.metrics.write(record)


def _save_or_poll(session: Session) -> None:
    every = session.plan.config.run.checkpoint_every
    at_end = session.step == session.plan.config.last_step or session.stopped_by != 0
    if not every or not (at_end or _is_due(session, every)):
        session.checkpoints.poll()
        return
    state = TrainerState(
        step=session.step,
        world_size=session.rank.world_size,
        config=session.plan.saved.to_json(),
        data=session.batches.state_dict(),
    )
    tensors = training_state(
        session.model, session.optimizer, session.rank.rank, session.rank.device
    )
    session.checkpoints.save(tensors, state)


def _summarise(
    session: Session, reports: list[StepRecord], before: EvalRecord | None, after: EvalRecord
) -> None:
    config, out, say = session.plan.config, session.plan.out, session.display.say
    first, last = reports[0], reports[-1]
    say(f"train loss {first.loss:.4f} (step {first.step}) -> {last.loss:.4f} (step {last.step})")
    start = f"{before.validation_loss:.4f} -> " if before else ""
    say(
        f"validation loss {start}{after.validation_loss:.4f} nats/byte, "
        f"{after.bits_per_byte:.4f} bits/byte"
    )
    if config.run.sample_tokens:
        session.display.busy("sampling")
        say(f"sample: {sample(session)!r}")
    say(f"metrics: {out / runs.METRICS}; tensorboard --logdir {out / runs.TENSORBOARD}")
    say(_how_to_go_on(session))


def _how_to_go_on(session: Session) -> str:
    again = runs.how_to_go_on(session.plan.out)
    if again is None:
        return "no checkpoint was saved (--checkpoint-every 0)"
    if session.step < session.plan.config.optim.steps:
        return again
    return f"checkpoint: {runs.complete_checkpoints(session.plan.out)[-1]}"
