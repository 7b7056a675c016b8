"""Trains the same random weights on the same batches, here and in ``transformers``.

Both sides start from one Hugging Face folder in the model's type. Both have float32 main weights, gradients
and moments, the same AdamW, clipping and learning rates, and the same samples in each step. ``transformers``
gets them as one padded batch, the trainer as packed rows.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converters.convert import convert_weights
from megatron_vl.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.families.base import QWEN2_SPECIAL_TOKENS
from megatron_vl.training.optimizer import scheduled_rate
from toolkit.bench.workload import fill_rows
from toolkit.parity.case import ParityCase, build_case
from toolkit.parity.training import ReferenceTrainer, train_case
from toolkit.sample_encoder import SampleEncoder
from toolkit.tiny_checkpoint import SPECIAL_TOKENS, TinySizes, write_small_files

from .conversations import encode_conversations, write_conversations

ROW_TOKENS = 1024
ROWS_PER_STEP = 2
CONVERSATION_COUNT = 400
"""Number of different conversations; 300 steps go through them about six times."""
VOCABULARY_SIZE = 2000
"""Byte-pair tokens of the tokenizer, which is trained on the conversations. The embedding keeps its size."""
TAIL_STEPS = 30
"""Number of last losses whose mean is reported."""


@dataclass(frozen=True)
class CurveRun:
    """A training that both sides do."""

    config: TrainConfig
    """Settings of the trainer. ``model`` names the folder of the initial weights in both forms."""
    step_batches: list[list[list[TokenizedSample]]]
    """Samples of each step and row."""


def prepare_curve(
    spec: ModelSpec, folder: Path, platform_name: str, *, steps: int, learning_rate: float
) -> CurveRun:
    """Writes random weights in both forms and a tokenizer to ``folder``, and encodes the conversations."""
    conversations = write_conversations(CONVERSATION_COUNT)
    training_texts = []
    for conversation in conversations:
        training_texts += [conversation.question, conversation.answer]
    config = TrainConfig(
        model=ModelConfig(hf=str(folder / "hf"), checkpoint=str(folder / "weights"), moe_aux_loss=0.0),
        data=DataConfig(seq_len=ROW_TOKENS),
        optimizer=OptimizerConfig(lr=learning_rate, warmup_steps=steps // 10),
        steps=steps,
        global_batch_size=ROWS_PER_STEP,
        dtype="bfloat16" if platform_name == "cuda" else "float32",
        platform=platform_name,  # type: ignore[arg-type]
    )

    write_random_checkpoint(spec, folder / "hf", training_texts, config)
    convert_weights(config.model.hf, config.model.checkpoint)
    samples = encode_conversations(conversations, SampleEncoder(config.model.hf))
    sample_rows = fill_rows(repeat_shuffled(samples, seed=0), ROW_TOKENS)
    step_batches = []
    for _ in range(steps):
        step_batches.append(list(itertools.islice(sample_rows, ROWS_PER_STEP)))
    return CurveRun(config, step_batches)


def repeat_shuffled(samples: Sequence[TokenizedSample], seed: int) -> Iterator[TokenizedSample]:
    """Yields all samples again and again, each time in another order."""
    generator = random.Random(seed)
    while True:
        yield from generator.sample(samples, len(samples))


def write_random_checkpoint(spec: ModelSpec, hf_dir: Path, texts: list[str], config: TrainConfig) -> None:
    """Writes a Hugging Face folder of ``spec`` with the random weights that ``transformers`` gives it.

    The tokenizer is trained on ``texts``, so the special tokens have other ids than in the released model.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    hf_dir.mkdir(parents=True)
    text_vocab_size = min(VOCABULARY_SIZE, spec.language.vocab_size - len(SPECIAL_TOKENS))
    small_config = write_small_files(hf_dir, spec.family, texts, TinySizes(text_vocab_size=text_vocab_size))
    token_ids = {name: small_config[name] for name in QWEN2_SPECIAL_TOKENS}
    hf_config = AutoConfig.for_model(**spec.hf_config | token_ids)

    torch.manual_seed(config.seed)
    with torch.device(config.platform):
        model = AutoModelForImageTextToText.from_config(hf_config, dtype=getattr(torch, config.dtype))
    model.save_pretrained(hf_dir)
    # transformers and this project must build the same model.
    if differences := read_spec(hf_dir).different_fields(spec):
        raise AssertionError(f"{hf_dir} holds another model than {spec.family}: {differences}")


def train_here(curve_run: CurveRun, platform: Platform) -> list[float]:
    """Trains with the trainer. Returns the loss of each step. Collective."""
    config = curve_run.config
    parity_case = ParityCase(name="card", hf=config.model.hf, weights=config.model.checkpoint, steps=[])
    built_case = build_case(parity_case, platform, config)
    step_results = train_case(built_case, curve_run.step_batches, platform)
    return [result.loss for result in step_results]


def train_in_transformers(curve_run: CurveRun, attention: str = "sdpa") -> list[float]:
    """Trains with ``transformers``. Returns the loss of each step.

    Args:
        attention: attention implementation of transformers.
    """
    config = curve_run.config
    reference_trainer = ReferenceTrainer(
        config.model.hf,
        config.optimizer,
        dtype=getattr(torch, config.dtype),
        device=config.platform,
        batch_size=ROW_TOKENS,  # more samples than a step has
        attention=attention,
    )
    losses = []
    for step_number, step_rows in enumerate(curve_run.step_batches):
        learning_rate = scheduled_rate(config, step_number, config.optimizer.lr)
        step_samples = list(itertools.chain.from_iterable(step_rows))
        losses.append(reference_trainer.train_step(step_samples, learning_rate)[0])
    return losses


def curve_gap(losses: list[float], reference_losses: list[float]) -> dict[str, Any]:
    """How far a curve is from another one: over all steps, and between the means of the last losses."""
    step_gaps = []
    for loss, reference_loss in zip(losses, reference_losses, strict=True):
        step_gaps.append(abs(loss - reference_loss))
    return {
        "largest": max(step_gaps),
        "largest_at_step": step_gaps.index(max(step_gaps)) + 1,
        "mean": statistics.mean(step_gaps),
        "tail": tail_mean(losses) - tail_mean(reference_losses),
    }


def tail_mean(losses: list[float]) -> float:
    """The mean of the last :data:`TAIL_STEPS` losses."""
    return statistics.mean(losses[-TAIL_STEPS:])
