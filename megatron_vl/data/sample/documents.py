"""Documents: how they become tokens.

A document is a list of texts and media in their order, without a chat template. It begins with its first
text or medium, and ends with ``<|endoftext|>``. Media are written as in a conversation. All tokens of texts
and the end token are trained on, and none of media: neither placeholders, nor the tokens around them, nor
timestamps. ``docs/pretraining-data.md`` names the sources.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vl.data.sample.chat import ChatEncoder, starts_and_ends
from megatron_vl.data.sample.conversation_checks import ChatError, check_control_tokens
from megatron_vl.data.sample.parts import MediumSpan
from megatron_vl.spec.positions import GridTHW

END_TOKEN = "<|endoftext|>"


def encode_document(
    encoder: ChatEncoder, parts: Sequence[dict[str, Any]], grids: Sequence[GridTHW]
) -> tuple[Tensor, Tensor, list[MediumSpan]]:
    """Tokenizes a document.

    Args:
        parts: texts (``{"type": "text", "text": ...}``) and media (type image or video) in their order.
        grids: the media in that order.

    Returns:
        Token ids, int64 [n], with expanded placeholders; the loss mask, bool [n], not shifted; and the span
        of each medium in these tokens.

    Raises:
        ChatError: the parts do not match the media, a text has a control token, or the tokenizer no end.
    """
    # Neighbouring texts are read as one, in which pieces of a token could meet.
    check_control_tokens(
        [{"content": "".join(part["text"] if part["type"] == "text" else "\n" for part in parts)}], ()
    )
    if [part["type"] for part in parts if part["type"] != "text"] != [grid.kind for grid in grids]:
        raise ChatError("the media of the document are not those that it names")
    if encoder.tokenizer.backend_tokenizer.token_to_id(END_TOKEN) is None:
        raise ChatError(f"the tokenizer has no {END_TOKEN}, which ends documents")

    text, next_grid, character_spans = "", iter(grids), list[tuple[int, int]]()
    for part in parts:
        start = len(text)
        text += part["text"] if part["type"] == "text" else encoder.medium_text(next(next_grid))
        if part["type"] != "text":
            character_spans.append((start, len(text)))
    encoded_text = encoder.tokenizer.backend_tokenizer.encode(text + END_TOKEN)
    token_ids = np.array(encoded_text.ids, dtype=np.int64)
    starts, ends = starts_and_ends(encoded_text.offsets)

    # A character before a timestamp may share a token with it, which is then the medium's.
    first_tokens = np.searchsorted(ends, [start for start, _ in character_spans], side="right")
    end_tokens = np.searchsorted(starts, [end for _, end in character_spans], side="left")
    repeats = encoder.repeat_counts(token_ids, grids)
    new_positions = np.append(0, repeats.cumsum())
    spans = list(zip(new_positions[first_tokens].tolist(), new_positions[end_tokens].tolist(), strict=True))
    loss_mask = np.ones(len(token_ids), dtype=bool)
    for first, end in zip(first_tokens, end_tokens, strict=True):
        loss_mask[first:end] = False
    loss_mask[0] = False  # nothing predicts it
    return torch.from_numpy(token_ids.repeat(repeats)), torch.from_numpy(loss_mask.repeat(repeats)), spans
