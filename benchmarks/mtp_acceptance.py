"""How many tokens that multi-token prediction drafts does a model accept after it was fine-tuned?

    python -m benchmarks.mtp_acceptance [--steps 200] [--fine-tuning 100] [--lr 2e-3] [--seed 0]

A small Qwen3.5 with random weights learns the demo's conversations together with its multi-token prediction.
Then it is fine-tuned to other answers: with the layer as it is, with the layer trained alone, and jointly.
Each exported folder answers the demo's questions by greedy decoding in ``transformers``. The table has the
share of these tokens that the folder's own layer drafts one token ahead. It runs on one CPU.
"""

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from converters.convert import export_weights
from megatron_vl.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    MtpConfig,
    OptimizerConfig,
    TrainConfig,
)
from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.data.sample.pixel_settings import read_pixel_norm
from megatron_vl.parallel.process_grid import init_distributed
from megatron_vl.platform import Platform, get_platform
from toolkit.common.sample_encoder import SampleEncoder
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint
from toolkit.demo.demo_data import DEMO_CONVERSATIONS, conversation_texts, write_raw_data
from toolkit.parity.case import train_on_samples
from toolkit.parity.reference import hf_inputs, load_hf_for_training

ROWS, SEQ_LEN, LONGEST_ANSWER = 4, 512, 40
SIZES: dict[str, Any] = {"hidden_size": 128, "ffn_hidden_size": 352, "max_pixels": 112 * 112}
END = "<|im_end|>"


def other_answer(answer: str) -> str:
    """What fine-tuning teaches: the words of the old answer in reverse, between two others."""
    return f"I would say: {' '.join(reversed(answer.rstrip('.').split()))}, and nothing else."


def conversations(hf: Path, media: Path, is_other: bool) -> list[tuple[list[dict[str, Any]], list[Any]]]:
    """The demo's conversations without video, with their own or with other answers: (messages, media)."""
    encoder, found = SampleEncoder(hf), []
    for _, files, turns in DEMO_CONVERSATIONS:
        if "video" in files:
            continue
        names = files.get("image", [])
        names = [names] if isinstance(names, str) else names
        items = [encoder.encode_medium("image", name, (media / name).read_bytes()) for name in names]
        messages = []
        for i, turn in enumerate(turns.split("|")):
            texts = turn.split("<image>")
            content: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}] if texts[0] else []
            for text in texts[1:]:
                content += [{"type": "image"}, {"type": "text", "text": text}]
            if i % 2:
                content = [{"type": "text", "text": other_answer(turn) if is_other else turn}]
            messages.append({"role": ("user", "assistant")[i % 2], "content": content})
        found.append((messages, items))
    return found


def config_of(hf: Path, steps: int, lr: float, mtp: MtpConfig, run: Path | None = None) -> TrainConfig:
    return TrainConfig(
        steps=steps,
        global_batch_size=ROWS,
        dtype="float32",
        data=DataConfig(seq_len=SEQ_LEN),
        model=ModelConfig(hf=str(hf)),
        mtp=mtp,
        optimizer=OptimizerConfig(lr=lr, schedule="cosine", warmup_steps=min(10, steps // 4)),
        checkpoint=CheckpointConfig(dir=str(run) if run else ""),
    )


def train(
    hf: Path, out: Path, samples: list[TokenizedSample], config: TrainConfig, platform: Platform
) -> None:
    """Trains on all samples in each step, and exports to ``out``."""
    step = [samples[i::ROWS] for i in range(ROWS)]
    results = train_on_samples(config, [step] * config.steps, platform)
    print(f"{out.name}: loss {results[0].loss:.3f} -> {results[-1].loss:.3f}", flush=True)
    export_weights(config.checkpoint.dir, hf, out)


@torch.no_grad()
def answer(hf: Path, prompts: list[TokenizedSample], end_id: int) -> list[TokenizedSample]:
    """The prompts with their greedy answers, on which alone there is a loss."""
    model = load_hf_for_training(hf).eval()
    encoder, answered = SampleEncoder(hf), []
    for prompt in prompts:
        sample = prompt
        for _ in range(LONGEST_ANSWER):
            inputs = hf_inputs([sample], encoder.spec, read_pixel_norm(hf))
            token = model(**inputs, use_cache=False, logits_to_keep=1).logits[0, -1].argmax()[None]
            sample = dataclasses.replace(
                sample,
                token_ids=torch.cat((sample.token_ids, token)),
                loss_mask=torch.cat((sample.loss_mask, torch.ones(1, dtype=torch.bool))),
            )
            if int(token) == end_id:
                break
        # The first token of an answer comes from the model, not from a draft.
        sample.loss_mask[len(prompt.token_ids)] = False
        answered.append(sample)
    return answered


def accepted_share(hf: Path, samples: list[TokenizedSample], platform: Platform) -> str:
    """The drafts of the folder's layer that equal the next tokens of the answers."""
    step = [samples[i::ROWS] for i in range(ROWS)]
    [result] = train_on_samples(config_of(hf, 1, 0.0, MtpConfig(loss=1.0)), [step], platform)
    share, tokens = result.more_metrics["mtp_top1"], result.more_metrics["mtp_tokens"]
    return f"{share * tokens:.0f} of {tokens} ({share:.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fine-tuning", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    options = parser.parse_args()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (alone | {"MASTER_PORT": "29561"}).items():
        os.environ.setdefault(name, value)
    platform = get_platform("cpu")
    init_distributed(platform)

    with tempfile.TemporaryDirectory() as folder:
        d, joint = Path(folder), MtpConfig(loss=0.3, trains="all")
        hf = write_tiny_checkpoint(
            d / "hf",
            "qwen3_5",
            seed=options.seed,
            texts=conversation_texts(),
            dtype=torch.float32,
            **SIZES,
        )
        media = write_raw_data(d / "raw").parent / "media"
        encoder, table = SampleEncoder(hf), {}
        end_id = int(encoder.chat_encoder.tokenizer.encode(END)[0])
        own, other = ([*conversations(hf, media, is_other)] for is_other in (False, True))
        prompts = []
        for (question, *_), items in own:
            num_images = sum(part["type"] == "image" for part in question["content"])
            prompts.append(encoder.encode_prompt([question], items[:num_images]))

        config = config_of(hf, options.steps, options.lr, joint, d / "run")
        train(hf, d / "before", [encoder.encode_sample(*c) for c in own], config, platform)
        table["before fine-tuning"] = d / "before"
        for name, mtp in (
            ("layer as it was", MtpConfig()),
            ("mtp.trains: head", MtpConfig(loss=0.3)),
            ("mtp.trains: all", joint),
        ):
            out = d / name.replace(" ", "_").replace(":", "")
            config = config_of(d / "before", options.fine_tuning, options.lr / 4, mtp, d / f"run_{out.name}")
            train(d / "before", out, [encoder.encode_sample(*c) for c in other], config, platform)
            table[name] = out
        print("| | drafts that greedy decoding accepts |\n|---|---|")
        for name, out in table.items():
            print(f"| {name} | {accepted_share(out, answer(out, prompts, end_id), platform)} |", flush=True)


if __name__ == "__main__":
    main()
