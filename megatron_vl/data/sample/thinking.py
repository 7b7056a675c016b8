"""What an assistant's turn teaches where the chat template writes thinking (``<think>``), as Qwen3.5's does.

Such a template writes a block of thinking into each answer after the last question, and leaves it out of the
answers before:

    <|im_start|>assistant\\n<think>\\nREASONING\\n</think>\\n\\nANSWER<|im_end|>
    <|im_start|>assistant\\nANSWER<|im_end|>

An answer without thinking gets an empty block. A request opens the block for the model, which then thinks, or
writes the whole empty block. So what the model has to predict begins after the opening, or after the empty
block. The text is always the template's own; only the loss mask depends on the options:

* ``data.empty_think``: ``masked``, the default, learns nothing from an empty block. ``learnt`` learns what
  follows its opening, so that a model that may think learns not to.
* ``data.earlier_answers``: ``learnt``, the default, also learns the answers that the template writes without
  a block. ``masked`` learns only those with one, which look as a served model writes them.

:func:`split_thinking` takes the block off what a model generates.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vl.config import DataConfig, LearntOrMasked

MARK = "<think>"
OPENING = f"{MARK}\n"
CLOSING = "</think>"
EMPTY = "<think>\n\n</think>\n\n"
"""The block of an answer without thinking."""


@dataclass(frozen=True)
class ThinkingRule:
    """Which tokens bear loss; the fields of the same names in :class:`megatron_vl.config.DataConfig`."""

    empty_think: LearntOrMasked = "masked"
    earlier_answers: LearntOrMasked = "learnt"

    @classmethod
    def of(cls, data: DataConfig) -> ThinkingRule:
        return cls(data.empty_think, data.earlier_answers)

    def first_learnt(self, turn: str) -> int | None:
        """Where in ``turn`` (without its header) the loss begins; None if nothing bears loss."""
        if turn.startswith(EMPTY):
            return len(EMPTY if self.empty_think == "masked" else OPENING)
        if turn.startswith(OPENING) and CLOSING in turn:
            return len(OPENING)
        return 0 if self.earlier_answers == "learnt" else None


def writes_thinking(template: str) -> bool:
    """Whether a chat template has rules for thinking."""
    return CLOSING in template


def switches_thinking(template: str) -> bool:
    """Whether a request may switch thinking on and off."""
    return "enable_thinking" in template


@dataclass(frozen=True)
class Said:
    """What a model generated, taken apart."""

    answer: str
    """Empty if the model was still thinking at the end."""
    thinking: str | None = None
    """None if there is no block of thinking."""
    closed: bool = True
    """Whether the block, if there is one, was closed."""


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends within a block of thinking, so that the model begins by thinking."""
    return prompt.rstrip("\n").endswith(MARK)


def split_thinking(generated: str, opened: bool) -> Said:
    """Takes the block of thinking off what a model generated.

    The answer is what follows the last ``</think>``, as chat templates and VLMEvalKit read it. A block that
    is not closed leaves no answer: what the model thinks is not what it says. An empty block is no thinking.

    Args:
        opened: whether the prompt has opened the block (:func:`opens_thinking`).
    """
    if not opened and not generated.lstrip().startswith(MARK):
        return Said(generated)
    block, closing, answer = generated.rpartition(CLOSING)
    thinking = (block if closing else generated).strip().removeprefix(MARK).strip()
    if not closing:
        return Said("", thinking, closed=False)
    return Said(answer.strip(), thinking or None)
