"""Finds the assistant's turns in a rendered conversation, and where its exchanges begin.

Released templates have no ``{% generation %}`` marks, so an answer is what changes when another one stands
there.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from megatron_vl.data.sample.conversation_checks import ChatError
from megatron_vl.data.sample.deadline import check_time
from megatron_vl.data.sample.thinking import EMPTY_THINK_BLOCK

TURNS_NOT_FOUND_TEXT = (
    "the assistant's turns cannot be found in what the chat template writes: it does not write the"
    " conversation turn by turn"
)

type AnswerPlace = tuple[int, int, int]
"""Start and end of an answer without its header, and the end of its turn, in characters."""


def find_answers(
    messages: Sequence[dict[str, Any]], rendered_text: str, render: Callable[[list[dict[str, Any]]], str]
) -> list[AnswerPlace]:
    """The place in ``rendered_text`` of each answer.

    Three renderings are enough for any number of turns. One has a mark in place of every answer, which gives
    the texts between answers. The other two have a mark in place of every second answer. Then each of the
    others lies between two marks, so that its length is known, whatever it contains.

    Args:
        render: renders a conversation with the chat template.

    Raises:
        ChatError: the template renders other turns differently when an answer changes.
    """
    if not (answers := [i for i, message in enumerate(messages) if message.get("role") == "assistant"]):
        return []
    mark = _unused_mark(rendered_text)

    # The text after the last answer shows how a turn ends. If other turns follow that answer, one more
    # answer is added at the end.
    closing = []
    if answers[-1] + 1 < len(messages):
        closing = [len(messages)]
        messages = [*messages, messages[answers[-1]]]

    def split_at_marks(chosen_answers: list[int]) -> list[str]:
        if not (marked := chosen_answers + closing):
            return [rendered_text]
        check_time()
        marked_messages = list(messages)
        for i in marked:
            is_text = isinstance(messages[i].get("content"), str | None)
            content = mark if is_text else [{"type": "text", "text": mark}]
            marked_messages[i] = {"role": "assistant", "content": content}
        texts = render(marked_messages).split(mark)
        if len(texts) != len(marked) + 1:
            raise ChatError(TURNS_NOT_FOUND_TEXT)
        return texts

    # Even answers are unmarked in the first of the alternating texts, odd ones in the second.
    texts_between = split_at_marks(answers)
    alternating = [split_at_marks(answers[1::2])]
    if len(answers) > 1:
        alternating.append(split_at_marks(answers[0::2]))
    return _place_answers(
        rendered_text, texts_between, [alternating[k % 2][(k + 1) // 2] for k in range(len(answers))]
    )


def _place_answers(rendered_text: str, texts_between: list[str], pieces: list[str]) -> list[AnswerPlace]:
    """What :func:`find_answers` returns, from the texts of marked conversations.

    Args:
        texts_between: the texts before, between and after answers. The last one is how a turn ends.
        pieces: for each answer, its header, the answer itself and the text after it.
    """
    turn_ending = texts_between[-1]
    places = []
    position = 0
    for piece, text_before, text_after in zip(pieces, texts_between, texts_between[1:], strict=False):
        header = text_before.removesuffix(EMPTY_THINK_BLOCK)
        start, end = position + len(header), position + len(piece) - len(text_after)
        if not (
            start <= end
            and piece.startswith(header)
            and piece.endswith(text_after)
            and text_after.startswith(turn_ending)
            and rendered_text.startswith(piece[: end - position], position)
        ):
            raise ChatError(TURNS_NOT_FOUND_TEXT)
        places.append((start, end, end + len(turn_ending)))
        position = end

    if not texts_between[len(pieces)].startswith(rendered_text[position:]) or not rendered_text.startswith(
        turn_ending, position
    ):
        raise ChatError(TURNS_NOT_FOUND_TEXT)
    return places


def _unused_mark(rendered_text: str) -> str:
    """A word that is not in the text, and does not arise where it is joined to other text."""
    return "answer" + "x" * (1 + max(map(len, re.findall("answer(x*)", rendered_text)), default=-1))


def find_exchanges(
    messages: Sequence[dict[str, Any]],
    rendered_text: str,
    places: Sequence[AnswerPlace],
    render: Callable[[list[dict[str, Any]]], str],
) -> list[int]:
    """The first character of each exchange (:mod:`megatron_vl.data.sample.parts`).

    Args:
        places: what :func:`find_answers` returns for the conversation.

    Returns:
        Nothing if there are fewer than two, if a later system turn holds for several, or if the text before
        the first one cannot be told apart.
    """
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    # An answer that another one, or a result of a tool, follows is not the last of its exchange.
    later_starts = [
        turn_end
        for i, (_, _, turn_end) in zip(answers[:-1], places, strict=False)
        if messages[i + 1].get("role") not in ("assistant", "tool")
    ]
    head_turns = list(itertools.takewhile(lambda message: message.get("role") == "system", messages))
    if not later_starts or any(message.get("role") == "system" for message in messages[len(head_turns) :]):
        return []
    mark = _unused_mark(rendered_text)
    exchange = [{"role": role, "content": mark} for role in ("user", "assistant")]
    try:
        texts = render([*head_turns, *exchange, *exchange]).split(mark)
    except ChatError:
        return []
    # Before the first question stand the head and a question's header, before the second one the end of an
    # answer and the same header, and after the last answer its end.
    question_header = texts[2].removeprefix(texts[4]) if len(texts) == 5 else mark
    head = texts[0].removesuffix(question_header)
    if head == texts[0] or not rendered_text.startswith(head):
        return []
    return [len(head), *later_starts]
