"""Where a sample that is longer than a row is cut (``data.too_long``).

A document is cut between two tokens of its texts. A conversation is cut between two exchanges: an exchange is
a question with the answers that follow it, calls and results of tools included. Each part of a conversation
begins with what stands before the first question, which is the system turn and the tools, because they hold
for every answer. An exchange keeps the tokens and the loss that it has in the whole conversation. What has
boxes is not cut, because a part might lack their image; neither is a conversation with a system turn after
the start.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

type MediumSpan = tuple[int, int]
"""The first token of a medium and the one after its last, with the tokens around its placeholders."""
type ExchangeStart = tuple[int, int]
"""The first token of an exchange, and number of the sample's media before it."""


class SamplePart(NamedTuple):
    """A part of a sample: its head, and the tokens and media from a first one on."""

    start: int
    """Its first token after the head."""
    end: int
    """The token after its last one."""
    first_medium: int
    end_medium: int
    """The medium after its last one."""
    patches: int
    head_tokens: int = 0
    """Number of tokens at the beginning of the sample with which the part begins."""
    head_media: int = 0
    """Number of media in them."""

    @property
    def tokens(self) -> int:
        return self.head_tokens + self.end - self.start

    def fits(self, seq_len: int, max_patches: int) -> bool:
        return self.tokens <= seq_len and (not max_patches or self.patches <= max_patches)


def cut_document(
    num_tokens: int, spans: Sequence[MediumSpan], patch_counts: Sequence[int], seq_len: int, max_patches: int
) -> list[SamplePart]:
    """Cuts a document into consecutive parts, each as long as a row allows. A medium stays whole.

    Args:
        patch_counts: number of patches of each medium.
        max_patches: largest number of patches of a part; 0: no limit.

    Returns:
        The parts; none if a medium does not fit into a row.
    """
    parts = []
    start = medium = 0
    while start < num_tokens:
        end, first_medium, patches = min(start + seq_len, num_tokens), medium, 0
        while medium < len(spans) and spans[medium][1] <= end:
            if 0 < max_patches < patches + patch_counts[medium]:
                break
            patches += patch_counts[medium]
            medium += 1
        if medium < len(spans):  # the next part begins with it at the latest
            end = min(end, spans[medium][0])
        if end == start:
            return []
        parts.append(SamplePart(start, end, first_medium, medium, patches))
        start = end
    return parts


def cut_conversation(
    num_tokens: int,
    starts: Sequence[ExchangeStart],
    patch_counts: Sequence[int],
    seq_len: int,
    max_patches: int,
) -> list[SamplePart]:
    """Cuts a conversation into parts, each with as many successive exchanges as a row allows.

    Args:
        starts: where each exchange begins; none or one: it cannot be cut.
        patch_counts, max_patches: as for :func:`cut_document`.

    Returns:
        The parts; none if it cannot be cut, or if no part would fit. An exchange that does not fit into a row
        is a part of its own, which is too large.
    """
    if len(starts) < 2:
        return []
    head_tokens, head_media = starts[0]
    parts: list[SamplePart] = []
    for (start, first_medium), (end, end_medium) in pairwise([*starts, (num_tokens, len(patch_counts))]):
        patches = sum(patch_counts[first_medium:end_medium])
        if parts:
            last = parts[-1]
            longer = last._replace(end=end, end_medium=end_medium, patches=last.patches + patches)
            if longer.fits(seq_len, max_patches):
                parts[-1] = longer
                continue
        patches += sum(patch_counts[:head_media])
        parts.append(SamplePart(start, end, first_medium, end_medium, patches, head_tokens, head_media))
    return parts if any(part.fits(seq_len, max_patches) for part in parts) else []
