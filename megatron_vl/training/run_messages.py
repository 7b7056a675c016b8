"""What a run says about itself at its start, and when it cannot continue."""

import shlex
from datetime import timedelta
from pathlib import Path

from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_vl.config import TrainConfig
from megatron_vl.estimate.parameters import count_parameters
from megatron_vl.models.build import aux_loss
from megatron_vl.platform import Platform
from megatron_vl.system.plurals import pluralize, trained_text
from megatron_vl.training.offload.build import chunked_state
from megatron_vl.training.optimizer import peak_learning_rates
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.training.state.keep import best_validation, read_validations
from megatron_vl.training.step import NO_LOSS_TOKENS, NOT_FINITE
from megatron_vl.weights.run_folder import export_dir_path, saved_checkpoints


def run_summary(resolved_run: ResolvedRun, platform: Platform, optimizer: ChainedOptimizer) -> list[str]:
    """Model, layout and notes of a run, for the lines before its first step."""
    config, spec, layout = resolved_run.config, resolved_run.spec, resolved_run.layout
    experts = f" x ep {layout.ep} (etp {layout.etp})" if spec.language.moe else ""
    moments_dtype = config.optimizer.moments_dtype
    optimizer_note = f", moments in {moments_dtype}" if moments_dtype != "float32" else ""
    if (chunks := chunked_state(optimizer)) is not None and chunks.host_bytes:
        optimizer_note += f", {chunks.host_bytes / 2**30:.1f} GiB of optimizer state in host memory"
    context = f" x cp {layout.cp}" if layout.cp > 1 else ""
    if layout.key_ranks > 1:
        context += f" ({layout.key_ranks} ranks gather keys)"
    lines = [
        f"{spec.family} on {platform.name}: tp {layout.tp}{context} x pp {layout.pp} x vpp {layout.vpp} x dp"
        f" {resolved_run.dp}{experts}, layers {list(layout.layers_per_chunk)}, {config.dtype}, rows of"
        f" {config.data.seq_len} tokens, {pluralize(config.global_batch_size, 'row')} a step{optimizer_note}"
    ]
    if trained := trained_text(*count_parameters(config, spec)):
        lines.append(trained)
    rates = peak_learning_rates(config)
    if len(set(rates.values()) - {None}) > 1:
        texts = [f"{part} {'frozen' if rate is None else f'{rate:g}'}" for part, rate in rates.items()]
        lines.append(f"peak learning rates: {', '.join(texts)}")
    coefficient, reason = aux_loss(spec, config.model)
    if reason:
        text = f"coefficient {coefficient:g}" if coefficient else "none"
        lines.append(f"load-balancing loss of the experts: {text} ({reason})")
    return [*lines, *resolved_run.run_notes]


def end_summary(config: TrainConfig, step: int, new_steps: int, seconds: float) -> list[str]:
    """What a run has done and left, and what to do with it, for the lines after its last step."""
    lines = []
    if new_steps:
        lines.append(f"trained {pluralize(new_steps, 'step')} in {timedelta(seconds=round(seconds))}")
    if not config.checkpoint.dir:
        return lines
    run_dir = Path(config.checkpoint.dir)
    saved_dirs = {saved.step: saved.path for saved in saved_checkpoints(run_dir)}
    lines.append(f"checkpoints in {run_dir}: {list(saved_dirs)}")

    # Losses are compared on the rows of the latest validation alone.
    validations = [each for each in read_validations(run_dir) if each.step <= step]
    comparable = [each for each in validations if each.rows == validations[-1].rows]
    best = best_validation(comparable)
    best_saved = best_validation([each for each in comparable if each.step in saved_dirs])
    if best is not None:
        lines.append(
            f"best validation loss: {best.loss:.6f} at step {best.step},"
            f" {saved_dirs.get(best.step, 'which was not saved')}"
        )
        if best_saved not in (None, best):
            lines.append(
                f"best of the saved steps: {best_saved.loss:.6f} at step {best_saved.step},"
                f" {saved_dirs[best_saved.step]}"
            )
    if saved_dirs and not config.data.is_synthetic:
        shown_step = best_saved.step if best_saved is not None else max(saved_dirs)
        lines.append(f"next: {_next_command(config, saved_dirs[shown_step], shown_step)}")
    return lines


def _next_command(config: TrainConfig, step_dir: Path, step: int) -> str:
    """The command that asks the exported model, or exports it first."""
    export_dir = export_dir_path(step_dir.parent, step)
    if (export_dir / "config.json").is_file():
        return shlex.join(["megatron-vl", "generate", "--checkpoint", str(export_dir), "--prompt", "Hello"])
    merge = ["--merge"] if config.lora.rank else []
    words = ["--checkpoint", str(step_dir), "--hf", config.model.hf, *merge, "--out", f"{step_dir.parent}_hf"]
    return shlex.join(["megatron-vl", "export", *words])


def skipped_steps_message(skip_reasons: list[str], step: int) -> str:
    """The message of a run that ends because its last steps were all skipped for ``skip_reasons``."""
    texts = {NOT_FINITE: "a loss or gradient that was not finite", NO_LOSS_TOKENS: "no loss tokens"}
    found = " or ".join(text for reason, text in texts.items() if reason in skip_reasons)
    message = f"{len(skip_reasons)} consecutive steps (last: {step}) had {found}"
    if NOT_FINITE in skip_reasons:
        return message
    return f"{message}. Only assistant turns are trained on: check that the data set has any"
