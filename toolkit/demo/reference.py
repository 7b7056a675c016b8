"""Computes losses and answers of a checkpoint in ``transformers``.

Conversations go through the checkpoint's own processor, starting from the raw JSON and media files. So if the
results agree with the trainer's, they confirm the data tool, the loader, the packing, the parallel model, the
checkpoint and the export together.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.data.sample.pixels import decode_image
from megatron_vl.spec.families import read_spec
from toolkit.hf_loading import apply_video_prompt, follow_video_positions, load_hf_model, load_hf_processor

MEDIA_PLACEHOLDER = re.compile(r"(<image>|<video>)")


class DemoReference:
    """A Hugging Face folder in ``transformers``, in float32 on CPU.

    Videos follow the released models' rules.
    """

    def __init__(self, hf_dir: Path, *, video_fps: float, video_max_frames: int) -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.spec = read_spec(hf_dir)
        self.processor = load_hf_processor(hf_dir)
        self.model = follow_video_positions(load_hf_model(hf_dir, torch.float32), self.spec)
        self.video_sampling = {"fps": video_fps, "max_frames": video_max_frames}

    @torch.no_grad()
    def assistant_loss(self, sample: dict[str, Any], media_dir: Path) -> tuple[float, int]:
        """Returns the sum of the losses of a ShareGPT sample's assistant tokens, and their number."""
        messages, images, videos = read_sharegpt_sample(sample, media_dir)
        model_inputs = self._processor_batch(
            self.processor.apply_chat_template(messages, tokenize=False), images, videos
        )
        labels = torch.where(
            self._assistant_mask(model_inputs["input_ids"][0]), model_inputs["input_ids"], -100
        )
        count = int((labels[0, 1:] != -100).sum())
        return float(self.model(**model_inputs, labels=labels).loss) * count, count

    @torch.no_grad()
    def greedy_answer(self, sample: dict[str, Any], media_dir: Path, max_new_tokens: int = 64) -> str:
        """Generates the greedy answer to the first turn of a sample."""
        first_messages, images, videos = read_sharegpt_sample(
            sample | {"conversations": sample["conversations"][:1]}, media_dir
        )
        text = self.processor.apply_chat_template(first_messages, tokenize=False, add_generation_prompt=True)
        model_inputs = self._processor_batch(text, images, videos)
        # Like released checkpoints, this one sets sampling and a repetition penalty in its generation_config.
        tokens = self.model.generate(
            **model_inputs, do_sample=False, repetition_penalty=1.0, max_new_tokens=max_new_tokens
        )
        return self.processor.decode(
            tokens[0, model_inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )

    def _processor_batch(self, prompt_text: str, images: list[Any], videos: list[tuple[Tensor, Any]]) -> Any:
        processor_arguments: dict[str, Any] = {"images": images} if images else {}
        if videos:
            processor_arguments |= {
                "videos": [frames for frames, _ in videos],
                "video_metadata": [facts for _, facts in videos],
            }
            # Released folders do not limit the pixels of a frame. Without an explicit choice, transformers
            # warns of this.
            processor_arguments |= {
                "do_sample_frames": True,
                "cap_pixels_per_frame": False,
            } | self.video_sampling
        prompt_text = apply_video_prompt(prompt_text, self.processor, self.spec)
        return self.processor(text=[prompt_text], return_tensors="pt", **processor_arguments)

    def _assistant_mask(self, token_ids: Tensor) -> Tensor:
        """bool [tokens]: the tokens after each assistant header up to and including its ``<|im_end|>``."""
        tokenizer = self.processor.tokenizer
        header_ids = torch.tensor(tokenizer("<|im_start|>assistant\n")["input_ids"])
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        assistant_mask = torch.zeros(len(token_ids), dtype=torch.bool)
        for start in range(len(token_ids) - len(header_ids)):
            if torch.equal(token_ids[start : start + len(header_ids)], header_ids):
                answer_start = start + len(header_ids)
                answer_end = answer_start + int((token_ids[answer_start:] == end).nonzero()[0]) + 1
                assistant_mask[answer_start:answer_end] = True
        return assistant_mask


def read_sharegpt_sample(
    sample: dict[str, Any], media_dir: Path
) -> tuple[list[dict[str, Any]], list[Any], list[tuple[Tensor, Any]]]:
    """The HF messages of a ShareGPT sample, its images (PIL), and its videos.

    A video is a pair of frames, uint8 [n, 3, h, w], and metadata.
    """
    from torchvision.transforms.v2.functional import to_pil_image

    file_names = {}
    for kind in ("image", "video"):
        file_names[kind] = [sample[kind]] if isinstance(sample.get(kind), str) else list(sample.get(kind, []))

    messages = []
    images = []
    videos = []

    for turn in sample["conversations"]:
        turn_content: list[dict[str, str]] = []
        for text_part in MEDIA_PLACEHOLDER.split(turn["value"]):
            if text_part == "<image>":
                turn_content.append({"type": "image"})
                image_bytes = (media_dir / file_names["image"].pop(0)).read_bytes()
                images.append(to_pil_image(decode_image(image_bytes)))
            elif text_part == "<video>":
                turn_content.append({"type": "video"})
                videos.append(_read_video(media_dir / file_names["video"].pop(0)))
            elif text_part:
                turn_content.append({"type": "text", "text": text_part})
        messages.append(
            {"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": turn_content}
        )

    return messages, images, videos


def _read_video(video_path: Path) -> tuple[Tensor, Any]:
    import av
    from transformers.video_utils import VideoMetadata

    with av.open(str(video_path)) as container:
        frame_rate = float(container.streams.video[0].average_rate or 0)
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    return torch.stack(frames).permute(0, 3, 1, 2), VideoMetadata(
        total_num_frames=len(frames), fps=frame_rate
    )
