"""The training run: set-up in order, then steps until the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_vl.config import TrainConfig
from megatron_vl.data.description import LoaderError, SplitFacts
from megatron_vl.errors import UserError, describe, is_fixable
from megatron_vl.models.build import (
    aux_loss_coefficient,
    aux_loss_reason,
    build_chunks,
    check_tensors,
    chunk_tensors,
)
from megatron_vl.parallel import failures
from megatron_vl.parallel.grid import Grid, init_distributed, make_grid
from megatron_vl.platform import Platform, get_platform
from megatron_vl.signals import asked_to_stop
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.training import checkpoint
from megatron_vl.training.evaluation import Evaluator
from megatron_vl.training.feed import Feed
from megatron_vl.training.metrics import MetricsLog, say
from megatron_vl.training.optimizer import build_optimizer, set_learning_rates
from megatron_vl.training.preflight import (
    Start,
    check,
    check_start_weights,
    plan_start,
    read_data,
    remarks,
    run_facts,
)
from megatron_vl.training.step import NO_LOSS_TOKENS, NOT_FINITE, SKIPPED, train_step, wrap
from megatron_vl.weights.run_folder import by_branch, latest


class TrainingStopped(UserError, RuntimeError):
    """The run cannot go on; the message says why."""


@dataclass
class Run:
    """Everything a running training consists of on one rank."""

    config: TrainConfig
    spec: ModelSpec
    layout: Layout
    platform: Platform
    grid: Grid
    chunks: list[DistributedDataParallel]
    optimizer: ChainedOptimizer
    loader: Any
    """The loader on the rank that owns it, None elsewhere."""
    saver: checkpoint.CheckpointSaver | None = None
    evaluator: Evaluator | None = None
    step: int = 0
    """Optimizer steps done, skipped ones among them."""
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SKIPPED, 0))
    """Skipped steps of the whole run, by reason."""
    resumed: bool = False
    """Whether it goes on from a checkpoint of its own."""
    bad_samples: dict[str, Any] | None = None
    """Counts of a checkpoint to go on from, over all ranks."""


def set_up(config: TrainConfig) -> Run:
    """Builds the run: platform, groups, model, weights, optimizer, loader, and state when resuming.
    Collective.

    What can be refused is refused before a process group starts, but for what is in the data set: one rank
    reads it.
    """
    spec, layout = check(config)
    platform = get_platform(config.platform)
    init_distributed(platform)
    failures.watch()
    facts = share_data(config)
    grid = make_grid(layout, owners=config.data.balance)
    start = agree_on_start(config, grid)
    chunks = build_model(config, spec, layout, platform, grid, start_weights=start.source is None)
    wrapped = wrap(config, chunks)
    optimizer = build_optimizer(config, platform, wrapped)
    loader = build_run_loader(config, spec, grid, facts["train"]) if grid.owns_loader else None
    run = Run(config, spec, layout, platform, grid, wrapped, optimizer, loader)
    if config.checkpoint.dir:
        c = config.checkpoint
        run.saver = checkpoint.CheckpointSaver(
            Path(c.dir), spec, layout, grid, c.keep, c.keep_every, start.lineage
        )
    if config.eval.interval:
        run.evaluator = Evaluator(config, spec, grid, platform, facts[config.eval.split])
    resume(run, start)
    return run


def agree_on_start(config: TrainConfig, grid: Grid) -> Start:
    """Where the run begins, as rank 0 sees the folder: another node's view of shared storage may be older.
    Collective."""
    told: list[Any] = [None, ""]
    if grid.rank == 0:
        try:
            told[0] = plan_start(config, grid.dp)
        except (ValueError, OSError, RuntimeError) as error:
            told[1] = str(error)
    if grid.world_size > 1:
        dist.broadcast_object_list(told)
    if told[1]:
        raise checkpoint.CheckpointError(told[1])
    return told[0]


def build_model(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    platform: Platform,
    grid: Grid,
    *,
    start_weights: bool = True,
) -> list[Any]:
    """This rank's chunks with the weights of ``model.checkpoint``, or random ones.

    Args:
        start_weights: off where the run's own checkpoint fills them: ``model.checkpoint`` is not opened then.
    """
    from megatron_vl.data.pixels import read_pixel_norm

    norm = read_pixel_norm(config.model.hf)
    chunks = build_chunks(platform, spec, layout, config, pixel_mean=norm.mean, pixel_std=norm.std)
    tensors = chunk_tensors(chunks, layout, grid.pp_rank, grid.ep_rank)
    check_tensors(spec, layout, tensors)
    if config.model.checkpoint and start_weights:
        checkpoint.load_weights(check_start_weights(config, spec), tensors, grid)
    return chunks


def share_data(config: TrainConfig) -> dict[str, SplitFacts]:
    """What rank 0 has read of the data set's description, by split; collective.

    Thousands of ranks that read and check it themselves would be a load on the storage before the first
    step, and some of them could end with a message that others do not have.

    Raises:
        LoaderError: on all ranks alike, with what rank 0 found wrong.
    """
    answer: list[Any] = [None, ""]
    cause = None
    if dist.get_rank() == 0:
        try:
            answer[0] = read_data(config)
        except Exception as error:  # of whatever kind: the other ranks wait for an answer
            answer[1], cause = str(error) or repr(error), error
    dist.broadcast_object_list(answer, src=0)
    if answer[1]:
        dist.barrier()  # nobody leaves before all have the message
        raise LoaderError(answer[1]) from cause
    return answer[0]


def build_run_loader(config: TrainConfig, spec: ModelSpec, grid: Grid, facts: SplitFacts) -> Any:
    from megatron_vl.data.loader import build_loader

    ranks = {"dp_rank": grid.dp_rank, "dp_size": grid.dp}
    return build_loader(config.data, spec, config.model.hf, **ranks, split="train", facts=facts)


def resume(run: Run, start: Start) -> None:
    """Goes on from the checkpoint that was chosen, when there is one, and says what was chosen."""
    c, source = run.config.checkpoint, start.source
    for line in start.said:
        say(run.grid, line)
    if source is None:
        return
    restored = checkpoint.load(
        source.path,
        chunks=run.chunks,
        optimizer=run.optimizer,
        spec=run.spec,
        layout=run.layout,
        grid=run.grid,
        run=run_facts(run.config, run.grid.dp),
        restart_data=start.restart_data,
    )
    if run.loader is not None and restored.loader is not None:
        load_loader(run.loader, restored.loader, start)
    run.step, run.resumed = source.step, True
    run.bad_samples = kept_counts(run, restored.bad_samples, start.restart_data)

    saved = checkpoint.read_run(source.path)
    run.skipped |= _skipped_before(saved)
    say(run.grid, f"resumed at step {source.step} from {c.dir}")
    if change := _changed_aux_loss(run, saved):
        say(run.grid, f"NOTE: {change}")


_SKIPPED_STEPS, _AUX_LOSS = "skipped_steps", "moe_aux_loss"
"""What a checkpoint's ``run.json`` tells besides the facts that have to be equal."""


def _further_facts(run: Run) -> dict[str, Any]:
    facts: dict[str, Any] = {_SKIPPED_STEPS: dict(run.skipped)}
    if run.spec.language.moe is not None:
        facts[_AUX_LOSS] = aux_loss_coefficient(run.spec, run.config.model)
    return facts


def _skipped_before(saved: dict[str, Any]) -> dict[str, int]:
    """Skipped steps up to a checkpoint; none where it does not say."""
    counts = saved.get(_SKIPPED_STEPS)
    known = counts if isinstance(counts, dict) else {}
    return {reason: count for reason, count in known.items() if reason in SKIPPED and isinstance(count, int)}


def _changed_aux_loss(run: Run, saved: dict[str, Any]) -> str:
    """What to say where the experts' load-balancing loss may have another coefficient than before; else
    nothing."""
    moe, model = run.spec.language.moe, run.config.model
    if moe is None or model.freeze_language:
        return ""

    now = aux_loss_coefficient(run.spec, model)
    if _AUX_LOSS in saved:
        before = saved[_AUX_LOSS]
        told = f"the experts' load-balancing loss had the coefficient {before}, from here on it is {now}"
        return "" if before == now else told
    if model.moe_aux_loss is not None or now == moe.aux_loss_coef:
        return ""
    return (
        "the checkpoint does not say which load-balancing loss its run had. Earlier versions added it with"
        f" router_aux_loss_coef ({moe.aux_loss_coef}) unless model.moe_aux_loss was set, and now it is {now}."
        f" Give --model.moe_aux_loss {moe.aux_loss_coef} to go on as before"
    )


def load_loader(loader: Any, state: dict[str, Any], start: Start) -> None:
    """Goes on in the data; where that is refused, the message says how to start them anew instead."""
    try:
        loader.load_state_dict(state)
    except ValueError as error:
        done = start.source.lineage.data_restart if start.source is not None else None
        anew = "--checkpoint.restart_data true"
        whole = f"{anew} --checkpoint.attempt {done.attempt + 1}" if done else anew
        if anew in str(error):
            raise checkpoint.CheckpointError(str(error).replace(anew, whole)) from error
        raise checkpoint.CheckpointError(
            f"{error}. Or keep weights and optimizer and read the data set from its start: {whole}"
        ) from error


def kept_counts(run: Run, counts: dict[str, Any] | None, restarted: bool) -> dict[str, Any] | None:
    """The checkpoint's counts of bad samples, unless the run goes on with another data set; collective after
    a restart."""
    if counts is None or not restarted:
        return counts
    told = [run.loader is not None and run.loader.dataset == counts.get("dataset")]
    if run.grid.world_size > 1:
        dist.broadcast_object_list(told)  # rank 0 owns a loader
    return counts if told[0] else None


def save(run: Run, log: MetricsLog) -> None:
    """Begins a checkpoint of the current step; collective."""
    assert run.saver is not None
    counts, pending = log.bad_samples()
    if run.loader is not None:
        counts["dataset"] = run.loader.dataset

    def take() -> checkpoint.Snapshot:
        return checkpoint.take_snapshot(
            run.step,
            chunks=run.chunks,
            optimizer=run.optimizer,
            spec=run.spec,
            layout=run.layout,
            grid=run.grid,
            loader_state=run.loader.state_dict() if run.loader is not None else None,
            run=run_facts(run.config, run.grid.dp) | _further_facts(run) | {"bad_samples": counts},
            pending=pending,
        )

    run.saver.start(take, run.step)
    if not run.config.checkpoint.background:
        run.saver.wait()


def train(config: TrainConfig) -> None:
    """Runs a training from set-up to its last step. Raises TrainingStopped or CheckpointError when it cannot
    go on."""
    run = set_up(config)
    say(run.grid, _banner(run))
    if reason := aux_loss_reason(run.spec, config.model):
        say(run.grid, f"load-balancing loss of the experts: {reason}")
    for remark in remarks(config, run.platform.name, run.resumed):
        say(run.grid, f"NOTE: {remark}")
    for note in run.loader.notes if run.loader is not None else []:
        say(run.grid, note)
    log = MetricsLog(config, run.spec, run.grid, run.platform)
    if run.bad_samples is not None:
        log.load_bad_samples(run.bad_samples)
    if run.step >= _last_step(config):
        say(
            run.grid,
            f"nothing to do: step {run.step} of {_last_step(config)} is done; raise steps (or stop_after) to"
            " go on",
        )
    with _closing(run, log):
        signalled = _steps(run, log)
        if run.saver is not None:
            run.saver.wait()
        dist.barrier()  # rank 0 names the checkpoint; nobody leaves before
        if run.saver is not None and run.grid.rank == 0:  # elsewhere shared storage may still look as before
            say(run.grid, f"checkpoints in {config.checkpoint.dir}: {_steps_of(Path(config.checkpoint.dir))}")
        if signalled:
            then = (
                "start it again to go on"
                if run.saver is not None
                else "nothing is saved, as checkpoint.dir is empty"
            )
            say(run.grid, f"stopped behind step {run.step} of {config.steps}, as a signal asked; {then}")
        failures.stop()


@contextlib.contextmanager
def _closing(run: Run, log: MetricsLog) -> Iterator[None]:
    """Closes log and loader at the end.

    After a failure the other ranks know of it first, as closing may take a while, and it stays the error that
    is raised: a log that cannot be closed mostly has the same cause.
    """
    ignored: list[type[Exception]] = []
    try:
        yield
    except Exception as error:
        failures.report(describe(error), is_fixable(error))
        ignored.append(Exception)
        raise
    finally:
        for sink in (log, run.loader):
            if sink is not None:
                with contextlib.suppress(*ignored):
                    sink.close()


def _last_step(config: TrainConfig) -> int:
    return min(config.steps, config.stop_after or config.steps)


def _steps(run: Run, log: MetricsLog) -> bool:
    """All steps that are left, with their checkpoints. Returns whether a signal ended them before."""
    config, grid, c = run.config, run.grid, run.config.checkpoint
    feed = Feed(
        grid, run.platform, run.loader, config.global_batch_size // grid.dp, balanced=config.data.balance
    )
    last = _last_step(config)
    skipped_in_a_row: list[str] = []
    if run.step == 0:
        evaluate(run, log, last)
    while run.step < last:
        data = feed.next_step()
        rates = set_learning_rates(run.optimizer, config, run.step)
        failed = run.saver.error() is not None if run.saver is not None else False
        result = train_step(
            run.chunks, run.optimizer, data.rows, grid, config.data.seq_len, failed, bool(asked_to_stop())
        )
        run.step += 1
        if result.skipped:
            run.skipped[result.skipped] += 1
        log.add(data)
        ends = run.step == last or result.stop
        if run.step % config.log.interval == 0 or ends or not result.updated:
            log.write(run.step, result, rates, run.skipped)
        if problem := log.too_many_bad():
            raise TrainingStopped(f"{problem}; they are listed in quarantine.jsonl")
        skipped_in_a_row = [*skipped_in_a_row, result.skipped] if result.skipped else []
        if len(skipped_in_a_row) >= config.max_bad_steps:
            raise TrainingStopped(_too_many_skipped(skipped_in_a_row, run.step))
        if result.failed:
            raise TrainingStopped(_save_failure(run))
        if c.dir and (ends or c.interval and run.step % c.interval == 0):
            save(run, log)
        if result.stop and run.step < last:
            return True
        evaluate(run, log, last)
    return False


def evaluate(run: Run, log: MetricsLog, last: int) -> None:
    """Evaluates the present weights when it is time to; collective."""
    if run.evaluator is not None and run.evaluator.due(run.step, last):
        log.evaluated(run.step, run.evaluator.run(run.chunks))


def _too_many_skipped(reasons: list[str], step: int) -> str:
    """Why a run ends whose last steps were all skipped, for these reasons."""
    where = f"in {len(reasons)} steps in a row, the last one step {step}"
    if NOT_FINITE not in reasons:
        return (
            f"no token bore loss {where}; answers of the assistant alone do, so look for them in the data set"
        )

    told = "loss or gradient was not finite"
    return f"{told} or no token bore loss {where}" if NO_LOSS_TOKENS in reasons else f"{told} {where}"


def _save_failure(run: Run) -> str:
    """Why a checkpoint could not be written, in the words of a rank that knows."""
    own = run.saver.error() if run.saver is not None else None
    if own is None and (known := failures.cause()):
        return known
    try:
        good = latest(Path(run.config.checkpoint.dir))
        last = f"the last good checkpoint is step {good.step if good is not None else 'none'}"
    except checkpoint.CheckpointError as error:
        last = str(error)
    return f"{own or 'another rank could not write its checkpoint'}; {last}"


def _steps_of(folder: Path) -> str:
    """The steps that led to the latest checkpoint, and what else is there; else why that is not known."""
    try:
        present, left = by_branch(folder)
    except (checkpoint.CheckpointError, OSError) as error:
        return str(error)
    steps = str([saved.step for saved in present])
    return f"{steps}; of abandoned branches: {[saved.step for saved in left]}" if left else steps


def _banner(run: Run) -> str:
    g, p = run.grid, run.layout
    experts = f" x ep {p.ep} (etp {p.etp})" if run.spec.language.moe else ""
    return (
        f"{run.spec.family} on {run.platform.name}: tp {p.tp} x pp {p.pp} x vpp {p.vpp} x dp {g.dp}{experts},"
        f" layers {list(p.layers)}, {run.config.dtype}, rows of {run.config.data.seq_len} tokens,"
        f" {run.config.global_batch_size} rows a step"
    )
