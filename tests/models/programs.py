"""Functions that the tests of this folder run in separate processes (:func:`tests.support.ranks.call`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron_vl.config import DataConfig, LoraConfig, RecomputeConfig
from megatron_vl.data.packing import training_row
from megatron_vl.data.packing.assemble_row import pack_row
from megatron_vl.kernels.attention import tower_attention
from megatron_vl.kernels.layers import biased_activation as activation_kernels
from megatron_vl.models import build, head, layer_specs
from megatron_vl.models.build import check_live_tensors, chunk_tensors
from megatron_vl.models.fused_layers import PendingSum, ResidualNorm, add_to_residual, postpone_addition
from megatron_vl.training.optimizer import set_learning_rates
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.step import reduce_losses, run_schedule, token_loss
from tests.support.tiny_trainer import SEQ_LEN, TinyTrainer, tiny_trainer
from toolkit.parity.random_samples import make_sample

SHORT_SEQ_LEN = 48
"""For interpreted kernels, each row of which takes milliseconds."""


def padding_under_training(hf: str) -> list[list[float]]:
    """Sums of the padded parts of an FFN of width 107 in 128, and of the rest, before and
    after three steps."""
    trainer = tiny_trainer(hf)
    check_live_tensors(
        trainer.spec, trainer.layout, chunk_tensors(trainer.chunks, trainer.layout, 0), LoraConfig()
    )

    def sums() -> list[float]:
        parameters = dict(trainer.chunks[0].named_parameters())
        layer = "vision_model.decoder.layers.1.mlp."
        fc1 = parameters[layer + "linear_fc1.weight"]
        bias = parameters[layer + "linear_fc1.bias"]
        fc2 = parameters[layer + "linear_fc2.weight"]
        padded = (fc1[107:128], fc1[235:], bias[107:128], bias[235:], fc2[:, 107:])
        inside = fc1[:107].abs().sum() + fc1[128:235].abs().sum()
        return [*(float(part.abs().sum()) for part in padded), float(inside)]

    before = sums()
    for number in range(3):
        assert trainer.run_step(number).is_updated
    return [before, sums()]


def losses_of_chosen_tokens(hf: str) -> dict[str, Any]:
    """Losses and gradients of one row, once with logits of the loss tokens only and once with all logits."""
    trainer = tiny_trainer(hf)
    chunk = trainer.chunks[0]
    rows_of_logits: list[int] = []
    chunk.language_model.output_layer.register_forward_hook(
        lambda module, args, out: rows_of_logits.append(len(out[0]))
    )

    row = _row(trainer, "image", "text")
    found = []
    for index, head.LOSS_CHUNK_TOKENS in ((row.loss_index, 8192), (row.loss_index, 50), (None, 8192)):
        trainer.model_chunks[0].zero_grad_buffer()
        losses = chunk(dataclasses.replace(row, loss_index=index))
        token_loss(row, losses)[0].backward()
        trainer.model_chunks[0].finish_grad_sync()
        found.append((losses.detach(), {name: p.main_grad.clone() for name, p in chunk.named_parameters()}))

    (some, ours), (chunked_losses, chunked), (all_losses, whole) = found
    inside = torch.zeros_like(some).index_fill(1, row.loss_index, 1.0)
    chunk(row, labels=False)
    return {
        "rows of logits": rows_of_logits,
        "outside": (some * (1 - inside)).abs().max().item(),
        "loss": ((some - all_losses) * inside).abs().max().item(),
        "loss in chunks": (some - chunked_losses).abs().max().item(),
        "trained": (row.loss_mask[row.loss_index].sum() - row.loss_mask.sum()).item(),
        "without gradient": [name for name, gradient in whole.items() if not gradient.any()],
        "gradients": {
            name: max(
                ((gradient - whole[name]).norm() / whole[name].norm().clamp(min=1e-30)).item()
                for gradient in (ours[name], chunked[name])
            )
            for name in ours
        },
    }


def gradients_without_loss(hf: str) -> list[Any]:
    """[parameters without a gradient, largest gradient, loss, loss tokens] of a row without loss tokens."""
    trainer = tiny_trainer(hf)
    came: set[str] = set()
    for name, parameter in trainer.chunks[0].named_parameters():
        parameter.register_hook(lambda gradient, name=name: came.add(name))

    reports = run_schedule(trainer.model_chunks, [_row(trainer, "without_loss")], seq_len=SEQ_LEN)
    names = {name for name, _ in trainer.chunks[0].named_parameters()}
    largest = max(p.main_grad.abs().max().item() for p in trainer.chunks[0].parameters())
    return [sorted(names - came), largest, *reports[0]["loss"].tolist()]


def _row(trainer: TinyTrainer, *kinds: str, seq_len: int = SEQ_LEN) -> Any:
    """One row of these samples in the form that the model gets."""
    samples = [make_sample(kind, trainer.spec, 0) for kind in kinds]
    return trainer.feed_of([pack_row(samples, trainer.spec, seq_len)], 1).next_batch().rows[0]


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
    row = _row(trainer, "short_text", "without_loss", seq_len=SHORT_SEQ_LEN)
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


def gradients_of_cases(cases: dict[str, dict[str, Any]], out: str) -> None:
    """Writes the full gradients of named parity cases, and their experts' load, to ``out``."""
    import torch.distributed as dist

    from megatron_vl.models.moe.router import expert_load
    from megatron_vl.parallel.process_grid import end_distributed, init_distributed
    from megatron_vl.platform import get_platform
    from megatron_vl.spec.tensors import tensor_table
    from tests.support.shards import join_shards
    from toolkit.parity.case import ParityCase, build_case, draw_samples, pack_step
    from toolkit.parity.worker import complete_gradients

    platform = get_platform("cpu")
    init_distributed(platform)
    results: dict[str, dict[str, torch.Tensor]] = {}
    for name, fields in cases.items():
        case = ParityCase(name=name, **fields)
        live = build_case(case, platform)
        data = pack_step(live, draw_samples(case.steps[0], live.spec, 0))
        for chunk in live.model_chunks:
            chunk.zero_grad_buffer()
        reports = run_schedule(live.model_chunks, data.rows, seq_len=case.seq_len)
        _, loss_tokens, *_ = reduce_losses(reports, live.grid, platform.device)

        load = expert_load(
            live.model_chunks,
            live.spec.language.num_layers,
            live.spec.language.moe.num_experts,
            platform.device,
        )
        complete_gradients(live, loss_tokens)
        table, cut = tensor_table(live.spec), live.layout.sharding
        own: dict[tuple[str, int], list[torch.Tensor]] = {}
        for tensor, parameter, _ in live.live_tensors:  # experts come in their order
            if live.grid.is_first_copy(table[tensor]):
                part = live.grid.shard_index(table[tensor])
                own.setdefault((tensor, part), []).append(parameter.main_grad.clone())
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, own)
        parts = {key: stack for held in by_rank for key, stack in held.items()}
        results[name] = {"load": load}
        for tensor in {tensor for tensor, _ in parts}:
            stacks = [parts[tensor, part] for part in range(cut.num_shards(table[tensor]))]
            is_stack = bool(table[tensor].num_experts)
            full = [torch.stack(stack) if is_stack else stack[0] for stack in stacks]
            results[name][tensor] = join_shards(full, table[tensor], cut)

    if dist.get_rank() == 0:
        torch.save(results, out)
    end_distributed()


def devices_of_random_weights() -> dict[str, str]:
    """Device types of the weights that a layer of linear attention draws if the GPU is the meta device."""
    from types import SimpleNamespace

    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_vl.models.gated_delta_net import GatedDeltaNet
    from megatron_vl.platform import get_platform
    from megatron_vl.spec.families.base import LinearAttentionSpec

    get_platform("cpu")
    get_cuda_rng_tracker().add("model-parallel-rng", 1)
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment, return-value]
    spec, one_rank = LinearAttentionSpec(1, 2, 16, 16, 4, (0,)), SimpleNamespace(size=lambda: 1)
    made = GatedDeltaNet(
        TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2),
        layer_number=1,
        spec=spec,
        column=torch.nn.Identity,
        row=torch.nn.Identity,
        pg_collection=SimpleNamespace(tp=one_rank, cp=one_rank),
    )
    return {name: made.get_parameter(name).device.type for name in ("conv1d.weight", "A_log")}
