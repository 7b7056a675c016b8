"""Exports a run if need be, encodes prompts as in training, and lets ``transformers`` answer them."""

import dataclasses
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from data_tools.sample_sources import SampleReader, open_encoder, read_sources
from megatron_vl.config import DataConfig, TrainConfig
from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.data.sample.boxes import boxes_in_text, compare_boxes
from megatron_vl.data.sample.pixel_settings import read_pixel_norm
from megatron_vl.data.sample.stop_tokens import read_stop_tokens
from megatron_vl.data.sample.thinking import GeneratedAnswer, split_thinking
from megatron_vl.system.errors import UserError, naming_file
from megatron_vl.weights.run_folder import export_dir_path, step_of_dir
from megatron_vl.weights.trained_media import ARGUMENTS_KEY, MEDIA_KEY, exported_facts, read_export_facts
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.common.hf_loading import follow_video_positions, load_hf_model
from toolkit.common.launch import usable_gpus
from toolkit.common.sample_encoder import SampleEncoder
from toolkit.parity.reference import hf_inputs
from toolkit.weights.export_step import ExportJob, export_step

from .options import GenerateOptions

THINK = {"on": True, "off": False, None: None}


def exported_folder(checkpoint: Path, hf: str) -> Path:
    """The Hugging Face folder of a checkpoint. A run's step is exported, with its adapters merged into the
    weights of ``hf``, unless the run's folder has an export of the same digest. Raises UserError.
    """
    if (checkpoint / "config.json").is_file():
        return checkpoint
    reader = WeightReader(checkpoint, takes_lora=True)
    step_dir = reader.path.parent
    if (step := step_of_dir(step_dir)) is None:
        raise UserError(
            f"{checkpoint} holds Megatron weights of no run; write a Hugging Face folder with `megatron-vl"
            " export` and give that"
        )
    if not hf:
        raise UserError(f"{checkpoint} is a run; give --model.hf, the Hugging Face folder it started from")

    export_dir = export_dir_path(step_dir.parent, step)
    if reader.lora.rank:  # the run's own export of adapters is PEFT's files
        export_dir = export_dir.with_name(f"{export_dir.name}_merged")
    if read_export_facts(export_dir).get("weights") != reader.manifest["digest"]:
        print(f"exporting step {step} to {export_dir}", file=sys.stderr, flush=True)
        export_step(
            ExportJob(
                str(step_dir),
                hf,
                str(export_dir),
                os.getpid(),
                is_last=True,
                facts={"step": step},
                merges_adapter=bool(reader.lora.rank),
            )
        )
    return export_dir


def with_trained_media(data_config: DataConfig, hf_dir: Path) -> DataConfig:
    """The limits of media and arguments of the template that an export names, where none is given."""
    stated = {name for name, value in vars(data_config).items() if value != getattr(DataConfig(), name)}
    facts = exported_facts(hf_dir)
    given = {**facts.get(MEDIA_KEY, {}), ARGUMENTS_KEY: facts.get(ARGUMENTS_KEY, {})}
    return dataclasses.replace(data_config, **{k: value for k, value in given.items() if k not in stated})


class Answerer:
    """A Hugging Face folder that answers encoded prompts greedily.

    Args:
        limits: largest number of tokens of an answer, without and with thinking.
        dtype: of the model; None: bfloat16 on GPUs and float32 on CPU, where bfloat16 is slow.
    """

    def __init__(
        self, hf_dir: Path, data_config: DataConfig, limits: tuple[int, int], dtype: torch.dtype | None = None
    ) -> None:
        logging.disable_progress_bar()  # of transformers' loading, which takes a log ten lines
        self.hf_dir, self.limits = hf_dir, limits
        self.encoder = SampleEncoder(hf_dir, data_config)
        self.pixel_norm = read_pixel_norm(hf_dir)
        self.stop_token_ids = read_stop_tokens(hf_dir, self.encoder.chat_encoder.tokenizer)
        num_gpus = usable_gpus()
        dtype = dtype or (torch.bfloat16 if num_gpus else torch.float32)
        # Several GPUs share a model that one cannot hold.
        self.model = load_hf_model(hf_dir, dtype, "auto" if num_gpus > 1 else None)
        if num_gpus == 1:
            self.model.to("cuda")
        follow_video_positions(self.model, self.encoder.spec)

    def model_inputs(self, prompt: TokenizedSample) -> dict[str, Tensor]:
        """Keyword arguments of the model, which computes the positions itself: those of an answer too."""
        inputs = hf_inputs([prompt], self.encoder.spec, self.pixel_norm, str(self.model.device))
        return {name: tensor for name, tensor in inputs.items() if name != "position_ids"}

    @torch.no_grad()
    def answer(self, prompt: TokenizedSample) -> tuple[GeneratedAnswer, str]:
        """The greedy answer to a prompt that ends with the header of the assistant's turn, and what it lacks
        in words; empty if it lacks nothing."""
        begins_by_thinking = self.encoder.begins_by_thinking(prompt)
        limit = self.limits[begins_by_thinking]
        # Given to `generate`, it would be completed by the folder's own settings (sampling, a penalty).
        self.model.generation_config = GenerationConfig(
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=self.stop_token_ids,
            pad_token_id=self.stop_token_ids[0],
        )
        tokens = self.model.generate(**self.model_inputs(prompt))[0, len(prompt) :].tolist()
        answer = split_thinking(self.decode(tokens), begins_by_thinking)
        if tokens[-1] not in self.stop_token_ids:
            return answer, f"the answer was cut after {limit} tokens; raise --max-new-tokens"
        return answer, "" if answer.is_block_closed else "the model ended its turn while it was thinking"

    def decode(self, token_ids: Any) -> str:
        return self.encoder.chat_encoder.tokenizer.decode(token_ids, skip_special_tokens=True)


def encode_prompt(encoder: SampleEncoder, options: GenerateOptions) -> TokenizedSample:
    files = [("image", path) for path in options.image] + [("video", path) for path in options.video]
    content = [*({"type": kind} for kind, _ in files), {"type": "text", "text": options.prompt}]
    media = [encoder.encode_medium(kind, str(path), path.read_bytes()) for kind, path in files]
    return encoder.encode_prompt([{"role": "user", "content": content}], media, THINK[options.thinking])


def answer_dataset(answerer: Answerer, config: TrainConfig, out_path: Path) -> str:
    """Answers all samples of ``eval.split``, or the first ``eval.answers``, and writes a line of JSON for
    each. Returns a line with the share of answers that equal their reference, and the mean IoU of boxes.
    """
    partial_path = out_path.with_name(f"{out_path.name}.partial")  # of an answering that was killed, too
    partial_path.unlink(missing_ok=True)
    equal = answered = 0
    ious: list[float] = []
    vision = answerer.encoder.spec.vision
    left_out: Counter[str] = Counter()
    samples = itertools.islice(_encoded_samples(answerer, config, left_out), config.eval.answers or None)
    for key, sample, has_objects in samples:
        prompt, reference_tokens = split_at_answer(sample, answerer.encoder.spec)
        thinks = answerer.encoder.begins_by_thinking(prompt)
        reference = split_thinking(answerer.decode(reference_tokens), thinks).answer_text
        answer, text = answerer.answer(prompt)[0].answer_text, answerer.decode(prompt.token_ids)
        line: dict[str, Any] = {"key": key, "prompt": text, "reference": reference, "answer": answer}
        # Other lists of four numbers are no boxes.
        reference_boxes = boxes_in_text(reference, vision) if has_objects or "bbox_2d" in reference else []
        if reference_boxes:
            line["iou"] = compare_boxes(boxes_in_text(answer, vision), reference_boxes)
            ious += line["iou"]
        with naming_file(out_path), partial_path.open("a", encoding="utf-8") as out_file:
            print(json.dumps(line, ensure_ascii=False), file=out_file)
        answered += 1
        equal += answer.strip() == reference.strip()
        if answered % 20 == 0:
            print(f"{answered} answers", file=sys.stderr, flush=True)
    reasons = "".join(f"; {count} left out: {reason}" for reason, count in left_out.items())
    if not answered:
        raise UserError(f"{config.data.path}: no sample of {config.eval.split} can be answered{reasons}")
    partial_path.replace(out_path)
    boxes_text = f"; mean IoU of {len(ious)} boxes {sum(ious) / len(ious):.3f}" if ious else ""
    share_text = f"{equal} of {answered} answers ({equal / answered:.1%}) equal their reference"
    return share_text + boxes_text + reasons


def _encoded_samples(
    answerer: Answerer, config: TrainConfig, left_out: Counter[str]
) -> Iterator[tuple[str, TokenizedSample, bool]]:
    """(key, sample as a run trains on it, whether it has objects). Counts what a run leaves out in
    ``left_out``."""
    data_config = answerer.encoder.data_config
    row_encoder = open_encoder(data_config, answerer.encoder.spec, answerer.hf_dir)
    for source in read_sources(data_config.path, config.eval.split):
        with closing(SampleReader(source)) as reader:
            for index in range(len(source)):
                raw_sample = reader.read_sample(index, with_media=True)
                # Its first part, which is the only one if it is not cut.
                encoded = row_encoder.sample_part(row_encoder.preencode_sample(raw_sample), 0)
                refused = ["a document has no question"] if encoded.is_document else encoded.refused
                row_encoder.dropped_samples.clear()
                sample = None if refused else row_encoder.postencode_sample(encoded)
                refused = [dropped.reason for dropped in row_encoder.dropped_samples] or refused
                if sample is None or refused or not sample.loss_mask.any():
                    left_out[refused[0] if refused else "no answer"] += 1
                else:
                    yield raw_sample.key, sample, bool(encoded.objects and encoded.objects.objects)


def split_at_answer(sample: TokenizedSample, spec: Any) -> tuple[TokenizedSample, Tensor]:
    """The prompt before the first answer that is trained on, and that answer's tokens."""
    mask = sample.loss_mask.bool()
    start = int(mask.nonzero()[0])
    answer_length = int(mask[start:].int().cumprod(0).sum())
    prompt_ids = sample.token_ids[:start]
    is_placeholder = (prompt_ids == spec.image_token_id) | (prompt_ids == spec.video_token_id)
    token_counts = (item.grid_thw.num_tokens(spec.vision.spatial_merge_size) for item in sample.media_items)
    # Media after the answer have no placeholders in the prompt.
    num_media = sum(end <= int(is_placeholder.sum()) for end in itertools.accumulate(token_counts))
    prompt = TokenizedSample(prompt_ids, sample.loss_mask[:start], sample.media_items[:num_media])
    return prompt, sample.token_ids[start : start + answer_length]
