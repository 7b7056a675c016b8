"""What a run says about itself at its start, and when it cannot continue."""

from __future__ import annotations

from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_vl.estimate.parameters import count_parameters
from megatron_vl.models.build import aux_loss
from megatron_vl.platform import Platform
from megatron_vl.system.plurals import pluralize, trained_text
from megatron_vl.training.offload.build import chunked_state
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.training.step import NO_LOSS_TOKENS, NOT_FINITE


def run_summary(resolved_run: ResolvedRun, platform: Platform, optimizer: ChainedOptimizer) -> list[str]:
    """Model, layout and notes of a run, for the lines before its first step."""
    config, spec, layout = resolved_run.config, resolved_run.spec, resolved_run.layout
    experts = f" x ep {layout.ep} (etp {layout.etp})" if spec.language.moe else ""
    moments_dtype = config.optimizer.moments_dtype
    optimizer_note = f", moments in {moments_dtype}" if moments_dtype != "float32" else ""
    chunks = chunked_state(optimizer)
    if chunks is not None and chunks.host_bytes:
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
    coefficient, reason = aux_loss(spec, config.model)
    if reason:
        loss_text = f"coefficient {coefficient:g}" if coefficient else "none"
        lines.append(f"load-balancing loss of the experts: {loss_text} ({reason})")
    return [*lines, *resolved_run.run_notes]


def skipped_steps_message(skip_reasons: list[str], step: int) -> str:
    """The message of a run that ends because its last steps were all skipped for ``skip_reasons``."""
    texts = {NOT_FINITE: "a loss or gradient that was not finite", NO_LOSS_TOKENS: "no loss tokens"}
    found = " or ".join(text for reason, text in texts.items() if reason in skip_reasons)
    advice = ""
    if NOT_FINITE not in skip_reasons:
        advice = ". Only assistant turns are trained on: check that the data set has any"
    return f"{len(skip_reasons)} consecutive steps (last: {step}) had {found}{advice}"
