"""Computes the loss of a checkpoint in ``transformers``.

Conversations go through the checkpoint's own processor, starting from the raw JSON and media files. So if the
results agree with the trainer's, they confirm the data tool, the loader, the packing, the parallel model, the
checkpoint and the export together.
"""

import re
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from megatron_vl.spec.families import read_spec
from toolkit.common.hf_loading import (
    apply_video_prompt,
    follow_video_positions,
    load_hf_model,
    load_hf_processor,
)


class DemoReference:
    """A Hugging Face folder in ``transformers``, in float32 on CPU, with the released rules of videos."""

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
        text = self.processor.apply_chat_template(messages, tokenize=False)
        model_inputs = self.processor_batch(text, images, videos)
        token_ids = model_inputs["input_ids"]
        labels = torch.where(self._assistant_mask(token_ids[0]), token_ids, -100)
        count = int((labels[0, 1:] != -100).sum())
        return float(self.model(**model_inputs, labels=labels).loss) * count, count

    def processor_batch(self, prompt_text: str, images: list[Any], videos: list[tuple[Tensor, Any]]) -> Any:
        arguments: dict[str, Any] = {"images": images} if images else {}
        if videos:
            frames, metadata = zip(*videos, strict=True)
            arguments |= {"videos": list(frames), "video_metadata": list(metadata), "do_sample_frames": True}
            # Released folders do not limit the pixels of a frame; transformers warns without a choice.
            arguments |= {"cap_pixels_per_frame": False, **self.video_sampling}
        prompt_text = apply_video_prompt(prompt_text, self.processor, self.spec)
        return self.processor(text=[prompt_text], return_tensors="pt", **arguments)

    def _assistant_mask(self, token_ids: Tensor) -> Tensor:
        """bool [tokens]: the tokens after each assistant header up to and including its ``<|im_end|>``."""
        tokens, tokenizer = token_ids.tolist(), self.processor.tokenizer
        header = tokenizer("<|im_start|>assistant\n")["input_ids"]
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        mask = torch.zeros(len(tokens), dtype=torch.bool)
        for start in range(len(header), len(tokens)):
            if tokens[start - len(header) : start] == header:
                mask[start : tokens.index(end, start) + 1] = True
        return mask


def read_sharegpt_sample(
    sample: dict[str, Any], media_dir: Path
) -> tuple[list[dict[str, Any]], list[Any], list[tuple[Tensor, Any]]]:
    """HF messages of a ShareGPT sample, its images (PIL), and its videos (uint8 [n, 3, h, w], metadata)."""
    from transformers.video_utils import load_video

    names = {kind: sample.get(kind, []) for kind in ("image", "video")}
    paths = {kind: [media_dir / n for n in ([v] if isinstance(v, str) else v)] for kind, v in names.items()}
    messages = [
        {
            "role": "user" if turn["from"] == "human" else "assistant",
            "content": [
                {"type": part.strip("<>")}
                if part in ("<image>", "<video>")
                else {"type": "text", "text": part}
                for part in filter(None, re.split("(<image>|<video>)", turn["value"]))
            ],
        }
        for turn in sample["conversations"]
    ]
    videos = [load_video(str(path), backend="pyav") for path in paths["video"]]
    return (
        messages,
        [Image.open(path).convert("RGB") for path in paths["image"]],
        [(torch.from_numpy(frames).permute(0, 3, 1, 2), facts) for frames, facts in videos],
    )
