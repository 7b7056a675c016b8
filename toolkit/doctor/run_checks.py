"""Checks a run, a data set or a checkpoint as far as possible without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_vl import host_memory
from megatron_vl.config import CheckpointConfig, RunConfigError, TrainConfig, parse_config, validate_config
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.source.dataset_description import SplitFacts
from megatron_vl.errors import UserError
from megatron_vl.planning.gpus import GpuInfo, calibration_for_platform
from megatron_vl.planning.memory import (
    GPU_MEMORY_GIB,
    RESERVE_GIB,
    StageMemory,
    peak_stage_gib,
    stage_memories,
)
from megatron_vl.planning.predict import RunPrediction, predict_layout
from megatron_vl.planning.run_layout import rates_apply
from megatron_vl.plurals import pluralize
from megatron_vl.spec.adapters import trained_table
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.families.base import text_config
from megatron_vl.training.preflight import check_data_path, check_start_weights, config_remarks
from megatron_vl.training.resolve import MachineMemory, read_split_facts, resolve_run
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.doctor import Finding, broken_finding, note_finding, ok_finding
from toolkit.doctor.family_checks import check_family
from toolkit.doctor.machine_checks import check_disk
from toolkit.layouts import layout_sizes_text
from toolkit.run_adapters import with_megatron_adapter

MAX_LEFT_OUT_SHARE = 0.5
"""Share of a source's samples above which it is a fault that they are left out."""
NUM_SAMPLES_READ = 200
"""Number of samples that are read for it where no sizes are stored."""
MEMORY_ADVICE = (
    "use more tp, pp or GPUs, recompute.vision or recompute.language, a smaller data.seq_len or "
    "data.max_patches"
)


@dataclass
class RunReport:
    """Findings about a run and, if the run is possible, its memory by stage."""

    findings: list[Finding] = field(default_factory=list)
    memory_by_stage: list[StageMemory] = field(default_factory=list)


def check_data(dataset_dir: Path) -> Finding:
    """Compares every byte of a data set with its recorded hashes."""
    from data_tools.verify import verify_dataset

    try:
        shards, problems = verify_dataset(dataset_dir)
    except (ValueError, OSError) as error:
        return broken_finding("data set", str(error), "convert it with `megatron-vl data convert`")
    if problems:
        return broken_finding(
            "data set", "; ".join(problems[:5]), "copy these shards again, or convert the data again"
        )
    return ok_finding(
        "data set", f"{pluralize(shards, 'shard')} of {dataset_dir} {'is' if shards == 1 else 'are'} intact"
    )


def check_checkpoint(checkpoint_dir: Path) -> Finding:
    """Compares every byte of weights, or of a run's latest (or the given) checkpoint, with its hashes."""
    from converters.compare import verify_checkpoint_hashes
    from toolkit.checkpoint.contents import find_step_dir, verify_checkpoint

    is_run = any(any(checkpoint_dir.glob(name)) for name in ("run.json", "step_*"))
    try:
        verified_dir = find_step_dir(checkpoint_dir) if is_run else checkpoint_dir
        problems = (
            verify_checkpoint(verified_dir)
            if is_run
            else [f"{item.name} {item.how}" for item in verify_checkpoint_hashes(verified_dir).differences]
        )
    except (ValueError, OSError, RuntimeError) as error:
        return broken_finding(
            "checkpoint", str(error), "give a folder of weights, a run's folder, or one of its step_ folders"
        )

    if problems:
        return broken_finding(
            "checkpoint",
            "; ".join(problems[:5]),
            "copy or write it again, or go back to an earlier step with `megatron-vl checkpoint rollback`",
        )
    return ok_finding("checkpoint", f"{verified_dir} is intact")


def check_run(run_arguments: list[str], world_size: int | None, gpus: list[GpuInfo]) -> RunReport:
    """Checks a run's YAML and overrides.

    Args:
        run_arguments: ``--config RUN.yaml`` and ``--section.field value``, as the trainer takes them.
        world_size: GPUs of the whole run; None: those of this machine or, without GPUs, as few as
            the layout needs.
    """
    # A check that fails ends the list only if the later ones need its result.
    report = RunReport()
    advice = "megatron-vl train --help explains every field"
    try:
        config = parse_config(run_arguments)
        advice = "change the field, or give the number of GPUs with --world-size"
        world_size = world_size or len(gpus) or config.parallel.replica_ranks
        dp_size = validate_config(config, world_size)
    except RunConfigError as error:
        report.findings.append(broken_finding("config", str(error), advice))
        return report

    layout_text = layout_sizes_text(dataclasses.asdict(config.parallel) | {"dp": dp_size})
    report.findings.append(ok_finding("config", f"{pluralize(world_size, 'rank')}: {layout_text}"))
    run, refusal_message = _resolve_or_report(config, world_size, gpus, report)
    if run is None:
        return report

    _report_predictions(run, world_size, gpus, report)
    report.findings += [
        _check_positions(config, run.spec),
        _check_build(run_arguments, world_size),
        *_check_resume(run),
    ]
    on_gpus = config.platform == "cuda" or (config.platform == "auto" and bool(gpus))
    report.findings += check_family(config, run.spec, on_gpus)

    # Weights and data, of which a little is read. An input that is missing was reported with the layout.
    for input_finding in (_check_first_row(run), *_check_left_out(run), *_check_start_weights(run)):
        if not refusal_message or input_finding.found != refusal_message:
            report.findings.append(input_finding)
    for remark in config_remarks(config, not gpus, run.is_resumed):
        report.findings.append(note_finding("run", remark, ""))
    return report


def _report_predictions(run: ResolvedRun, world_size: int, gpus: list[GpuInfo], report: RunReport) -> None:
    """Adds what the planner predicts, without building anything."""
    report.memory_by_stage = stage_memories(run.config, run.spec, run.layout, run.dp)
    report.findings += _check_memory(run.config, report.memory_by_stage, gpus)
    speed_calibration = calibration_for_platform(run.config.platform)
    if rates_apply(run.config, speed_calibration):
        prediction = predict_layout(
            run.config, run.spec, world_size, run.layout, calibration=speed_calibration
        )
        report.findings.append(_estimate_speed(prediction))


def _resolve_or_report(
    config: TrainConfig, world_size: int, gpus: list[GpuInfo], report: RunReport
) -> tuple[ResolvedRun | None, str]:
    """Resolves a run, and adds a finding about its model and layout to ``report``.

    Returns:
        The run, and the message if it is refused. A run that is refused only for its checkpoints is resolved
        without them, because they say nothing about the rest. Otherwise, it is None.
    """
    # The planner decides with this machine's memory, as rank 0 of the run would.
    gpu_gib = min((gpu.total_memory_mib / 1024 for gpu in gpus), default=next(iter(GPU_MEMORY_GIB.values())))
    host_gib = host_memory.available_bytes() / host_memory.GIB / max(1, min(world_size, len(gpus)))
    machine = MachineMemory(None if config.platform == "cpu" else gpu_gib, host_gib if gpus else math.inf)
    with tempfile.TemporaryDirectory(prefix="megatron-vl-") as temporary_dir:
        try:
            # A run converts PEFT's files into its folder before it starts.
            config = with_megatron_adapter(config, temporary_dir if config.checkpoint.dir else "")
            run = resolve_run(config, world_size, machine)
        except (ValueError, OSError, RuntimeError, UserError) as error:
            refusal_message = str(error)
            advice = "correct the field or path that the message names"
            if refusal_message.startswith("model.checkpoint ") and "does not exist" in refusal_message:
                advice = _convert_command(config)
            report.findings.append(broken_finding("model and layout", refusal_message, advice))
            fresh_config = dataclasses.replace(config, checkpoint=CheckpointConfig())
            try:
                return resolve_run(fresh_config, world_size, machine, show_only=True), refusal_message
            except (ValueError, OSError, RuntimeError):
                return None, refusal_message

    layers_text = f"decoder layers {list(run.layout.layers_per_chunk)} on {config.parallel.pp} stages"
    report.findings.append(ok_finding("model and layout", f"{run.spec.family}, {layers_text}"))
    return run, ""


def _convert_command(config: TrainConfig) -> str:
    """The command that writes the weights of a run."""
    weights_dir = "DIR" if Path(config.model.checkpoint).exists() else config.model.checkpoint
    return f"megatron-vl convert --hf {config.model.hf} --out {weights_dir} writes them"


def _check_memory(
    config: TrainConfig, memory_by_stage: list[StageMemory], gpus: list[GpuInfo]
) -> Iterator[Finding]:
    peak_memory_gib = peak_stage_gib(memory_by_stage)
    needed_gib = peak_memory_gib + RESERVE_GIB
    if config.platform == "cpu":
        yield ok_finding(
            "memory",
            f"{peak_memory_gib:.1f} GiB estimated for the fullest rank; the estimate is made for GPUs",
        )
        return
    finding_text = (
        f"{peak_memory_gib:.1f} GiB estimated for the fullest "
        f"GPU, {RESERVE_GIB:.0f} GiB more should stay free"
    )
    if gpus:
        smallest_gpu_gib = min(gpu.total_memory_mib for gpu in gpus) / 1024
        finding_text += f"; the GPUs here have {smallest_gpu_gib:.1f}"
        fits, poor_finding = needed_gib <= smallest_gpu_gib, broken_finding
    else:
        fitting_gpus = [name for name, gib in GPU_MEMORY_GIB.items() if needed_gib <= gib]
        finding_text += f": fits {', '.join(fitting_gpus) or 'none of ' + ', '.join(GPU_MEMORY_GIB)}"
        fits, poor_finding = bool(fitting_gpus), note_finding
    yield ok_finding("memory", finding_text) if fits else poor_finding("memory", finding_text, MEMORY_ADVICE)

    if config.fp8.recipe != "none":
        yield note_finding(
            "memory",
            "this is the estimate for bf16; fp8 stores smaller inputs and extra copies of the weights",
            "",
        )


def _estimate_speed(prediction: RunPrediction) -> Finding:
    """The planner's estimate of the run's speed."""
    speed_text = (
        f"{prediction.step_seconds:.2f} s a step, {prediction.tokens_per_second:,.0f} tokens/s "
        f"at {prediction.mfu:.0%} MFU estimated on {prediction.calibration.gpu}"
    )
    if prediction.layout.pp > 1:
        speed_text += f", stages wait {prediction.bubble_share:.0%} of the time"
    source_text = f"({prediction.calibration.source}); megatron-vl plan compares it with other layouts"
    return ok_finding("speed", f"{speed_text} {source_text}")


def _check_positions(config: TrainConfig, spec: ModelSpec) -> Finding:
    max_positions = text_config(spec.hf_config).get("max_position_embeddings")
    if max_positions and config.data.seq_len > max_positions:
        return note_finding(
            "positions",
            f"data.seq_len {config.data.seq_len} exceeds the {max_positions} positions that the model"
            " supports",
            f"the model will not understand longer samples; lower data.seq_len to {max_positions}",
        )
    return ok_finding(
        "positions",
        f"rows of {config.data.seq_len} tokens; the model "
        f"supports {max_positions or 'any number of'} positions",
    )


def _check_build(run_arguments: list[str], world_size: int) -> Finding:
    """Builds the real modules on the meta device.

    This happens in a separate process, because the CPU platform changes torch globally.
    """
    command = [sys.executable, "-m", "toolkit.plan.dry_build", str(world_size), *run_arguments]
    completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode:
        error_lines = completed.stderr.strip().splitlines()
        last_line = error_lines[-1] if error_lines else f"exit code {completed.returncode}"
        return broken_finding(
            "model is built", last_line, "correct what the message names; without one, report a bug"
        )
    build_facts = json.loads(completed.stdout.strip().splitlines()[-1])
    sizes = ", ".join(f"{parameter_count / 1e9:.2f}" for parameter_count in build_facts["parameters"])
    return ok_finding(
        "model is built", f"{sizes} B parameters on a rank of each stage, with the checkpoints' shapes"
    )


def _check_first_row(run: ResolvedRun) -> Finding:
    """Reads one row from the run's own loader of rank 0, without worker processes."""
    try:
        check_data_path(run.config.data.path)
    except RunConfigError as error:
        return broken_finding("rows", str(error), "correct data.path")
    try:
        return _read_first_row(run)
    except UserError as error:
        # The message says what to change after the last semicolon.
        fault_text, _, advised_change = str(error).rpartition("; ")
        return broken_finding(
            "rows",
            fault_text or advised_change,
            advised_change if fault_text else "correct what the message names",
        )
    except (ValueError, OSError, RuntimeError, KeyError, TypeError) as error:
        advice = (
            "model.hf must hold config.json, tokenizer, chat template and preprocessor; "
            "`megatron-vl data verify` checks the data"
        )
        return broken_finding("rows", f"{type(error).__name__}: {error}", advice)


def _load_first_row(run: ResolvedRun, split_facts: SplitFacts) -> TrainingRow:
    from megatron_vl.data.loader import LoaderError, build_loader, validation_rows

    loader_config = dataclasses.replace(run.config.data, num_workers=0)
    loader_arguments = (loader_config, run.spec, run.config.model.hf)
    if split_facts.datasets_without_sizes:
        first_row = next(validation_rows(*loader_arguments, "train", split_facts), None)
    else:
        with contextlib.closing(
            build_loader(
                *loader_arguments,
                dp_size=run.dp,
                rows_per_step=run.config.global_batch_size,
                split_facts=split_facts,
            )
        ) as row_loader:
            first_row = next(row_loader, None)

    if first_row is None:
        raise LoaderError("no sample can be used, for the reasons above; correct the data set")
    return first_row


def _read_first_row(run: ResolvedRun) -> Finding:
    """Describes the first row and the samples. Raises the loader's errors."""
    from megatron_vl.data.source.blend import read_blend_sources

    split_facts = run.facts_by_split.get("train") or read_split_facts(run.config)["train"]
    blend_sources = read_blend_sources(split_facts.dataset_identity)
    drawn_counts = [source.sample_count for source in blend_sources if source.sample_share]

    start_time = time.perf_counter()
    first_row = _load_first_row(run, split_facts)

    blend_text = f" of {len(drawn_counts)} sources" if len(drawn_counts) > 1 else ""
    finding_text = (
        f"{pluralize(sum(drawn_counts), 'sample')}{blend_text}; "
        f"the first row ({time.perf_counter() - start_time:.1f} s): "
        f"{pluralize(first_row.num_samples, 'sample')}, {first_row.num_images} pictures, "
        f"{first_row.num_patches} patches, {int(first_row.loss_mask.count_nonzero())} loss tokens "
        f"of {first_row.seq_len}"
    )
    return _rows_finding(finding_text, split_facts.datasets_without_sizes, first_row.dropped_counts)


def _rows_finding(finding_text: str, unsized_datasets: Any, dropped_counts: Any) -> Finding:
    if unsized_datasets:
        return note_finding(
            "rows",
            f"{finding_text}; the sizes of the samples of {', '.join(unsized_datasets)} "
            "are not known for this tokenizer and chat template",
            "the first start writes them; megatron-vl data index does it now",
        )
    if dropped_counts:
        return note_finding(
            "rows",
            f"{finding_text}; refused {dict(dropped_counts)}",
            "quarantine.jsonl of the data set and of the run give the reasons",
        )
    return ok_finding("rows", finding_text)


def _check_left_out(run: ResolvedRun) -> list[Finding]:
    """Notes on the chat, and a finding for each source of which the loader would leave out most samples.

    All samples are judged if their sizes are stored; otherwise, some samples are read.
    """
    from data_tools.sample_sources import estimate_left_out, open_encoder
    from data_tools.statistics import count_statistics
    from megatron_vl.data.source.sample_sizes import SizesError

    hf_dir, samples_phrase = run.config.model.hf, "samples of"
    try:
        encoder = open_encoder(run.config.data, run.spec, hf_dir)
        try:
            counted_sources = count_statistics(encoder, hf_dir).sources
            meters = {source_sizes.source.name: source_sizes.meter for source_sizes in counted_sources}
        except SizesError:
            meters, samples_phrase = estimate_left_out(encoder, NUM_SAMPLES_READ), "samples drawn from"
    except (ValueError, OSError, RuntimeError):
        return []  # the check of the rows reports it

    left_out_findings = [note_finding("chat", note, "") for note in encoder.chat_encoder.start_notes()]
    for name, meter in meters.items():
        if meter.bad_share > MAX_LEFT_OUT_SHARE:
            left_out_findings.append(
                broken_finding(
                    "samples",
                    f"{meter.bad_count} of {meter.used_count + meter.bad_count} "
                    f"{samples_phrase} {name} would be left out: {meter.counts_by_reason()}",
                    meter.advice_text(),
                )
            )
    return left_out_findings


def _check_start_weights(run: ResolvedRun) -> list[Finding]:
    weights_path = run.config.model.checkpoint
    if not weights_path:
        return []
    if run.is_resumed and not Path(weights_path).exists():
        reason_text = "does not exist and is not needed: the run continues from its own checkpoint"
        return [ok_finding("start weights", f"{weights_path} {reason_text}")]

    try:
        check_start_weights(run.config, run.spec)
        weight_reader = WeightReader(weights_path)
        for weights_file in weight_reader.manifest["files"]:
            weight_reader.open_file(weights_file)
    except (ValueError, OSError, RuntimeError) as error:
        return [broken_finding("start weights", str(error), _convert_command(run.config))]

    layout_text = f"layout {weight_reader.layout.as_dict()}" if weight_reader.layout else "unsplit"
    return [
        ok_finding(
            "start weights",
            f"{weight_reader.path}: {len(weight_reader.tensor_infos)} tensors of this model, {layout_text}",
        )
    ]


def _check_resume(run: ResolvedRun) -> list[Finding]:
    """Checks the disk space for new checkpoints, and says from which step the run continues."""
    config, checkpoint, source = run.config, run.config.checkpoint, run.source_checkpoint
    if not checkpoint.dir:
        return []

    saved_tensors = trained_table(run.spec, config.lora)
    num_parameters = sum(math.prod(info.shape) for info in saved_tensors.values())
    checkpoint_bytes = num_parameters * (2 + 12 if config.dtype == "bfloat16" else 4 + 8)

    # The new checkpoint is complete before the oldest one is deleted.
    findings = [
        check_disk(Path(checkpoint.dir), checkpoint_bytes * (checkpoint.keep + 1 if checkpoint.keep else 2))
    ]
    if source is None:
        return findings
    if source.step >= config.steps:
        done = f"{checkpoint.dir} holds step {source.step} of {config.steps}: nothing is left to do"
        return [*findings, note_finding("resume", done, "raise steps")]
    return [
        *findings,
        ok_finding("resume", f"{checkpoint.dir} holds step {source.step}; the run continues from there"),
    ]
