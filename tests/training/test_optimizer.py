"""Learning rates, the division and clipping of gradients, and what happens at a step that must be skipped."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup

from megatron_vl.config import ModelConfig, OptimizerConfig, TrainConfig
from megatron_vl.spec.tensors import model_part
from megatron_vl.training import optimizer as optimizer_module
from megatron_vl.training.optimizer import scheduled_rate, set_learning_rates
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.state.optimizer_state import optimizer_slices
from megatron_vl.training.step import NOT_FINITE
from tests.support.ranks import in_ranks
from tests.support.tiny_trainer import (
    TinyTrainer,
    differences,
    optimizer_state,
    state_of,
    tiny_trainer,
    train,
    trainer_of,
)


def rates_of(steps: int, **fields: Any) -> list[float]:
    config = TrainConfig(steps=steps, optimizer=OptimizerConfig(**fields))
    return [scheduled_rate(config, step, 1.0) for step in range(steps + 1)]


@pytest.mark.parametrize(
    ("steps", "fields", "expected"),
    [
        # Worked out by hand. The last rate is that after the run, the final one.
        (4, {"schedule": "linear", "warmup_steps": 0}, [1, 0.775, 0.55, 0.325, 0.1]),
        (6, {"schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        (6, {"schedule": "wsd", "warmup_steps": 2, "decay_steps": 2}, [0.5, 1, 1, 1, 1, 0.55, 0.1]),
        (4, {"schedule": "wsd", "warmup_steps": 2, "decay_steps": 2}, [0.5, 1, 1, 0.55, 0.1]),
        (20, {"schedule": "wsd", "min_lr_ratio": 0}, [1] * 19 + [0.5, 0]),  # a tenth decays, none warms up
        (1, {"schedule": "linear"}, [1, 0.1]),
        (1, {"schedule": "wsd"}, [1, 0.1]),
        (2, {"schedule": "wsd", "warmup_steps": 1}, [1, 1, 0.1]),
        (3, {"schedule": "linear", "warmup_steps": 2}, [0.5, 1, 1, 0.1]),
        # Never zero, or the first step would be lost.
        (3, {"schedule": "constant", "warmup_steps": 2}, [0.5, 1, 1, 1]),
    ],
)
def test_schedules_have_the_rates_that_hand_computes(steps, fields, expected: list[float]) -> None:
    assert rates_of(steps, **fields) == pytest.approx(expected)


def test_cosine_equals_that_of_transformers_after_warm_up() -> None:
    """transformers decays to zero and starts its warm-up at zero; apart from that the curves are equal."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = get_cosine_schedule_with_warmup(optimizer, 10, 100)
    for step, rate in enumerate(rates_of(100, warmup_steps=10, min_lr_ratio=0.0)[:100]):
        assert step < 10 or rate == pytest.approx(reference.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        reference.step()


@in_ranks()
def test_non_finite_step_is_skipped_and_the_next_one_taken(hf) -> None:
    trainer = tiny_trainer(hf)
    for number, reason in enumerate(("", NOT_FINITE, "")):
        before, factor = state_of(trainer), math.nan if reason else 1.0
        model = trainer.chunks[0].language_model
        hook = model.register_forward_hook(lambda module, args, out, factor=factor: out * factor)
        result = trainer.run_step(number)
        hook.remove()
        is_changed = differences(before, state_of(trainer)) != []
        assert result.skip_reason == reason
        assert is_changed == result.is_updated == math.isfinite(result.loss) == (not reason)


def _check_skipped_step(trainer: TinyTrainer, kind: str, reason: str, has_state: bool) -> None:
    """Takes three steps, the second of rows of one kind: it leaves weights, moments and step counts."""
    everything = {"exp_avg", "exp_avg_sq", "main", "step"} if has_state else set()
    for number, kinds in enumerate([("image", "text"), (kind, kind), ("image", kind)]):
        step_batch = trainer.feed_of([trainer.row_of(kind) for kind in kinds], 2).next_batch()
        set_learning_rates(trainer.optimizer, trainer.config, number)
        before = optimizer_state(trainer) if number else {}
        result = trainer.train_step(step_batch)
        after = optimizer_state(trainer)
        assert result.skip_reason == (reason if number == 1 else "")
        if number:
            changed = differences(before, after)
            assert changed == ([] if number == 1 else sorted(before)), number
            assert {name.rpartition("/")[2] for name in before} == everything


@in_ranks(2)
def test_step_without_loss_tokens_leaves_weights_moments_and_count(hf) -> None:
    """Weight decay and decaying moments would move them. The first of two stages has no loss and must learn
    of it; rows without loss beside others are trained on."""
    _check_skipped_step(tiny_trainer(hf, pp=2), "without_loss", "no_loss_tokens", has_state=True)


@pytest.mark.parametrize(("pp", "moments_dtype"), [(1, "bfloat16"), (2, "float32")])
@in_ranks(lambda params: params["pp"])
def test_step_without_gradients_leaves_weights_moments_and_count(hf, pp: int, moments_dtype: str) -> None:
    """Of text alone, where only the vision tower is trained. With two stages, the last has no optimizer."""
    trainer = tiny_trainer(hf, pp=pp, freeze_language=True, moments_dtype=moments_dtype)
    _check_skipped_step(trainer, "text", "no_gradient", has_state=dist.get_rank() == 0)


@in_ranks()
def test_gradients_are_divided_and_clipped_in_one_multiplication(hf) -> None:
    """Each is rounded once, and the norm is that before clipping. With moments in bfloat16, our kernel
    multiplies gradients as it reads them, so that the sums stay in the buffers."""
    scale_gradients = optimizer_module._scale_gradients
    for moments_dtype, clip_grads in (("float32", (1e-3, 1e6)), ("bfloat16", (0.0, 1e-3))):
        for clip_grad in clip_grads:
            optimizer_module._scale_gradients = scale_gradients
            trainer = tiny_trainer(hf, clip_grad=clip_grad, moments_dtype=moments_dtype)
            twin, rows, sums = trainer.again(), trainer.batches.next_batch().rows, []
            _after_prepare_grads(
                trainer, lambda gradients, sums=sums: sums.extend(g.clone() for g in gradients)
            )
            result = trainer.train_step(StepBatch(rows))

            norm = math.sqrt(sum(g.double().square().sum().item() for g in sums)) / result.loss_tokens
            assert result.grad_norm == pytest.approx(norm, rel=1e-6) and 1e-3 < norm < 1e6
            clip_factor = min(1.0, clip_grad / (result.grad_norm + 1e-6)) if clip_grad else 1.0
            scaled = [gradient * (1 / result.loss_tokens * clip_factor) for gradient in sums]
            expected = sums if moments_dtype == "bfloat16" else scaled
            for parameter, gradient in zip(trainer.optimizer.get_parameters(), expected, strict=True):
                assert torch.equal(parameter.grad, gradient)

            # A twin gets the scaled gradients, and its own scaling is left out.
            _after_prepare_grads(twin, lambda gradients, s=scaled: torch._foreach_copy_(gradients, s))
            optimizer_module._scale_gradients = lambda *_: None
            assert twin.train_step(StepBatch(rows)).is_updated
            states = [optimizer_state(each) for each in (trainer, twin)]
            assert len(states[0]) > 200 and differences(*states) == []


def _after_prepare_grads(trainer: TinyTrainer, call: Any) -> None:
    """Gives ``call`` the gradients of each step before they are scaled."""
    prepare_grads = trainer.optimizer.prepare_grads

    def prepare_and_call() -> Any:
        has_overflow = prepare_grads()
        call([parameter.grad for parameter in trainer.optimizer.get_parameters()])
        return has_overflow

    trainer.optimizer.prepare_grads = prepare_and_call


@pytest.mark.parametrize("family", ["qwen3_vl"])
@in_ranks()
def test_learning_rates_and_weight_decay_follow_the_part(hf, family: str) -> None:
    trainer = tiny_trainer(hf)
    set_learning_rates(trainer.optimizer, trainer.config, 0)
    slices = list(optimizer_slices(trainer.optimizer, trainer.live_tensors))
    assert len(slices) == 110
    for piece in slices:
        name = piece.state_name
        expected = 5e-4 if name.startswith("vision_model.") else 1e-3
        if ".merger." in name or ".deepstack_mergers." in name:
            expected = 2e-4
        assert math.isclose(piece.param_group["lr"], expected), name
        decay = 0.1 if piece.live_tensor.parameter.dim() > 1 else 0.0
        assert piece.param_group["weight_decay"] == decay, name


@in_ranks()
def test_part_with_a_rate_of_zero_stays_and_the_others_move(hf) -> None:
    """With weight decay, it stays bit for bit. Each part's own rate is logged, and none for frozen parts."""
    for still in ("vision", "merger", "language"):
        trainer = tiny_trainer(hf, **{"lr" if still == "language" else f"{still}_lr": 0.0})
        before = {live.tensor_name: live.parameter.detach().clone() for live in trainer.live_tensors}
        rates = {"language": 1e-3, "vision": 5e-4, "merger": 2e-4} | {still: 0.0}
        for number in range(2):
            assert set_learning_rates(trainer.optimizer, trainer.config, number) == rates
            assert trainer.run_step(number).is_updated
        for name, parameter, _ in trainer.live_tensors:
            assert torch.equal(before[name], parameter) == (model_part(name) == still), name
        without_merger = dataclasses.replace(trainer.config, model=ModelConfig(freeze_merger=True))
        assert set_learning_rates(trainer.optimizer, without_merger, 2) == rates | {"merger": None}


@pytest.mark.parametrize("family", ["qwen3_vl"])
@in_ranks()
def test_weights_copied_together_are_those_that_core_copies_one_by_one(hf, family: str) -> None:
    trainer = tiny_trainer(hf, dtype="bfloat16")
    assert trainer.run_step().is_updated
    [part] = trainer.optimizer.chained_optimizers
    together = [parameter.detach().clone() for parameter in trainer.chunks[0].parameters()]
    num_shards = sum(map(len, part.shard_fp32_from_float16_groups))
    assert len(part._copy_main_params_to_model_params.args[0]()[0]) == num_shards

    for parameter in trainer.chunks[0].parameters():
        parameter.data.fill_(math.nan)
    type(part)._copy_main_params_to_model_params(part)
    for ours, theirs in zip(together, trainer.chunks[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


FLOAT32 = ("A_log", "out_norm.weight")
"""Parameters of Qwen3.5 that stay float32 in a model in bfloat16: decays and the norm of linear attention."""


@pytest.mark.parametrize("family", ["qwen3_5"])
@in_ranks(2)
def test_state_of_mixed_types_is_filed_under_its_own_parameter(hf, family: str) -> None:
    trainer = tiny_trainer(hf, dtype="bfloat16")
    assert trainer.run_step().is_updated
    for piece in optimizer_slices(trainer.optimizer, trainer.live_tensors):
        parameter, name = piece.live_tensor.parameter, piece.state_name
        assert parameter.dtype == (torch.float32 if name.endswith(FLOAT32) else torch.bfloat16), name
        part: Tensor = parameter.detach().view(-1)[piece.start : piece.end]
        assert piece.adam_state["exp_avg"].numel() == part.numel(), name
        assert torch.equal(piece.main_param.view(-1).to(part.dtype), part), name


ROWS = [["mixed", "text"], ["image"]]


@in_ranks(2)
def test_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(hf) -> None:
    """In step 2 the images of the last rank alone have a gradient with one NaN. The loss is finite, and so is
    the language model's gradient; the tower's, summed over all ranks, is not."""
    trainer = trainer_of(hf, 512, decoupled=True, pp=2)
    tower: Any = trainer.model_chunks[0].module.decoupled
    is_last, backward, calls = dist.get_rank() == 1, tower.backward_call, []

    def backward_with_nan(features: list[Tensor], patches: slice, gradient: Tensor) -> None:
        calls.append(patches)
        gradient = gradient.clone()
        gradient[patches.start // tower.vision.merge_unit, 0, 0] = float("nan")
        backward(features, patches, gradient)

    for step, reason in enumerate(("", NOT_FINITE, "")):
        before = state_of(trainer)
        tower.backward_call = backward_with_nan if is_last and step == 1 else backward
        [result] = train(trainer, ROWS, [step])
        after = state_of(trainer)
        assert result.skip_reason == reason and bool(differences(before, after)) == (not reason)
        assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    assert bool(calls) == is_last  # that rank has images of its own
