"""Turns conversations with media into samples and prompts, with the loader's own functions but
no data set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_tools.media import inspect
from megatron_vl.config import DataConfig
from megatron_vl.data.loader import grid_of, planes_of
from megatron_vl.data.packing.assemble import MediaItem, Sample
from megatron_vl.data.sample.chat import ChatEncoder
from megatron_vl.data.sample.pixels import MAX_PIXELS, read_pixel_settings
from megatron_vl.data.sample.thinking import ThinkingRule, opens_thinking
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.positions import GridTHW

END_OF_PROMPT = 32
"""More tokens than the header of an assistant's turn has, in any vocabulary."""


class SampleEncoder:
    """Encodes conversations for one Hugging Face folder.

    Args:
        hf_dir: folder of config, tokenizer, chat template and image processor.
        data: limits of pictures and videos that replace the folder's own, the rule for text at videos, and
            what is learnt of thinking.

    Raises:
        FileNotFoundError, ChatError, PixelError, ConfigError: the folder is unusable.
    """

    def __init__(self, hf_dir: str | Path, data: DataConfig | None = None) -> None:
        self.spec = read_spec(hf_dir)
        self.settings = read_pixel_settings(hf_dir, data)
        data = data or DataConfig()
        self.chat = ChatEncoder(hf_dir, self.spec, data.video_prompt, ThinkingRule.of(data))

    def sample(
        self,
        messages: Sequence[dict[str, Any]],
        media: Sequence[tuple[str, str, bytes]],
        tools: Sequence[dict[str, Any]] = (),
    ) -> Sample:
        """Encodes a conversation as it is trained on.

        Args:
            messages: HF messages; the parts ``{"type": "image"}`` and ``{"type": "video"}`` stand for
                ``media`` in order.
            media: (kind, name for messages, file content).
            tools: the functions that the assistant may call.

        Raises:
            RecordError: a medium does not decode. ChatError: the text and its media disagree.
        """
        items = [self._item(*medium) for medium in media]
        token_ids, loss_mask = self.chat.encode(messages, [item.grid for item in items], tools)
        return Sample(token_ids, loss_mask, items)

    def prompt(
        self,
        messages: Sequence[dict[str, Any]],
        media: Sequence[tuple[str, str, bytes]],
        tools: Sequence[dict[str, Any]] = (),
        think: bool | None = None,
    ) -> Sample:
        """Encodes a conversation up to the header of the assistant's next turn, without loss.

        ``think`` is that of :meth:`ChatEncoder.encode_prompt`. Raises like :meth:`sample`."""
        items = [self._item(*medium) for medium in media]
        token_ids = self.chat.encode_prompt(messages, [item.grid for item in items], tools, think)
        return Sample(token_ids, token_ids.new_zeros(len(token_ids)).bool(), items)

    def begins_by_thinking(self, prompt: Sample) -> bool:
        """Whether what is generated after ``prompt`` begins within a block of thinking."""
        return opens_thinking(self.chat.tokenizer.decode(prompt.token_ids[-END_OF_PROMPT:]))

    def _item(self, kind: str, name: str, content: bytes) -> MediaItem:
        record = inspect(kind, name, content, MAX_PIXELS).record(name)
        grid = grid_of(record, self.settings)
        return MediaItem(grid, planes_of(record, content, grid, self.settings))


def write_samples(samples: Sequence[Sample], path: Path) -> None:
    """Writes samples as one safetensors file."""
    tensors: dict[str, Tensor] = {}
    grids: list[list[dict[str, Any]]] = []
    for i, sample in enumerate(samples):
        tensors |= {f"{i}.token_ids": sample.token_ids, f"{i}.loss_mask": sample.loss_mask}
        tensors |= {f"{i}.{j}.planes": item.planes.contiguous() for j, item in enumerate(sample.media)}
        grids.append([vars(item.grid) for item in sample.media])
    save_file(tensors, path, metadata={"grids": json.dumps(grids)})


def read_samples(path: Path) -> list[Sample]:
    """Reads what :func:`write_samples` wrote."""
    samples = []
    with safe_open(path, framework="pt") as file:
        for i, grids in enumerate(json.loads(file.metadata()["grids"])):
            media = [
                MediaItem(
                    GridTHW(**grid | {"timestamps": tuple(grid["timestamps"])}),
                    file.get_tensor(f"{i}.{j}.planes"),
                )
                for j, grid in enumerate(grids)
            ]
            samples.append(
                Sample(file.get_tensor(f"{i}.token_ids"), file.get_tensor(f"{i}.loss_mask"), media)
            )
    return samples
