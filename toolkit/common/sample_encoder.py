"""Turns conversations with media into samples and prompts with the loader's functions, without a data set."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_vl.config import DataConfig
from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample
from megatron_vl.data.sample.chat import ChatEncoder
from megatron_vl.data.sample.documents import encode_document
from megatron_vl.data.sample.medium import decode_media_planes, inspect_medium, stored_media_grid
from megatron_vl.data.sample.pixel_settings import PixelSettings, read_pixel_settings
from megatron_vl.data.sample.thinking import opens_thinking
from megatron_vl.spec.families import read_spec


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
        self.chat_encoder = ChatEncoder(hf_dir, self.spec, self.data_config)

    def encode_sample(
        self, messages: Sequence[dict[str, Any]], media_items: list[MediaItem]
    ) -> TokenizedSample:
        """Encodes a conversation as it is trained on.

        Args:
            messages: HF messages; the parts ``{"type": "image"}`` and ``{"type": "video"}`` stand for
                ``media_items`` in order.

        Raises:
            ChatError: the text and its media disagree.
        """
        grids = [item.grid_thw for item in media_items]
        return TokenizedSample(*self.chat_encoder.encode(messages, grids), media_items)

    def encode_document(
        self, parts: Sequence[dict[str, Any]], media_items: list[MediaItem]
    ) -> TokenizedSample:
        """Encodes a document, whole, as it is trained on. Arguments and errors are those of
        :func:`~megatron_vl.data.sample.documents.encode_document`."""
        grids = [item.grid_thw for item in media_items]
        token_ids, loss_mask, _ = encode_document(self.chat_encoder, parts, grids)
        return TokenizedSample(token_ids, loss_mask, media_items)

    def encode_prompt(
        self, messages: Sequence[dict[str, Any]], media_items: list[MediaItem], think: bool | None = None
    ) -> TokenizedSample:
        """Encodes a conversation up to the header of the assistant's next turn, without loss.

        Args:
            think: as in :meth:`megatron_vl.data.sample.chat.ChatEncoder.encode_prompt`; the other arguments
                and the errors are those of :meth:`encode_sample`.
        """
        grids = [item.grid_thw for item in media_items]
        token_ids = self.chat_encoder.encode_prompt(messages, grids, (), think)
        return TokenizedSample(token_ids, torch.zeros(len(token_ids), dtype=torch.bool), media_items)

    def begins_by_thinking(self, prompt: TokenizedSample) -> bool:
        """Whether what is generated after ``encode_prompt`` begins within a block of thinking."""
        # The header of an assistant's turn has fewer tokens than 32, in any vocabulary.
        return opens_thinking(self.chat_encoder.tokenizer.decode(prompt.token_ids[-32:]))

    def encode_medium(
        self, kind: str, name: str, content: bytes, settings: PixelSettings | None = None
    ) -> MediaItem:
        """Decodes a file. Raises UnusableError, which names ``name``, if it is no such medium.

        Args:
            settings: settings in place of the encoder's.
        """
        settings = settings or self.pixel_settings
        record = inspect_medium(kind, name, content).loader_record(name)
        grid = stored_media_grid(record, settings)
        return MediaItem(grid, decode_media_planes(record, content, grid, settings))
