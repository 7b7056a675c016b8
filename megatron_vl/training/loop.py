"""The loop over steps: read a batch, train on it, and once in a while log, save, evaluate or trace."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatron_vl import progress
from megatron_vl.errors import UserError
from megatron_vl.parallel import failures
from megatron_vl.signals import asked_to_stop
from megatron_vl.training import checkpoint
from megatron_vl.training.feed import Feed
from megatron_vl.training.metrics import MetricsLog, say
from megatron_vl.training.optimizer import set_learning_rates
from megatron_vl.training.resume import checkpoint_facts
from megatron_vl.training.setup import Run, announce
from megatron_vl.training.source_counts import SourceCounts
from megatron_vl.training.step import NO_LOSS_TOKENS, NOT_FINITE, StepResult, train_step
from megatron_vl.weights.run_folder import by_branch, latest


class TrainingStopped(UserError, RuntimeError):
    """The run cannot continue. The message says why."""


def run_steps(run: Run) -> None:
    """Runs the remaining steps of a run, and saves the last one. Collective.

    Raises:
        TrainingStopped, CheckpointError: the run cannot continue.
    """
    config, last_step = run.config, run.resolved.last_step
    announce(run)
    log = run.log = _open_log(run)
    feed = _open_feed(run)
    skipped_in_a_row: list[str] = []
    is_asked_to_stop = False
    if run.step == 0:
        evaluate(run)

    while run.step < last_step and not is_asked_to_stop:
        progress.enter(progress.LOADING, run.step + 1)
        run.profiler.begin(run.step + 1)
        batch = feed.next_step()
        rates = set_learning_rates(run.optimizer, config, run.step)
        result = train_step(
            run.chunks,
            run.optimizer,
            batch.rows,
            run.grid,
            config.data.seq_len,
            # Every rank learns with the loss whether any rank failed to save, or was asked to stop.
            failed=run.saver is not None and run.saver.error() is not None,
            stop=bool(asked_to_stop()),
            learnt=SourceCounts.of_rows(batch.learnt, len(run.sources)) if run.sources else None,
        )
        run.step += 1
        progress.step_is_done()
        log.leave_out(run.profiler.end(run.step))
        log.add(batch, result.sources)

        is_asked_to_stop = result.stop
        is_last = run.step == last_step or is_asked_to_stop
        if result.skipped:
            run.skipped[result.skipped] += 1
        skipped_in_a_row = [*skipped_in_a_row, result.skipped] if result.skipped else []

        if run.step % config.log.interval == 0 or is_last or result.skipped:
            log.write(run.step, result, rates, run.skipped)
        _stop_if_hopeless(run, result, skipped_in_a_row)
        if config.checkpoint.dir and (is_last or _is_due(run.step, config.checkpoint.interval)):
            save(run)
        if not is_asked_to_stop or run.step == last_step:
            evaluate(run)

    _finish(run, is_asked_to_stop)


def _open_log(run: Run) -> MetricsLog:
    log = MetricsLog(run.config, run.spec, run.grid, run.platform, run.sources)
    log.sources.load_state_dict(run.source_counts)
    if run.bad_samples is not None:
        log.load_bad_samples(run.bad_samples)
    return log


def _open_feed(run: Run) -> Feed:
    return Feed(
        run.grid,
        run.platform,
        run.loader,
        run.config.global_batch_size // run.grid.dp,
        vision=run.spec.vision,
    )


def _is_due(step: int, interval: int) -> bool:
    """Whether something that happens every ``interval`` steps happens after ``step``. 0: it never does."""
    return interval > 0 and step % interval == 0


def save(run: Run) -> None:
    """Starts to save a checkpoint of the current step. Collective."""
    assert run.saver is not None and run.log is not None
    log, loader = run.log, run.loader
    progress.enter(progress.SAVING)
    bad_samples, pending = log.bad_samples()
    if loader is not None:
        bad_samples["dataset"] = loader.dataset

    def take() -> checkpoint.Snapshot:
        return checkpoint.take_snapshot(
            run.step,
            chunks=run.chunks,
            optimizer=run.optimizer,
            spec=run.spec,
            layout=run.layout,
            grid=run.grid,
            loader_state=loader.state_dict() if loader is not None else None,
            run=checkpoint_facts(run, log) | {"bad_samples": bad_samples},
            pending=pending,
        )

    run.saver.start(take, run.step)
    if not run.config.checkpoint.background:
        run.saver.wait()


def evaluate(run: Run) -> None:
    """Evaluates the current weights if an evaluation is due. Collective."""
    if run.evaluator is not None and run.evaluator.due(run.step, run.resolved.last_step):
        assert run.log is not None
        progress.enter(progress.EVALUATING)
        run.log.evaluated(run.step, run.evaluator.run(run.chunks))


def _finish(run: Run, is_asked_to_stop: bool) -> None:
    """Waits until all is written, and says what was saved. Collective."""
    progress.enter(progress.SAVING)
    run.profiler.finish()
    if run.saver is not None:
        run.saver.wait()

    progress.enter(progress.ENDING)
    dist.barrier()  # no rank ends before rank 0 has named the checkpoint
    folder = run.config.checkpoint.dir
    if folder and run.grid.rank == 0:  # other nodes may see an older state of the folder
        say(run.grid, f"checkpoints in {folder}: {list_checkpoints(Path(folder))}")
    if is_asked_to_stop and run.step < run.resolved.last_step:
        then = "start it again to continue" if folder else "nothing is saved, as checkpoint.dir is empty"
        say(run.grid, f"a signal stopped the run after step {run.step} of {run.config.steps}; {then}")
    failures.stop()


def list_checkpoints(folder: Path) -> str:
    """The checkpoints that led to the latest one and those of abandoned branches, or why they are unknown."""
    try:
        present, left = by_branch(folder)
    except (checkpoint.CheckpointError, OSError) as error:
        return str(error)
    steps = str([saved.step for saved in present])
    return f"{steps}; of abandoned branches: {[saved.step for saved in left]}" if left else steps


# --- Why a run cannot continue ------------------------------------------------------------------------------


def _stop_if_hopeless(run: Run, result: StepResult, skipped_in_a_row: list[str]) -> None:
    """Stops a run whose data, weights or checkpoints are of no use, on all ranks at the same step.

    Raises:
        TrainingStopped: the message says why.
    """
    assert run.log is not None
    if problem := run.log.too_many_bad():
        raise TrainingStopped(f"{problem}; they are listed in quarantine.jsonl")
    # At the end two are enough: nobody would look at a run that ended well, and one may be chance.
    is_last = run.step == run.config.steps
    allowed = min(run.config.max_bad_steps, 2) if is_last else run.config.max_bad_steps
    if len(skipped_in_a_row) >= allowed:
        raise TrainingStopped(too_many_skipped(skipped_in_a_row, run.step))
    if result.failed:
        raise TrainingStopped(_save_failure(run))


def too_many_skipped(reasons: list[str], step: int) -> str:
    """The message of a run that ends because its last steps were all skipped for ``reasons``."""
    where = f"in {len(reasons)} steps in a row, the last one step {step}"
    if NOT_FINITE not in reasons:
        return (
            f"no token bore loss {where}; only answers of the assistant do, so look for them in the data set"
        )

    also = " or no token bore loss" if NO_LOSS_TOKENS in reasons else ""
    return f"loss or gradient was not finite{also} {where}"


def _save_failure(run: Run) -> str:
    """Why a checkpoint could not be written, as reported by the rank that failed."""
    own_error = run.saver.error() if run.saver is not None else None
    if own_error is None and (reported := failures.cause()):
        return reported
    try:
        good = latest(Path(run.config.checkpoint.dir))
        last = f"the last good checkpoint is step {good.step if good is not None else 'none'}"
    except checkpoint.CheckpointError as error:
        last = str(error)
    return f"{own_error or 'another rank could not write its checkpoint'}; {last}"
