"""The training run: set-up, then steps until the end."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_vl import progress
from megatron_vl.config import TrainConfig, video_rule
from megatron_vl.data.blend import Source, sources_of
from megatron_vl.data.description import LoaderError, SplitFacts, difference
from megatron_vl.data.thinking import ThinkingRule
from megatron_vl.errors import UserError, describe, follows, is_fixable
from megatron_vl.models.build import aux_loss_coefficient, aux_loss_reason
from megatron_vl.parallel import failures
from megatron_vl.parallel.grid import ProcessGrid, init_distributed, make_grid
from megatron_vl.parallel.groups import end_groups
from megatron_vl.parallel.signs_of_life import longest_s
from megatron_vl.planning.offload import resolve
from megatron_vl.platform import Platform, get_platform
from megatron_vl.signals import asked_to_stop
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.training import checkpoint
from megatron_vl.training.evaluation import Evaluator
from megatron_vl.training.export_hf import HfExporter
from megatron_vl.training.feed import Feed
from megatron_vl.training.metrics import MetricsLog, say
from megatron_vl.training.model import build_model
from megatron_vl.training.offload.build import chunked_state
from megatron_vl.training.optimizer import build_optimizer, set_learning_rates
from megatron_vl.training.out_of_memory import explained
from megatron_vl.training.preflight import (
    Start,
    changed_video_rule,
    check,
    check_gpu_memory,
    check_open_files,
    check_start_weights,
    plan_start,
    read_data,
    remarks,
    run_facts,
    settle_split,
    split_note,
)
from megatron_vl.training.profiling import StepProfiler
from megatron_vl.training.source_counts import SourceCounts
from megatron_vl.training.step import NO_LOSS_TOKENS, NOT_FINITE, SKIPPED, train_step, wrap
from megatron_vl.weights.run_folder import by_branch, latest, saved_checkpoints
from megatron_vl.words import counted


class TrainingStopped(UserError, RuntimeError):
    """The run cannot continue. The message says why."""


@dataclass
class Run:
    """The state of a run on one rank."""

    config: TrainConfig
    spec: ModelSpec
    layout: Layout
    platform: Platform
    grid: ProcessGrid
    chunks: list[DistributedDataParallel]
    optimizer: ChainedOptimizer
    loader: Any
    """The loader on the rank that owns it; None elsewhere."""
    saver: checkpoint.CheckpointSaver | None = None
    exporter: HfExporter | None = None
    """On rank 0, if the run exports saved steps."""
    evaluator: Evaluator | None = None
    step: int = 0
    """Number of optimizer steps done, including skipped ones."""
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SKIPPED, 0))
    """Skipped steps of the whole run, by reason."""
    resumed: bool = False
    """Whether the run was resumed from its own checkpoint."""
    planned: bool = False
    """Whether batches are planned from stored sizes."""
    swaps: bool = False
    """Whether rows are swapped between data-parallel ranks while the run trains."""
    split: str = ""
    """A line that says where the split of the decoder layers comes from; empty if the run gives the split."""
    bad_samples: dict[str, Any] | None = None
    """Counts over all ranks from the checkpoint that the run resumes from."""
    sources: tuple[Source, ...] = ()
    """The sources of the blend; none if the data set is no blend."""
    source_counts: dict[str, Any] = field(default_factory=dict)
    """What was learnt of each source up to the checkpoint that the run resumes from."""


def set_up(config: TrainConfig) -> Run:
    """Builds the run: platform, groups, model, weights, optimizer, loader, and resumed state. Collective.

    All checks run before a process group starts, except those of the data set, which one rank reads.

    Raises:
        SystemExit: a signal asked a rank to stop, see :func:`end_if_asked`.
    """
    spec, layout = check(config)
    platform = get_platform(config.platform)
    init_distributed(platform, _minutes_of_collectives(config.failures.timeout_s))
    layout = agree_on_split(layout)
    asked = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel))
    settle_split(config, layout)
    dp = dist.get_world_size() // (layout.tp * layout.pp)
    config = resolve(config, spec, layout, dp, platform.memory_gib())
    failures.watch(config.failures.timeout_s)
    end_if_asked(platform)
    facts = share_data(config)
    start, planned = agree_on_start(config, dp, facts["train"])
    swaps = config.data.balance and not planned
    if swaps:
        check_open_files(dp)
    grid = make_grid(layout, owners=swaps)
    progress.now.place = f"tp {grid.tp_rank}, pp {grid.pp_rank}, dp {grid.dp_rank}"
    # The run's own checkpoint fills the model later, and model.checkpoint is not opened then.
    fresh = config.model.checkpoint and start.source is None
    weights = check_start_weights(config, spec) if fresh else None
    if weights is not None and (change := changed_video_rule(weights, config, spec)):
        say(grid, f"NOTE: {change}")

    built = build_model(config, spec, layout, platform, grid, weights=weights)
    wrapped = wrap(config, built.chunks)
    optimizer = build_optimizer(config, platform, wrapped)
    resumes = start.source is not None and not start.restart_data
    loader = None
    if grid.owns_loader:
        loader = build_run_loader(config, spec, grid, facts["train"], resumes, planned)
    run = Run(config, spec, layout, platform, grid, wrapped, optimizer, loader)
    run.planned, run.swaps = planned, swaps
    if swaps:
        why = facts["train"].unplanned or "the run began without plans of its batches, and goes on so"
        say(grid, f"data.balance: rows are swapped between ranks while the run trains; {why}")
    run.split = split_note(asked, spec, layout, start.source)
    sources = sources_of(facts["train"].identity)
    run.sources = sources if len(sources) > 1 else ()
    if config.checkpoint.dir:
        c = config.checkpoint
        run.exporter = build_exporter(config, start) if grid.rank == 0 else None
        run.saver = checkpoint.CheckpointSaver(
            Path(c.dir), spec, layout, grid, c.keep, c.keep_every, start.lineage, run.exporter
        )
    try:
        if config.eval.interval:
            run.evaluator = Evaluator(config, spec, grid, platform, facts[config.eval.split])
        resume(run, start)
        end_if_asked(platform)  # what came before takes minutes with large models
        make_up_exports(run, start)
    except BaseException:
        close_folder(run)
        raise
    return run


def close_folder(run: Run) -> None:
    """Lets other runs write to the run's folder. Call it when this one writes no more."""
    if run.saver is not None:
        run.saver.close()


def end_if_asked(platform: Platform) -> None:
    """Ends all ranks if a signal asked any of them to stop before the first step. Collective.

    Raises:
        SystemExit: on all ranks, with 128 + the number of the signal.
    """
    name = asked_to_stop()
    number = torch.tensor(signal.Signals[name].value if name else 0, device=platform.device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    asked = int(number)
    if not asked:
        return

    if dist.get_rank() == 0:
        print("a signal stopped the run before its first step; nothing was saved", flush=True)
    failures.stop()
    raise SystemExit(128 + asked)


def _minutes_of_collectives(timeout_s: float) -> int:
    """The timeout of collectives: longer than ``failures.timeout_s``, whose message says more."""
    return max(30, math.ceil(longest_s(timeout_s) / 60) + 10) if timeout_s else 30


def agree_on_split(layout: Layout) -> Layout:
    """The layout with the split that rank 0 found. Collective.

    Other nodes may see an older state of shared storage, and so not the checkpoint whose split is kept.
    """
    told = [layout.layers]
    dist.broadcast_object_list(told)
    return dataclasses.replace(layout, layers=told[0])


def agree_on_start(config: TrainConfig, dp: int, facts: SplitFacts) -> tuple[Start, bool]:
    """Where the run begins, and whether its batches are planned, by rank 0's view of the folder. Collective.

    Other nodes may see an older state of shared storage.

    Raises:
        CheckpointError: on all ranks, if rank 0 cannot decide where to begin.
    """
    told: list[Any] = [None, False, ""]
    if dist.get_rank() == 0:
        try:
            told[0] = plan_start(config, dp)
            told[1] = plans_batches(told[0], facts)
        except (ValueError, OSError, RuntimeError) as error:
            told[2] = str(error)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(told)
    if told[2]:
        raise checkpoint.CheckpointError(told[2])
    return told[0], told[1]


def plans_batches(start: Start, facts: SplitFacts) -> bool:
    """Whether batches are planned from stored sizes. A run that continues keeps to what it began with.

    Raises:
        CheckpointError: the run's batches were planned, and cannot be any more.
    """
    if start.source is None or start.restart_data:
        return not facts.unplanned
    planned = bool(_read_run(start.source.path)[_PLANNED])
    if planned and facts.unplanned:
        raise checkpoint.CheckpointError(
            f"the batches of this run were planned from stored sizes, and cannot be now: {facts.unplanned}."
            " Or keep weights and optimizer and read the data set from its start: --checkpoint.restart_data"
            " true"
        )
    return planned


def share_data(config: TrainConfig) -> dict[str, SplitFacts]:
    """The facts of each split, which rank 0 reads from the data set's description. Collective.

    If thousands of ranks read and checked the description themselves, they would overload the storage before
    the first step, and some could end with a message that the others do not have.

    Raises:
        LoaderError: on all ranks, if rank 0 cannot use the data set.
    """
    answer: list[Any] = [None, ""]
    cause = None
    if dist.get_rank() == 0:
        try:
            answer[0] = read_data(config)
        except Exception as error:  # of any type, because the other ranks wait for an answer
            answer[1], cause = str(error) or repr(error), error
    dist.broadcast_object_list(answer, src=0)
    if answer[1]:
        dist.barrier()  # no rank ends before all have the message
        raise LoaderError(answer[1]) from cause
    return answer[0]


def build_run_loader(
    config: TrainConfig,
    spec: ModelSpec,
    grid: ProcessGrid,
    facts: SplitFacts,
    resumes: bool,
    planned: bool,
) -> Any:
    from megatron_vl.data.loader import build_loader

    return build_loader(
        config.data,
        spec,
        config.model.hf,
        dp_rank=grid.dp_rank,
        dp_size=grid.dp,
        split="train",
        facts=facts,
        rows_per_step=config.global_batch_size,
        resumes=resumes,
        planned=planned,
    )


def build_exporter(config: TrainConfig, start: Start) -> HfExporter | None:
    """The exporter of saved steps, if the run exports them. On rank 0."""
    c = config.checkpoint
    if not c.export_hf:
        return None
    return HfExporter(Path(c.dir), Path(config.model.hf), c.export_hf, _last_step(config))


def make_up_exports(run: Run, start: Start) -> None:
    """Starts the exports that an earlier start of the run did not finish; on rank 0."""
    source = start.source
    if run.exporter is None or source is None:
        return
    saved = saved_checkpoints(Path(run.config.checkpoint.dir))
    line = [one for one in saved if start.lineage.holds(source.step, one.point)]
    run.exporter.make_up(sorted(line, key=lambda one: one.step))


def resume(run: Run, start: Start) -> None:
    """Resumes from the chosen checkpoint, if there is one, and prints which one was chosen."""
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
    if run.loader is not None and restored.loader is not None and restored.loader.ranks:
        load_loader(run.loader, restored.loader, start, run.grid.dp_rank)
    run.step, run.resumed = source.step, True
    run.bad_samples = kept_counts(run, restored.bad_samples, start.restart_data)

    saved = _read_run(source.path)
    run.skipped |= _skipped_before(saved)
    run.source_counts = saved[_SOURCES]
    say(run.grid, f"resumed at step {source.step} from {c.dir}")
    changes = _changed_aux_loss(run, saved), _changed_thinking(run, saved), _changed_moments(run, saved)
    for change in filter(None, changes):
        say(run.grid, f"NOTE: {change}")


_SKIPPED_STEPS, _AUX_LOSS, _THINKING, _SOURCES = "skipped_steps", "moe_aux_loss", "thinking_rule", "sources"
_PLANNED = "planned_batches"
_MOMENTS = "moments_dtype"
"""Further entries of a checkpoint's ``run.json``, which need not be equal when resuming."""


def _read_run(source: Path) -> dict[str, Any]:
    """Reads ``run.json`` of a step folder that a training run wrote. Raises CheckpointError."""
    saved = checkpoint.read_run(source)
    for name in (_SKIPPED_STEPS, _THINKING, _SOURCES, _PLANNED, _MOMENTS):
        if name not in saved:
            raise checkpoint.CheckpointError(f"{source / 'run.json'} lacks {name}: no training run wrote it")
    return saved


def _further_facts(run: Run) -> dict[str, Any]:
    facts: dict[str, Any] = {
        _SKIPPED_STEPS: dict(run.skipped),
        "video_rule": video_rule(run.config.data, run.spec.vision.video_timestamps),
        _THINKING: dataclasses.asdict(ThinkingRule.of(run.config.data)),
        _MOMENTS: run.config.optimizer.moments_dtype,
        _PLANNED: run.planned,
    }
    if run.spec.language.moe is not None:
        facts[_AUX_LOSS] = aux_loss_coefficient(run.spec, run.config.model)
    return facts


def _skipped_before(saved: dict[str, Any]) -> dict[str, int]:
    """Skipped steps up to a checkpoint, as far as they can be read."""
    counts = saved[_SKIPPED_STEPS]
    known = counts if isinstance(counts, dict) else {}
    return {reason: count for reason, count in known.items() if reason in SKIPPED and isinstance(count, int)}


def _changed_moments(run: Run, saved: dict[str, Any]) -> str:
    """A note if Adam's moments were saved in another type; otherwise empty."""
    before, now = saved[_MOMENTS], run.config.optimizer.moments_dtype
    if before == now:
        return ""
    how = "rounded to the nearest bfloat16" if now == "bfloat16" else "converted without loss"
    return (
        f"Adam's moments were saved in {before} and are {how}, because optimizer.moments_dtype is {now} from"
        " here on"
    )


def _changed_thinking(run: Run, saved: dict[str, Any]) -> str:
    """A note if the rule for the loss of answers with thinking has changed; otherwise empty.

    A loader that continues in its data refuses such a change. One that restarts its data does not.
    """
    if run.loader is None or not run.loader.thinking:
        return ""

    before = saved[_THINKING]
    changed = [
        f"data.{name} was {before[name]}, is {rule}"
        for name, rule in run.loader.thinking.items()
        if before[name] != rule
    ]
    return (
        f"answers with thinking bear loss under another rule from here on: {'; '.join(changed)}"
        if changed
        else ""
    )


def _changed_aux_loss(run: Run, saved: dict[str, Any]) -> str:
    """A note if the coefficient of the experts' load-balancing loss has changed; otherwise empty."""
    moe, model = run.spec.language.moe, run.config.model
    if moe is None or model.freeze_language:
        return ""

    now = aux_loss_coefficient(run.spec, model)
    before = saved[_AUX_LOSS]
    told = f"the experts' load-balancing loss had the coefficient {before}; from here on it is {now}"
    return "" if before == now else told


def load_loader(loader: Any, states: checkpoint.LoaderStates, start: Start, dp_rank: int) -> None:
    """Makes the loader continue in its data.

    Raises:
        CheckpointError: the loader refuses the state. The message says how to restart the data instead.
    """
    try:
        loader.load_state_dict(states.read(dp_rank % states.ranks), states.read)
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
    """The checkpoint's counts of bad samples; None if the run continues with another data set.

    Collective if the data was restarted.
    """
    if counts is None or not restarted:
        return counts
    told = [run.loader is not None and not difference(counts.get("dataset"), run.loader.dataset)]
    if run.grid.world_size > 1:
        dist.broadcast_object_list(told)  # rank 0 owns a loader
    return counts if told[0] else None


def save(run: Run, log: MetricsLog) -> None:
    """Starts to save a checkpoint of the current step. Collective."""
    assert run.saver is not None
    progress.enter(progress.SAVING)
    counts, pending = log.bad_samples()
    learnt = {_SOURCES: log.sources.state_dict()}
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
            run=run_facts(run.config, run.grid.dp) | _further_facts(run) | learnt | {"bad_samples": counts},
            pending=pending,
        )

    run.saver.start(take, run.step)
    if not run.config.checkpoint.background:
        run.saver.wait()


def train(config: TrainConfig) -> None:
    """Runs a training from set-up to its last step.

    Raises:
        TrainingStopped, CheckpointError: the run cannot continue.
    """
    try:
        _train(config)
    finally:
        failures.stop_alone()


def _train(config: TrainConfig) -> None:
    with explained(config):
        run = set_up(config)
    try:
        _run(run, config)
        finish_exports(run)
    except BaseException:
        if run.grid.world_size == 1:  # other ranks may write their parts of a checkpoint until they end
            close_folder(run)
        raise
    close_folder(run)


def _run(run: Run, config: TrainConfig) -> None:
    """All steps of a run that is set up, and the end of its log and loader."""
    say(run.grid, _banner(run))
    if reason := aux_loss_reason(run.spec, config.model):
        say(run.grid, f"load-balancing loss of the experts: {reason}")
    for remark in remarks(config, run.platform.name, run.resumed):
        say(run.grid, f"NOTE: {remark}")
    if run.split:
        say(run.grid, run.split)
    if note := check_gpu_memory(run.config, run.spec, run.layout, run.grid.world_size):
        say(run.grid, f"NOTE: {note}")
    # The notes look at all ranks, so only the rank that prints them asks for them.
    for note in run.loader.notes if run.loader is not None and run.grid.rank == 0 else []:
        say(run.grid, note)
    log = MetricsLog(config, run.spec, run.grid, run.platform, run.sources)
    log.sources.load_state_dict(run.source_counts)
    if run.bad_samples is not None:
        log.load_bad_samples(run.bad_samples)
    if run.step >= _last_step(config):
        say(
            run.grid,
            f"nothing to do: step {run.step} of {_last_step(config)} is done; raise steps (or stop_after) to"
            " continue",
        )

    profiler = StepProfiler(config, run.grid.rank)
    with _closing(run, log, profiler), explained(config):
        signalled = _steps(run, log, profiler)
        progress.enter(progress.SAVING)
        profiler.finish()
        if run.saver is not None:
            run.saver.wait()
        progress.enter(progress.ENDING)
        dist.barrier()  # no rank ends before rank 0 has named the checkpoint
        if run.saver is not None and run.grid.rank == 0:  # other nodes may see an older state of the folder
            say(run.grid, f"checkpoints in {config.checkpoint.dir}: {_steps_of(Path(config.checkpoint.dir))}")
        if signalled:
            then = (
                "start it again to continue"
                if run.saver is not None
                else "nothing is saved, as checkpoint.dir is empty"
            )
            say(run.grid, f"a signal stopped the run after step {run.step} of {config.steps}; {then}")
        failures.stop()


@contextlib.contextmanager
def _closing(run: Run, log: MetricsLog, profiler: StepProfiler) -> Iterator[None]:
    """A context that closes log and loader at its end.

    A failure is first reported to the other ranks, because closing may take a while. It also remains the
    error that is raised: if the log cannot be closed then, the cause is usually the same.
    """
    failed = False
    ignored: list[type[Exception]] = []
    try:
        yield
    except BaseException as error:
        failed = True
        if isinstance(error, Exception):
            failures.report(describe(error), is_fixable(error), follows=follows(error))
            ignored.append(Exception)
        raise

    finally:
        with contextlib.suppress(*ignored):
            if failed:
                profiler.drop()
                if run.exporter is not None:
                    run.exporter.stop()
        with contextlib.suppress(*ignored):
            log.close(failed=failed)
        with contextlib.suppress(*ignored):
            if run.loader is not None:
                run.loader.close()


def finish_exports(run: Run) -> None:
    """Waits for the exports on rank 0, while the other ranks may end. A signal ends the wait."""
    if run.exporter is None:
        return
    end_groups()  # first, because ending them may wait for all ranks
    run.exporter.wait(asked_to_stop)
    assert run.saver is not None
    run.saver.prune()  # deletes the checkpoints that were kept only for their export


def _last_step(config: TrainConfig) -> int:
    return min(config.steps, config.stop_after or config.steps)


def _steps(run: Run, log: MetricsLog, profiler: StepProfiler) -> bool:
    """Runs the remaining steps and saves their checkpoints. Returns whether a signal ended them early."""
    config, grid, c = run.config, run.grid, run.config.checkpoint
    feed = Feed(
        grid,
        run.platform,
        run.loader,
        config.global_batch_size // grid.dp,
        balanced=run.swaps,
        vision=run.spec.vision,
    )
    last = _last_step(config)
    skipped_in_a_row: list[str] = []
    if run.step == 0:
        evaluate(run, log, last)

    while run.step < last:
        progress.enter(progress.LOADING, run.step + 1)
        profiler.begin(run.step + 1)
        data = feed.next_step()
        rates = set_learning_rates(run.optimizer, config, run.step)
        failed = run.saver.error() is not None if run.saver is not None else False
        learnt = SourceCounts.of_rows(data.learnt, len(run.sources)) if run.sources else None
        result = train_step(
            run.chunks,
            run.optimizer,
            data.rows,
            grid,
            config.data.seq_len,
            failed,
            bool(asked_to_stop()),
            learnt,
        )
        run.step += 1
        progress.step_is_done()
        if result.skipped:
            run.skipped[result.skipped] += 1
        log.leave_out(profiler.end(run.step))
        log.add(data, result.sources)
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
    """Evaluates the current weights if an evaluation is due. Collective."""
    if run.evaluator is not None and run.evaluator.due(run.step, last):
        progress.enter(progress.EVALUATING)
        log.evaluated(run.step, run.evaluator.run(run.chunks))


def _too_many_skipped(reasons: list[str], step: int) -> str:
    """The message of a run that ends because its last steps were all skipped for ``reasons``."""
    where = f"in {len(reasons)} steps in a row, the last one step {step}"
    if NOT_FINITE not in reasons:
        return (
            f"no token bore loss {where}; only answers of the assistant do, so look for them in the data set"
        )

    told = "loss or gradient was not finite"
    return f"{told} or no token bore loss {where}" if NO_LOSS_TOKENS in reasons else f"{told} {where}"


def _save_failure(run: Run) -> str:
    """Why a checkpoint could not be written, as reported by the rank that failed."""
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
    """The checkpoints that led to the latest one and those of abandoned branches, or why they are unknown."""
    try:
        present, left = by_branch(folder)
    except (checkpoint.CheckpointError, OSError) as error:
        return str(error)
    steps = str([saved.step for saved in present])
    return f"{steps}; of abandoned branches: {[saved.step for saved in left]}" if left else steps


def _banner(run: Run) -> str:
    g, p = run.grid, run.layout
    experts = f" x ep {p.ep} (etp {p.etp})" if run.spec.language.moe else ""
    moments = run.config.optimizer.moments_dtype
    state = f", moments in {moments}" if moments != "float32" else ""
    chunked = chunked_state(run.optimizer)
    if chunked is not None and chunked.host_bytes:
        state += f", {chunked.host_bytes / 2**30:.1f} GiB of optimizer state in host memory"
    return (
        f"{run.spec.family} on {run.platform.name}: tp {p.tp} x pp {p.pp} x vpp {p.vpp} x dp {g.dp}{experts},"
        f" layers {list(p.layers)}, {run.config.dtype}, rows of {run.config.data.seq_len} tokens,"
        f" {counted(run.config.global_batch_size, 'row')} a step{state}"
    )
