"""The one adapter through which every checkpoint is asked: one type, greedy, media as in training."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_vl.config import DataConfig
from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample
from megatron_vl.weights.trained_media import exported_media
from toolkit.generate.answers import THINK, Answerer, with_trained_media


class CheckpointModel:
    """A Hugging Face folder that answers VLMEvalKit's prompts.

    Args:
        settings: ``dtype``, ``max_new_tokens`` of an answer without and with thinking, ``thinking`` (``on``,
            ``off``; None or left out: as the chat template does).
        allowed_roots: folders from which images and videos may be read.
    """

    def __init__(self, hf_dir: Path, settings: Mapping[str, Any], allowed_roots: Sequence[Path]) -> None:
        self.allowed_roots = [root.resolve() for root in allowed_roots]
        self.think = THINK[settings.get("thinking")]
        # A released folder takes the frames of its own processor; an exported one what it was trained with.
        data_config = DataConfig() if exported_media(hf_dir) else DataConfig(video_max_frames=768)
        self.answerer = Answerer(
            hf_dir,
            with_trained_media(data_config, hf_dir),
            tuple(settings["max_new_tokens"]),
            getattr(torch, settings["dtype"]),
        )

    def encode(self, prompt: Sequence[Mapping[str, Any]]) -> TokenizedSample:
        """The prompt in the checkpoint's chat template, with its media.

        Args:
            prompt: one turn's parts in order, each ``{"type": "image" | "video" | "text", "value": path or
                text}`` (a video may give its number of frames, ``nframes``, or frames per second, ``fps``);
                or the turns of a dialogue up to one of the user's, each ``{"role": "user" | "assistant",
                "content": parts, or a text}``.
        """
        media_items: list[MediaItem] = []
        messages = [
            {"role": role, "content": [self._chat_part(part, media_items) for part in parts]}
            for role, parts in prompt_turns(prompt)
        ]
        return self.answerer.encoder.encode_prompt(messages, media_items, self.think)

    def _chat_part(self, part: Mapping[str, Any], media_items: list[MediaItem]) -> dict[str, str]:
        if part["type"] == "text":
            return {"type": "text", "text": str(part["value"])}
        if part["type"] not in ("image", "video") or not isinstance(part["value"], str):
            raise ValueError(
                f"a prompt holds {part['type']!r}; these models take text, and images and videos from files"
            )
        path = Path(part["value"])
        if not any(path.resolve().is_relative_to(root) for root in self.allowed_roots):
            raise ValueError(f"{path} is not inside the folder of the data set")
        # A video may have a number or rate of frames of its own, under the other settings of the checkpoint.
        encoder = self.answerer.encoder
        settings = encoder.pixel_settings
        if part.get("nframes"):
            count = int(part["nframes"])
            settings = dataclasses.replace(settings, video_min_frames=count, video_max_frames=count)
        elif part.get("fps"):
            settings = dataclasses.replace(settings, video_fps=float(part["fps"]))
        media_items.append(encoder.encode_medium(part["type"], str(path), path.read_bytes(), settings))
        return {"type": part["type"]}


def prompt_turns(prompt: Sequence[Mapping[str, Any]]) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
    """(role, parts) of each turn. The last turn is the user's."""
    if "content" not in prompt[0]:  # a part may have a role too
        return [("user", prompt)]
    contents = ((turn["role"], turn["content"]) for turn in prompt)
    return [(role, [{"type": "text", "value": c}] if isinstance(c, str) else c) for role, c in contents]
