"""Functions that the tests of this folder run in separate processes (:func:`tests.support.ranks.call`)."""

from __future__ import annotations

from typing import Any

import torch

from megatron_vl.config import DataConfig, RecomputeConfig
from megatron_vl.data.packing import training_row
from megatron_vl.kernels.attention import tower_attention
from megatron_vl.kernels.layers import biased_activation as activation_kernels
from megatron_vl.models import build, layer_specs
from megatron_vl.models.fused_layers import PendingSum, ResidualNorm, add_to_residual, postpone_addition
from megatron_vl.training.optimizer import set_learning_rates
from megatron_vl.training.rows.batch_broadcast import StepBatch
from tests.support.tiny_trainer import TinyTrainer, tiny_trainer

SHORT_SEQ_LEN = 48
"""For interpreted kernels, each row of which takes milliseconds."""


def step_with_and_without_kernels(hf: str) -> list[list[float]]:
    """[loss, gradient norm, calls of the kernels] of a step with torch's attention, and with
    our interpreted kernels."""
    from tests.kernels.triton_checks import fix_interpreter

    fix_interpreter()
    trainer = tiny_trainer(hf)
    calls: list[int] = []
    attend = tower_attention.attention_forward

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return attend(*arguments)

    tower_attention.attention_forward = counted
    step_batch = trainer.batches.next_batch()

    def step(trainer: TinyTrainer) -> list[float]:
        result = trainer.train_step(step_batch)
        return [result.loss, result.grad_norm, len(calls)]

    plain = step(trainer)
    build.choose_backend = lambda attention, *, causal, **rest: "sdpa" if causal else "triton"
    return [plain, step(trainer.again())]


def steps_with_fused_layers(hf: str, recomputes: bool) -> dict[str, list[float]]:
    """Losses and gradient norms of two steps: with torch's layers, and with interpreted norms that also form
    the sum before them and take the gradient of the residual connection, interpreted sums and activations.
    With ``recomputes``, those of one step with these and recompute. For each call of a norm, whether it
    forms the sum."""
    from tests.kernels.triton_checks import fix_interpreter, torch_only

    fix_interpreter()
    training_row.LOSS_INDEX_MULTIPLE = 16  # only chosen tokens have logits, as in longer rows
    trainer = tiny_trainer(hf)
    row = trainer.device_row("short_text", "without_loss", seq_len=SHORT_SEQ_LEN)
    local_modules = layer_specs._layer_modules

    def run_steps(recompute: RecomputeConfig, num_steps: int) -> list[float]:
        other = trainer.again(recompute=recompute, data=DataConfig(seq_len=SHORT_SEQ_LEN))
        results = []
        for number in range(num_steps):
            set_learning_rates(other.optimizer, other.config, number)
            result = other.train_step(StepBatch([row]))
            results += [result.loss, result.grad_norm]
        return results

    norm_calls: list[float] = []
    activation_calls: list[float] = []
    biased_activation = activation_kernels.biased_activation

    class CountedNorm(ResidualNorm):
        def forward(self, x: torch.Tensor | PendingSum) -> Any:
            norm_calls.append(float(isinstance(x, PendingSum)))
            return super().forward(x)

    def counted_activation(*arguments: Any, **options: Any) -> torch.Tensor:
        activation_calls.append(1.0)
        return biased_activation(*arguments, **options)

    def fused_modules(*arguments: Any) -> Any:
        return local_modules(*arguments)._replace(
            layer_norm=CountedNorm,
            expert_norm=CountedNorm,
            add_attention=postpone_addition,
            add_mlp=add_to_residual,
        )

    activation_kernels.biased_activation = counted_activation
    results = {"plain": torch_only(run_steps)(RecomputeConfig(), 2)}
    assert not activation_calls
    layer_specs._layer_modules = fused_modules
    results["fused"] = run_steps(RecomputeConfig(), 2)
    if recomputes:
        results["recomputed"] = run_steps(RecomputeConfig(language="full", vision="full"), 1)
        results["recomputed activations"] = run_steps(RecomputeConfig(vision="activation"), 1)
    results |= {"calls of norms": norm_calls, "calls of activations": activation_calls}
    return results
