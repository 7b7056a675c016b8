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

from megatron_vl.spec.families import read_spec
from toolkit.hf import follow_video_positions, load_model, load_processor, video_text

PLACEHOLDER = re.compile(r"(<image>|<video>)")


class DemoReference:
    """A Hugging Face folder in ``transformers``, in float32 on CPU.

    Videos follow the released models' rules.
    """

    def __init__(self, folder: Path, *, video_fps: float, video_max_frames: int) -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.spec = read_spec(folder)
        self.processor = load_processor(folder)
        self.model = follow_video_positions(load_model(folder, torch.float32), self.spec)
        self.sampling = {"fps": video_fps, "max_frames": video_max_frames}

    @torch.no_grad()
    def loss(self, sample: dict[str, Any], media: Path) -> tuple[float, int]:
        """Returns the sum of the losses of a ShareGPT sample's assistant tokens, and their number."""
        messages, images, videos = read_sample(sample, media)
        batch = self._batch(self.processor.apply_chat_template(messages, tokenize=False), images, videos)
        labels = torch.where(self._learnt(batch["input_ids"][0]), batch["input_ids"], -100)
        count = int((labels[0, 1:] != -100).sum())
        return float(self.model(**batch, labels=labels).loss) * count, count

    @torch.no_grad()
    def answer(self, sample: dict[str, Any], media: Path, max_new_tokens: int = 64) -> str:
        """Generates the greedy answer to the first turn of a sample."""
        first, images, videos = read_sample(sample | {"conversations": sample["conversations"][:1]}, media)
        text = self.processor.apply_chat_template(first, tokenize=False, add_generation_prompt=True)
        batch = self._batch(text, images, videos)
        # Like released checkpoints, this one sets sampling and a repetition penalty in its generation_config.
        tokens = self.model.generate(
            **batch, do_sample=False, repetition_penalty=1.0, max_new_tokens=max_new_tokens
        )
        return self.processor.decode(tokens[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)

    def _batch(self, text: str, images: list[Any], videos: list[tuple[Tensor, Any]]) -> Any:
        extra: dict[str, Any] = {"images": images} if images else {}
        if videos:
            extra |= {
                "videos": [frames for frames, _ in videos],
                "video_metadata": [facts for _, facts in videos],
            }
            # Released folders do not limit the pixels of a frame. Without an explicit choice, transformers
            # warns of this.
            extra |= {"do_sample_frames": True, "cap_pixels_per_frame": False} | self.sampling
        text = video_text(text, self.processor, self.spec)
        return self.processor(text=[text], return_tensors="pt", **extra)

    def _learnt(self, ids: Tensor) -> Tensor:
        """bool [tokens]: the tokens after each assistant header up to and including its ``<|im_end|>``."""
        tokenizer = self.processor.tokenizer
        header = torch.tensor(tokenizer("<|im_start|>assistant\n")["input_ids"])
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        learnt = torch.zeros(len(ids), dtype=torch.bool)
        for start in range(len(ids) - len(header)):
            if torch.equal(ids[start : start + len(header)], header):
                begin = start + len(header)
                stop = begin + int((ids[begin:] == end).nonzero()[0]) + 1
                learnt[begin:stop] = True
        return learnt


def read_sample(
    sample: dict[str, Any], media: Path
) -> tuple[list[dict[str, Any]], list[Any], list[tuple[Tensor, Any]]]:
    """The HF messages of a ShareGPT sample, its images (PIL), and its videos.

    A video is a pair of frames, uint8 [n, 3, h, w], and metadata.
    """
    from PIL import Image

    names = {
        kind: [sample[kind]] if isinstance(sample.get(kind), str) else list(sample.get(kind, []))
        for kind in ("image", "video")
    }
    messages = []
    images = []
    videos = []

    for turn in sample["conversations"]:
        content: list[dict[str, str]] = []
        for part in PLACEHOLDER.split(turn["value"]):
            if part == "<image>":
                content.append({"type": "image"})
                images.append(Image.open(media / names["image"].pop(0)).convert("RGB"))
            elif part == "<video>":
                content.append({"type": "video"})
                videos.append(_read_video(media / names["video"].pop(0)))
            elif part:
                content.append({"type": "text", "text": part})
        messages.append({"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": content})

    return messages, images, videos


def _read_video(path: Path) -> tuple[Tensor, Any]:
    import av
    from transformers.video_utils import VideoMetadata

    with av.open(str(path)) as container:
        rate = float(container.streams.video[0].average_rate or 0)
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    return torch.stack(frames).permute(0, 3, 1, 2), VideoMetadata(total_num_frames=len(frames), fps=rate)
