"""Functions that the tests of this folder run in separate processes (:func:`tests.support.ranks.call`)."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from megatron_vl.config import DataConfig, RecomputeConfig
from megatron_vl.data.packing import training_row
from megatron_vl.data.packing.assemble_row import pack_row
from megatron_vl.kernels.attention import tower_attention
from megatron_vl.kernels.layers import biased_layers
from megatron_vl.models import build, layer_specs
from megatron_vl.models.fused_layers import PendingSum, ResidualNorm, add_to_residual, postpone_addition
from megatron_vl.training.optimizer import set_learning_rates
from megatron_vl.training.rows.batch_broadcast import StepBatch
from tests.support.tiny_trainer import tiny_trainer
from toolkit.parity.random_samples import make_sample


def steps_with_fused_layers(hf: str, sample_kind: str, seq_len: int, recomputes: bool) -> dict[str, Any]:
    """Losses and gradient norms of two steps: with torch's layers, and with interpreted norms that also form
    the sum before them and take the gradient of the residual connection, interpreted sums and activations,
    and the tower's attention. With ``recomputes``, those of one step with these and recompute. For each call
    of a norm, whether it forms the sum; calls of the others.

    The answer to the image is trained on, so that the tower has gradients."""
    from tests.kernels.triton_checks import fix_interpreter, torch_only

    fix_interpreter()
    training_row.LOSS_INDEX_MULTIPLE = 16  # only chosen tokens have logits, as in longer rows
    trainer = tiny_trainer(hf)
    samples = [make_sample(kind, trainer.spec, 0) for kind in ("short_text", sample_kind)]
    samples[1].loss_mask[-8:] = True
    [row] = trainer.feed_of([pack_row(samples, trainer.spec, seq_len)], 1).next_batch().rows
    local_modules = layer_specs._layer_modules

    def run_steps(recompute: RecomputeConfig, num_steps: int) -> list[float]:
        other = trainer.again(recompute=recompute, data=DataConfig(seq_len=seq_len))
        results = []
        for number in range(num_steps):
            set_learning_rates(other.optimizer, other.config, number)
            result = other.train_step(StepBatch([row]))
            results += [result.loss, result.grad_norm]
        return results

    norm_calls: list[bool] = []
    other_calls = Counter[str]()
    biased_activation, attention = biased_layers.biased_activation, tower_attention.attention_forward

    class CountedNorm(ResidualNorm):
        def forward(self, x: torch.Tensor | PendingSum) -> Any:
            norm_calls.append(isinstance(x, PendingSum))
            return super().forward(x)

    def counting_calls(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            other_calls.update([function.__name__])
            return function(*arguments, **options)

        return call

    def fused_modules(*arguments: Any) -> Any:
        return local_modules(*arguments)._replace(
            layer_norm=CountedNorm,
            expert_norm=CountedNorm,
            add_attention=postpone_addition,
            add_mlp=add_to_residual,
        )

    biased_layers.biased_activation = counting_calls(biased_activation)
    tower_attention.attention_forward = counting_calls(attention)
    results: dict[str, Any] = {"plain": torch_only(run_steps)(RecomputeConfig(), 2)}
    assert not other_calls
    layer_specs._layer_modules = fused_modules
    build.choose_backend = lambda attention, *, causal, **rest: "sdpa" if causal else "triton"
    results["fused"] = run_steps(RecomputeConfig(), 2)
    if recomputes:
        results["recomputed"] = run_steps(RecomputeConfig(language="full", vision="full"), 1)
        results["recomputed activations"] = run_steps(RecomputeConfig(vision="activation"), 1)
    return results | {"sums in norms": norm_calls, "calls": other_calls}
