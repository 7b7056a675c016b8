"""Checks a run, a data set or a checkpoint as far as possible without a GPU."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_vl import host_memory
from megatron_vl.config import RunConfigError, TrainConfig, parse_config, validate
from megatron_vl.errors import UserError
from megatron_vl.planning.gpus import calibration_for
from megatron_vl.planning.memory import GPU_GIB, RESERVE_GIB, StageMemory, peak_gib, stage_memories
from megatron_vl.planning.predict import Prediction, predict
from megatron_vl.planning.run import rates_apply
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.families.base import text_config
from megatron_vl.spec.tensors import tensor_table
from megatron_vl.training.preflight import check_data_path, check_start_weights, remarks
from megatron_vl.training.resolve import Machine, read_data, resolve
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.weights.reader import WeightReader
from megatron_vl.words import counted
from toolkit.doctor import Finding, broken, note, ok
from toolkit.doctor.family import check_family
from toolkit.doctor.machine import Gpu, check_disk

MOST = 0.5
"""Share of a source's samples above which it is a fault that they are left out."""
READ = 200
"""Number of samples that are read for it where no sizes are stored."""


@dataclass
class RunReport:
    """Findings about a run and, if the run is possible, its memory by stage."""

    findings: list[Finding] = field(default_factory=list)
    memory: list[StageMemory] = field(default_factory=list)


def check_data(folder: Path, progress: Callable[[str], None] | None = None) -> Finding:
    """Compares every byte of a data set with its recorded hashes."""
    from data_tools.verify import verify

    try:
        shards, problems = verify(folder, progress)
    except (ValueError, OSError) as error:
        return broken("data set", str(error), "convert it with `megatron-vl data convert`")
    if problems:
        return broken(
            "data set", "; ".join(problems[:5]), "copy these shards again, or convert the data again"
        )
    return ok("data set", f"{counted(shards, 'shard')} of {folder} {'is' if shards == 1 else 'are'} intact")


def check_checkpoint(folder: Path) -> Finding:
    """Compares every byte of weights, or of a run's latest (or the given) checkpoint, with its hashes."""
    from converters.verify import check_hashes
    from toolkit.checkpoint.contents import find_step, verify_checkpoint

    try:
        is_run = (
            (folder / "run.json").is_file()
            or (folder / "latest.json").is_file()
            or any(folder.glob("step_*"))
        )
        source = find_step(folder) if is_run else folder
        if is_run:
            problems = verify_checkpoint(source)
        else:
            problems = [
                f"{difference.name} {difference.how}" for difference in check_hashes(source).differences
            ]
    except (ValueError, OSError, RuntimeError) as error:
        return broken(
            "checkpoint", str(error), "give a folder of weights, a run's folder, or one of its step_ folders"
        )

    if problems:
        return broken(
            "checkpoint",
            "; ".join(problems[:5]),
            "copy or write it again, or resume the run from another step with --checkpoint.step",
        )

    return ok("checkpoint", f"{source} is intact")


def check_run(options: list[str], world_size: int | None, gpus: list[Gpu]) -> RunReport:
    """Checks a run's YAML and overrides.

    Args:
        options: ``--config RUN.yaml`` and ``--section.field value``, as the trainer takes them.
        world_size: GPUs of the whole run; None: those of this machine or, without GPUs, as few as
            the layout needs.
    """
    report = RunReport()
    say = report.findings.append
    try:
        config = parse_config(options)
    except RunConfigError as error:
        say(broken("config", str(error), "megatron-vl train --help explains every field"))
        return report

    p = config.parallel
    if world_size is None:
        world_size = len(gpus) or p.replica_ranks
    try:
        dp = validate(config, world_size)
    except RunConfigError as error:
        say(broken("config", str(error), "change the field, or give the number of GPUs with --world-size"))
        return report

    context = f" x cp {p.cp}" if p.cp > 1 else ""
    experts = f", experts ep {p.ep} x etp {p.etp}" if p.ep * p.etp > 1 else ""
    say(
        ok(
            "config",
            f"{counted(world_size, 'rank')}: tp {p.tp}{context} x pp {p.pp} x vpp {p.vpp} x dp {dp}{experts}",
        )
    )
    refusal = ""
    gpu_gib = min((gpu.memory / 1024 for gpu in gpus), default=next(iter(GPU_GIB.values())))
    host_gib = host_memory.available() / host_memory.GIB / max(1, min(world_size, len(gpus)))
    machine = Machine(None if config.platform == "cpu" else gpu_gib, host_gib if gpus else math.inf)
    try:
        run = resolve(config, world_size, machine)
    except (ValueError, OSError, RuntimeError) as error:
        refusal = str(error)
        say(broken("model and layout", refusal, _advice(config, refusal)))
        # A damaged folder of the run says nothing against the rest.
        anew = dataclasses.replace(config.checkpoint, resume=False, step=None, branch="")
        try:
            run = resolve(dataclasses.replace(config, checkpoint=anew), world_size, machine, show_only=True)
        except (ValueError, OSError, RuntimeError):
            return report
    else:
        layers = f"decoder layers {list(run.layout.layers)} on {p.pp} stages"
        say(ok("model and layout", f"{run.spec.family}, {layers}"))

    report.memory = stage_memories(run.config, run.spec, run.layout, dp)
    report.findings += _memory(run.config, report.memory, gpus)
    rates = calibration_for(config.platform)
    if rates_apply(config, rates):
        prediction = predict(run.config, run.spec, world_size, run.layout, calibration=rates)
        report.findings.append(_speed(prediction))
    report.findings += [_positions(config, run.spec), _build(options, config, world_size), *_resume(run)]
    on_gpus = config.platform == "cuda" or (config.platform == "auto" and bool(gpus))
    report.findings += check_family(config, run.spec, on_gpus)
    inputs = [_rows(run), *_left_out(run), *_start_weights(run)]
    # An input that is not there was already reported with the layout.
    report.findings += [finding for finding in inputs if not refusal or finding.found != refusal]
    report.findings += [note("run", remark, "") for remark in remarks(config, not gpus, run.resumes)]
    return report


def _advice(config: TrainConfig, said: str) -> str:
    """What to do about a run that was refused with the message ``said``."""
    if said.startswith("model.checkpoint ") and "does not exist" in said:
        return _convert(config)
    return "correct the field or path that the message names"


def _convert(config: TrainConfig) -> str:
    """The command that writes the weights of a run."""
    out = "DIR" if Path(config.model.checkpoint).exists() else config.model.checkpoint
    return f"megatron-vl convert --hf {config.model.hf} --out {out} writes them"


def _memory(config: TrainConfig, stages: list[StageMemory], gpus: list[Gpu]) -> list[Finding]:
    peak = peak_gib(stages)
    if config.platform == "cpu":
        text = f"{peak:.1f} GiB estimated for the fullest rank; the estimate is made for GPUs"
        return [ok("memory", text)]
    found = f"{peak:.1f} GiB estimated for the fullest GPU, {RESERVE_GIB:.0f} GiB more should stay free"
    advice = (
        "use more tp, pp or GPUs, recompute.vision or recompute.language, a smaller data.seq_len or "
        "data.max_patches"
    )
    findings = []
    if gpus:
        have = min(gpu.memory for gpu in gpus) / 1024
        fits = peak + RESERVE_GIB <= have
        text = f"{found}; the GPUs here have {have:.1f}"
        findings.append(ok("memory", text) if fits else broken("memory", text, advice))
    else:
        kinds = [name for name, gib in GPU_GIB.items() if peak + RESERVE_GIB <= gib]
        text = f"{found}: fits {', '.join(kinds) or 'none of ' + ', '.join(GPU_GIB)}"
        findings.append(ok("memory", text) if kinds else note("memory", text, advice))

    if config.fp8.recipe != "none":
        findings.append(
            note(
                "memory",
                "this is the estimate for bf16; fp8 stores smaller inputs and extra copies of the weights",
                "",
            )
        )

    return findings


def _speed(prediction: Prediction) -> Finding:
    """The planner's estimate of the run's speed."""
    p = prediction
    found = f"{p.step:.2f} s a step, {p.tokens_per_second:,.0f} tokens/s at {p.mfu:.0%} MFU estimated on"
    found += f" {p.calibration.gpu}" + (
        f", stages wait {p.bubble:.0%} of the time" if p.layout.pp > 1 else ""
    )
    return ok("speed", f"{found} ({p.calibration.source}); megatron-vl plan compares it with other layouts")


def _positions(config: TrainConfig, spec: ModelSpec) -> Finding:
    longest = text_config(spec.hf_config).get("max_position_embeddings")
    if longest and config.data.seq_len > longest:
        text = f"data.seq_len {config.data.seq_len} exceeds the {longest} positions that the model supports"
        return note(
            "positions",
            text,
            f"the model will not understand longer samples; lower data.seq_len to {longest}",
        )
    return ok(
        "positions",
        f"rows of {config.data.seq_len} tokens; the model supports {longest or 'any number of'} positions",
    )


def _build(options: list[str], config: TrainConfig, world_size: int) -> Finding:
    """Builds the real modules on the meta device, in a separate process because the CPU platform
    changes torch globally."""
    words = [sys.executable, "-m", "toolkit.plan.dry_build", "--world-size", str(world_size), *options]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        return broken("model is built", last, "correct what the message names; without one, report a bug")
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    sizes = ", ".join(f"{n / 1e9:.2f}" for n in facts["parameters"])
    return ok("model is built", f"{sizes} B parameters on a rank of each stage, with the checkpoints' shapes")


def _rows(run: ResolvedRun) -> Finding:
    """Reads one row from the run's own loader of rank 0, without worker processes."""
    config = run.config
    try:
        check_data_path(config.data.path)
    except RunConfigError as error:
        return broken("rows", str(error), "correct data.path")
    from megatron_vl.data.loader import LoaderError, build_loader, validation_rows
    from megatron_vl.data.source.blend import sources_of

    loader: Any = None
    try:
        facts = run.data.get("train") or read_data(config)["train"]
        drawn = [source for source in sources_of(facts.identity) if source.share]
        alone = dataclasses.replace(config.data, num_workers=0)
        if facts.without_sizes:
            rows = validation_rows(alone, run.spec, config.model.hf, "train", facts)
        else:
            ours: dict[str, Any] = {"dp_size": run.dp, "rows_per_step": config.global_batch_size}
            rows = loader = build_loader(alone, run.spec, config.model.hf, facts=facts, **ours)
        start = time.perf_counter()
        row = next(rows, None)
        seconds = time.perf_counter() - start
        if row is None:
            raise LoaderError("no sample can be used, for the reasons above; correct the data set")
    except UserError as error:
        # The message says what to change after the last semicolon.
        fault, _, change = str(error).rpartition("; ")
        return broken("rows", fault or change, change if fault else "correct what the message names")
    except (ValueError, OSError, RuntimeError, KeyError, TypeError) as error:
        advice = (
            "model.hf must hold config.json, tokenizer, chat template and preprocessor; "
            "`megatron-vl data verify` checks the data"
        )
        return broken("rows", f"{type(error).__name__}: {error}", advice)
    finally:
        if loader is not None:
            loader.close()

    samples = counted(sum(source.samples for source in drawn), "sample")
    blend = f" of {len(drawn)} sources" if len(drawn) > 1 else ""
    found = f"{samples}{blend}; the first row ({seconds:.1f} s): {counted(row.num_samples, 'sample')}, "
    learnt = int(row.loss_mask.count_nonzero())
    found += f"{row.num_images} pictures, {row.num_patches} patches, {learnt} loss tokens of {row.seq_len}"
    if facts.without_sizes:
        return note(
            "rows",
            f"{found}; the sizes of the samples of {', '.join(facts.without_sizes)} are not known for this"
            " tokenizer and chat template",
            "the first start writes them; megatron-vl data index does it now",
        )
    if row.dropped:
        return note(
            "rows",
            f"{found}; refused {dict(row.dropped)}",
            "quarantine.jsonl of the data set and of the run give the reasons",
        )

    return ok("rows", found)


def _left_out(run: ResolvedRun) -> list[Finding]:
    """A finding for each source of which the loader would leave out most samples: of all if their sizes are
    stored, else of some that are read."""
    from data_tools.sources import left_out_of_some, open_encoder
    from data_tools.statistics import statistics
    from megatron_vl.data.source.sizes import SizesError

    hf, which = run.config.model.hf, "samples of"
    try:
        encoder = open_encoder(run.config.data, run.spec, hf)
        try:
            meters = {one.source.name: one.meter for one in statistics(encoder, hf).sources}
        except SizesError:
            meters, which = left_out_of_some(encoder, READ), "samples drawn from"
    except (ValueError, OSError, RuntimeError):
        return []  # the check of the rows reports it
    return [
        broken(
            "samples",
            f"{meter.bad} of {meter.used + meter.bad} {which} {name} would be left out: {meter.by_reason()}",
            meter.advice(),
        )
        for name, meter in meters.items()
        if meter.share > MOST
    ]


def _start_weights(run: ResolvedRun) -> list[Finding]:
    path = run.config.model.checkpoint
    if not path:
        return []
    if run.resumes and not Path(path).exists():
        why = "does not exist and is not needed: the run continues from its own checkpoint"
        return [ok("start weights", f"{path} {why}")]

    try:
        check_start_weights(run.config, run.spec)
        reader = WeightReader(path)
        for file in reader.manifest["files"]:
            reader.open_file(file)
    except (ValueError, OSError, RuntimeError) as error:
        return [broken("start weights", str(error), _convert(run.config))]

    cut = f"layout {reader.layout.as_dict()}" if reader.layout else "unsplit"
    return [ok("start weights", f"{reader.path}: {len(reader.table)} tensors of this model, {cut}")]


def _resume(run: ResolvedRun) -> list[Finding]:
    """Checks the disk space for new checkpoints, and says where the run goes on."""
    config, c, source = run.config, run.config.checkpoint, run.start.source
    if not c.dir:
        return []

    parameters = sum(math.prod(info.shape) for info in tensor_table(run.spec).values())
    each = parameters * (2 + 12 if config.dtype == "bfloat16" else 4 + 8)

    # The new checkpoint is complete before the oldest one is deleted.
    findings = [check_disk(Path(c.dir), each * (c.keep + 1 if c.keep else 2))]
    if source is None:
        return findings
    if source.step >= config.steps:
        done = f"{c.dir} holds step {source.step} of {config.steps}: nothing is left to do"
        return [*findings, note("resume", done, "raise steps")]
    return [*findings, ok("resume", f"{c.dir} holds step {source.step}; the run continues from there")]
