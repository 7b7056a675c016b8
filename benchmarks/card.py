"""Writes a card of a model: its speed and memory, and its losses beside those of ``transformers``.

    python -m benchmarks.card --hf HF_DIR --out CARD.json [--language-layers N] [--vision-layers N]

The model has random weights and the sizes of the config, perhaps with fewer layers. Rows of images are timed
first, as `megatron-vl bench` does. Then the same weights are trained on the same conversations in the same
order, here and in ``transformers``: bfloat16 on a GPU, float32 on CPU. Both sides have float32 main weights,
gradients and moments, the same AdamW, clipping and learning rates, and the same samples in each step;
``transformers`` gets them as one padded batch, the trainer as packed rows. A third training, in
``transformers`` with its eager attention, shows how far two correct programs come apart by rounding alone.
The site shows the cards in ``docs/families/cards``.
"""

import argparse
import contextlib
import datetime
import gc
import io
import itertools
import json
import os
import platform as python_platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from megatron_vl.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from megatron_vl.spec.families import ModelSpec, read_spec
from toolkit.bench.options import BenchRun, parse_bench_options
from toolkit.common.launch import GPU_ENVIRONMENT, REPOSITORY_ROOT

TIMED_ROWS, TIMED_STEPS = 4, 8
"""Rows in a timed step, and timed steps."""
IMAGE_SIDES = (112, 280)
"""Shortest and longest side of an image in pixels; at most 100 tokens."""
PARAGRAPH_LENGTHS = (150, 450)
"""Fewest and most characters of a paragraph of an answer."""
ROW_TOKENS, ROWS_PER_STEP = 1024, 2
CONVERSATION_COUNT = 400
"""Number of different conversations; 300 steps go through them about six times."""
VOCABULARY_SIZE = 2000
"""Byte-pair tokens of the tokenizer, which is trained on the conversations. The embedding keeps its size."""
TAIL_STEPS = 30
"""Number of last losses whose mean is reported."""
PACKAGES = ("torch", "megatron-core", "transformers", "flash-attn-4", "triton")


@dataclass(frozen=True)
class CurveRun:
    """A training that both sides do."""

    config: TrainConfig
    """``model`` names the folder of the initial weights in both forms."""
    step_batches: list[list[list[Any]]]
    """Samples of each step and row."""


# --- Conversations ------------------------------------------------------------------------------------------


def write_conversations(count: int) -> list[tuple[bytes, str, str]]:
    """(JPEG, question, answer), always the same ones for a version of Python and scikit-image.

    An image is a random crop of one of the demo's photographs. Its answer names the photograph and goes on
    with a paragraph of Python's manual, so that a few hundred steps have more to learn than five captions.
    """
    from PIL import Image

    from benchmarks.samples import random_crop
    from toolkit.demo.demo_data import ANSWER_BY_IMAGE, IMAGE_QUESTION, load_images

    generator = random.Random(0)
    photographs = {name: Image.fromarray(load()) for name, load in load_images().items()}
    paragraphs = manual_paragraphs()
    generator.shuffle(paragraphs)
    conversations = []
    for i in range(count):
        name = generator.choice(list(ANSWER_BY_IMAGE))
        size = generator.randint(*IMAGE_SIDES), generator.randint(*IMAGE_SIDES)
        jpeg = io.BytesIO()
        random_crop(photographs[name], size, generator).save(jpeg, "JPEG", quality=92)
        topic, paragraph = paragraphs[i % len(paragraphs)]
        question = f"{IMAGE_QUESTION} And what does the manual say of {topic}?"
        conversations.append((jpeg.getvalue(), question, f"{ANSWER_BY_IMAGE[name]} {paragraph}"))
    return conversations


def manual_paragraphs() -> list[tuple[str, str]]:
    """(topic, paragraph) of the prose in Python's manual, as ``help()`` shows it."""
    shortest, longest = PARAGRAPH_LENGTHS
    paragraphs = []
    for topic, topic_text in topics.items():
        for block in topic_text.split("\n\n"):
            paragraph = " ".join(block.split())
            # Code, tables and lists are indented or begin with a sign.
            if block[:1].isalpha() and shortest <= len(paragraph) <= longest:
                paragraphs.append((topic, paragraph))
    return paragraphs


# --- The trainings ------------------------------------------------------------------------------------------


def prepare_curve(
    spec: ModelSpec, folder: Path, platform_name: str, *, steps: int, learning_rate: float
) -> CurveRun:
    """Writes random weights in both forms and a tokenizer to ``folder``, and encodes the conversations."""
    from converters.convert import convert_weights
    from megatron_vl.data.synthetic import fill_rows
    from toolkit.common.sample_encoder import SampleEncoder

    conversations = write_conversations(CONVERSATION_COUNT)
    config = TrainConfig(
        model=ModelConfig(hf=str(folder / "hf"), checkpoint=str(folder / "weights"), moe_aux_loss=0.0),
        data=DataConfig(seq_len=ROW_TOKENS),
        optimizer=OptimizerConfig(lr=learning_rate, warmup_steps=steps // 10),
        steps=steps,
        global_batch_size=ROWS_PER_STEP,
        dtype="bfloat16" if platform_name == "cuda" else "float32",
        platform=platform_name,  # type: ignore[arg-type]
    )
    texts = [text for _, question, answer in conversations for text in (question, answer)]
    write_random_checkpoint(spec, folder / "hf", texts, config)
    convert_weights(config.model.hf, config.model.checkpoint)

    encoder = SampleEncoder(config.model.hf)
    samples = []
    for jpeg, question, answer in conversations:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        samples.append(encoder.encode_sample(turns, [encoder.encode_medium("image", "image.jpg", jpeg)]))
    # All samples again and again, each time in another order.
    generator = random.Random(0)
    drawn = itertools.chain.from_iterable(generator.sample(samples, len(samples)) for _ in itertools.count())
    rows = fill_rows(drawn, ROW_TOKENS)
    return CurveRun(config, [list(itertools.islice(rows, ROWS_PER_STEP)) for _ in range(steps)])


def write_random_checkpoint(spec: ModelSpec, hf_dir: Path, texts: list[str], config: TrainConfig) -> None:
    """Writes a Hugging Face folder of ``spec`` with the random weights that ``transformers`` gives it.

    The tokenizer is trained on ``texts``, so the special tokens have other ids than in the released model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from megatron_vl.spec.families.base import QWEN2_SPECIAL_TOKENS
    from toolkit.common.tiny_checkpoint import SPECIAL_TOKENS, TinySizes, write_small_files

    hf_dir.mkdir(parents=True)
    vocabulary = min(VOCABULARY_SIZE, spec.language.vocab_size - len(SPECIAL_TOKENS))
    small_config = write_small_files(hf_dir, spec.family, texts, TinySizes(text_vocab_size=vocabulary))
    token_ids = {name: small_config[name] for name in QWEN2_SPECIAL_TOKENS}
    hf_config = AutoConfig.for_model(**spec.hf_config | token_ids)
    torch.manual_seed(config.seed)
    with torch.device(config.platform):
        model = AutoModelForImageTextToText.from_config(hf_config, dtype=getattr(torch, config.dtype))
    model.save_pretrained(hf_dir)
    # transformers and this project must build the same model.
    if differences := read_spec(hf_dir).different_fields(spec):
        raise AssertionError(f"{hf_dir} holds another model than {spec.family}: {differences}")


def train_here(run: CurveRun) -> list[float]:
    """Trains with the trainer. Returns the loss of each step. Collective."""
    from megatron_vl.platform import get_platform
    from toolkit.parity.case import train_on_samples

    platform = get_platform(run.config.platform)
    return [result.loss for result in train_on_samples(run.config, run.step_batches, platform)]


def train_in_transformers(run: CurveRun, attention: str = "sdpa") -> list[float]:
    """Trains with ``transformers`` and its implementation ``attention``. Returns the loss of each step."""
    import torch

    from benchmarks.reference_trainer import ReferenceTrainer
    from megatron_vl.training.optimizer import scheduled_rate

    config = run.config
    device = {"dtype": getattr(torch, config.dtype), "device": config.platform}
    # No step has more samples than a row has tokens.
    trainer = ReferenceTrainer(
        config.model.hf, config.optimizer, **device, batch_size=ROW_TOKENS, attention=attention
    )
    losses = []
    for step, rows in enumerate(run.step_batches):
        rate = scheduled_rate(config, step, config.optimizer.lr)
        losses.append(trainer.train_step(list(itertools.chain(*rows)), rate)[0])
    return losses


def curve_gap(losses: list[float], reference: list[float]) -> dict[str, Any]:
    """How far a curve is from another one: over all steps, and between the means of the last losses."""
    gaps = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    return {
        "largest": max(gaps),
        "largest_at_step": gaps.index(max(gaps)) + 1,
        "mean": statistics.mean(gaps),
        "tail": statistics.mean(losses[-TAIL_STEPS:]) - statistics.mean(reference[-TAIL_STEPS:]),
    }


def measure_curves(
    spec: ModelSpec, platform_name: str, steps: int, learning_rate: float, seconds: dict[str, float]
) -> dict[str, Any]:
    """The settings of the trainings, their losses, and their gaps to ``transformers``."""
    losses = {}
    with tempfile.TemporaryDirectory(prefix="megatron-vl-card-") as folder:
        with timed_part("weights and conversations", seconds):
            run = prepare_curve(spec, Path(folder), platform_name, steps=steps, learning_rate=learning_rate)
        trainings = {
            "megatron-vl": train_here,
            "transformers": train_in_transformers,
            "transformers, eager": partial(train_in_transformers, attention="eager"),
        }
        for name, training in trainings.items():
            with timed_part(name, seconds):
                losses[name] = training(run)
    reference = losses["transformers"]
    return {
        "data": f"{CONVERSATION_COUNT} conversations about crops of photographs and Python's manual",
        "tail_steps": min(TAIL_STEPS, steps),
        "rows_per_step": ROWS_PER_STEP,
        "row_tokens": ROW_TOKENS,
        "dtype": run.config.dtype,
        "optimizer": vars(run.config.optimizer),
        "losses": losses,
        "tail_means": {name: statistics.mean(curve[-TAIL_STEPS:]) for name, curve in losses.items()},
        "gaps": {name: curve_gap(losses[name], reference) for name in trainings if name != "transformers"},
    }


# --- The card -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def timed_part(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Shows and times a part, and frees its memory."""
    import torch

    print(f"card: {name} ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - start, 1)
    gc.collect()
    torch.cuda.empty_cache()


def bench_run_of(args: argparse.Namespace, platform_name: str) -> BenchRun:
    """The benchmark of the card. Its spec is the card's model."""
    dtype = "bfloat16" if platform_name == "cuda" else "float32"
    words = f"--data.path synthetic:images --timed {TIMED_STEPS} --platform {platform_name} --dtype {dtype}"
    words += f" --data.seq_len {args.seq_len} --global_batch_size {TIMED_ROWS}"
    words += f" --language-layers {args.language_layers} --vision-layers {args.vision_layers}"
    words += " --even-routing" * (read_spec(args.hf).language.moe is not None)  # as predictions are
    return parse_bench_options(["--model.hf", args.hf, *words.split()])


def describe_machine(run: BenchRun) -> dict[str, Any]:
    """Versions, and the attention kernels that were chosen."""
    import torch

    from megatron_vl.estimate.gpus import query_gpus
    from megatron_vl.models.attention import choose_backend
    from toolkit.doctor.machine_checks import installed_version, transformer_engine_version

    config, spec = run.config, run.spec
    gpus = query_gpus() if config.platform == "cuda" else []
    versions = {name: installed_version(name) for name in PACKAGES}
    versions["transformer-engine"] = transformer_engine_version()
    versions["python"] = python_platform.python_version()
    facts = {"platform": config.platform, "dtype": getattr(torch, config.dtype)}
    attention = {
        "language": choose_backend(
            config.model.attention, head_dim=spec.language.head_dim, causal=True, **facts
        ),
        "vision": choose_backend(
            config.model.attention, head_dim=spec.vision.head_dim, causal=False, **facts
        ),
    }
    driver = gpus[0].driver_version if gpus else None
    return {"versions": versions, "driver": driver, "attention": attention}


def make_card(args: argparse.Namespace) -> dict[str, Any]:
    """Measures everything. Times are in seconds, memory is in GiB, losses are in nats a token."""
    import torch

    from megatron_vl.parallel.process_grid import end_distributed
    from toolkit.bench.measure import measure_benchmark

    platform_name, seconds = "cuda" if torch.cuda.is_available() else "cpu", {}
    run = bench_run_of(args, platform_name)
    with timed_part("the benchmark", seconds):
        figures = measure_benchmark(run)
    config_spec, config_path = read_spec(args.hf), Path(args.hf).resolve()
    model_path = config_path.parent if config_path.name == "config.json" else config_path
    describe = ["git", "-C", str(REPOSITORY_ROOT), "describe", "--always", "--abbrev=40", "--dirty=+"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    config_facts = {
        "hf": model_path.name.removesuffix(".json"),
        "config_language_layers": config_spec.language.num_layers,
        "config_vision_layers": config_spec.vision.num_layers,
    }
    card = {
        "model": figures["model"] | config_facts,
        "source": {"commit": commit.removesuffix("+") or None, "changed": commit.endswith("+")},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": figures["machine"] | describe_machine(run),
        "speed": figures["workloads"]["images"] | {"notes": figures["notes"]},
        "curve": measure_curves(run.spec, platform_name, args.steps, args.lr, seconds),
        "seconds": seconds,
    }
    end_distributed()
    return card


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--hf", required=True, help="Hugging Face folder or config.json of the model's sizes")
    parser.add_argument("--language-layers", type=int, default=0, help="0: as in the config")
    parser.add_argument("--vision-layers", type=int, default=0, help="0: as in the config")
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of the timed rows")
    parser.add_argument("--steps", type=int, default=300, help="steps of each training")
    parser.add_argument("--lr", type=float, default=3e-4, help="peak learning rate of the trainings")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args(argv)
    os.environ.update({**GPU_ENVIRONMENT, **os.environ})  # before torch is imported
    card_text = json.dumps(make_card(args), indent=1)
    # Each list of numbers is on one line.
    card_text = re.sub(r"\[[-+.\de,\s]+\]", lambda numbers: " ".join(numbers[0].split()), card_text)
    args.out.write_text(card_text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
