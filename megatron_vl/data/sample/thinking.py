"""Which tokens of an answer are trained on if the chat template writes thinking, as Qwen3.5's does.

Such a template writes a block of thinking into each answer after the last question. Earlier answers have no
block:

    <|im_start|>assistant\\n<think>\\nREASONING\\n</think>\\n\\nANSWER<|im_end|>
    <|im_start|>assistant\\nANSWER<|im_end|>

An answer without thinking gets an empty block. An argument of the template may keep the blocks of earlier
answers (``preserve_thinking`` of Qwen3.6), which are then trained on too.

At inference, the prompt contains the opening of the block, and the model thinks; or it contains the whole
empty block. So the model predicts what follows the opening, or what follows the empty block. The text is
always what the template writes. Only the loss mask depends on the options:

* ``data.empty_think``: with ``masked``, the default, nothing of an empty block is trained on. With
  ``trained``, what follows its opening is trained on, so that a model that may think learns when not to.
* ``data.earlier_answers``: with ``trained``, the default, answers that the template writes without a block
  are trained on too. With ``masked``, only answers with a block are: those that a served model writes.

:func:`split_thinking` separates the block from the answer in generated text.
"""

from dataclasses import dataclass

from megatron_vl.config import DataConfig

THINK_TAG = "<think>"
THINK_OPENING = f"{THINK_TAG}\n"
THINK_CLOSING = "</think>"
EMPTY_THINK_BLOCK = "<think>\n\n</think>\n\n"
"""The block of an answer without thinking."""


def first_trained_character(turn_text: str, data_config: DataConfig) -> int | None:
    """The first character to train on of a turn without its header; None: there is none."""
    if turn_text.startswith(EMPTY_THINK_BLOCK):
        return len(EMPTY_THINK_BLOCK if data_config.empty_think == "masked" else THINK_OPENING)
    if turn_text.startswith(THINK_OPENING) and THINK_CLOSING in turn_text:
        return len(THINK_OPENING)
    return 0 if data_config.earlier_answers == "trained" else None


def has_thinking_switch(chat_template: str) -> bool:
    """Whether a request may switch thinking on and off."""
    return "enable_thinking" in chat_template


@dataclass(frozen=True)
class GeneratedAnswer:
    """The text that a model generated, split into answer and thinking."""

    answer_text: str
    """Empty if the model was still thinking at the end."""
    thinking_text: str | None = None
    """None if there is no block of thinking."""
    is_block_closed: bool = True
    """Whether the block, if there is one, was closed."""


def opens_thinking(rendered_prompt: str) -> bool:
    """Whether a rendered prompt ends within a block of thinking, so that the model begins by thinking."""
    return rendered_prompt.rstrip("\n").endswith(THINK_TAG)


def split_thinking(generated_text: str, is_block_opened: bool) -> GeneratedAnswer:
    """Separates the block of thinking from the answer in generated text.

    The answer is what follows the last ``</think>``, as chat templates and VLMEvalKit read it. If the block
    is not closed, there is no answer, because all of the text is thinking. An empty block counts as no
    thinking.

    Args:
        is_block_opened: whether the prompt has opened the block (:func:`opens_thinking`).
    """
    if not is_block_opened and not generated_text.lstrip().startswith(THINK_TAG):
        return GeneratedAnswer(generated_text)
    thinking_block, closing_tag, answer_text = generated_text.rpartition(THINK_CLOSING)
    thinking_text = thinking_block if closing_tag else generated_text
    thinking_text = thinking_text.strip().removeprefix(THINK_TAG).strip()
    if not closing_tag:
        return GeneratedAnswer("", thinking_text, is_block_closed=False)
    return GeneratedAnswer(answer_text.strip(), thinking_text or None)
