"""Turns conversations with media into samples and prompts with the loader's functions, without a data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_vl.config import DataConfig
from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample
from megatron_vl.data.sample.chat import ChatEncoder
from megatron_vl.data.sample.medium import decode_media_planes, inspect_medium, stored_media_grid
from megatron_vl.data.sample.pixel_settings import read_pixel_settings
from megatron_vl.data.sample.thinking import ThinkingRule, opens_thinking
from megatron_vl.spec.families import read_spec

PROMPT_TAIL_TOKENS = 32
"""More tokens than the header of an assistant's turn has, in any vocabulary."""


class SampleEncoder:
    """Encodes conversations for one Hugging Face folder.

    Args:
        hf_dir: folder of config, tokenizer, chat template and image processor.
        data_config: limits of images and videos that replace the folder's own, and what of thinking is
            trained on.

    Raises:
        FileNotFoundError, ChatError, PixelError, ConfigError: the folder is unusable.
    """

    def __init__(self, hf_dir: str | Path, data_config: DataConfig | None = None) -> None:
        self.spec = read_spec(hf_dir)
        self.pixel_settings = read_pixel_settings(hf_dir, data_config)
        self.data_config = data_config or DataConfig()
        thinking_rule = ThinkingRule.from_data_config(self.data_config)
        self.chat_encoder = ChatEncoder(hf_dir, self.spec, thinking_rule)

    def encode_sample(
        self,
        messages: Sequence[dict[str, Any]],
        media: Sequence[tuple[str, str, bytes]],
    ) -> TokenizedSample:
        """Encodes a conversation as it is trained on.

        Args:
            messages: HF messages; the parts ``{"type": "image"}`` and ``{"type": "video"}`` stand for
                ``media`` in order.
            media: (kind, name for messages, file content).

        Raises:
            UnusableError: a medium does not decode.
            ChatError: the text and its media disagree.
        """
        media_items = []
        for medium in media:
            media_items.append(self._encode_medium(*medium))
        media_grids = [item.grid_thw for item in media_items]
        token_ids, loss_mask = self.chat_encoder.encode(messages, media_grids)
        return TokenizedSample(token_ids, loss_mask, media_items)

    def encode_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        media: Sequence[tuple[str, str, bytes]],
        tools: Sequence[dict[str, Any]] = (),
        think: bool | None = None,
    ) -> TokenizedSample:
        """Encodes a conversation up to the header of the assistant's next turn, without loss.

        Args:
            think: as in :meth:`megatron_vl.data.sample.chat.ChatEncoder.encode_prompt`; the other arguments
                and the errors are those of :meth:`encode_sample`.
        """
        media_items = [self._encode_medium(*medium) for medium in media]
        media_grids = [item.grid_thw for item in media_items]
        token_ids = self.chat_encoder.encode_prompt(messages, media_grids, tools, think)
        return TokenizedSample(token_ids, token_ids.new_zeros(len(token_ids)).bool(), media_items)

    def begins_by_thinking(self, prompt_sample: TokenizedSample) -> bool:
        """Whether what is generated after ``encode_prompt`` begins within a block of thinking."""
        return opens_thinking(
            self.chat_encoder.tokenizer.decode(prompt_sample.token_ids[-PROMPT_TAIL_TOKENS:])
        )

    def _encode_medium(self, media_kind: str, media_name: str, file_content: bytes) -> MediaItem:
        media_info = inspect_medium(media_kind, media_name, file_content)
        media_record = media_info.loader_record(media_name)
        media_grid = stored_media_grid(media_record, self.pixel_settings)
        media_planes = decode_media_planes(media_record, file_content, media_grid, self.pixel_settings)
        return MediaItem(media_grid, media_planes)
