"""What must hold for the texts of a conversation, so that each is trained on as it was written.

Conversion and training call the same functions. :func:`find_lost_text` also needs the chat template, so that
it is called where a conversation is rendered: in ``data index`` and in training.

Control tokens in a text are refused rather than encoded as text. Serving engines do not escape them either:
the same text in a request would end the turn. Most often they are left over from a rendered conversation.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from megatron_vl.data.sample.thinking import THINK_CLOSING, THINK_TAG
from megatron_vl.system.errors import UserError

CONTROL_TOKEN = re.compile(r"<\|(?:im_start|im_end|endoftext|vision_start|vision_end|vision_pad)\|>")
"""Tokens that begin or end turns, documents and media. Those of boxes and of code may stand in a text; the
placeholders of images and videos have rules of their own."""
_MEDIA_PLACEHOLDER = re.compile(r"<\|(?:image|video)_pad\|>")
THINKING_TAGS = re.compile(f"({THINK_TAG}|{THINK_CLOSING})")


class ChatError(UserError, ValueError):
    """A conversation cannot be rendered, or its media do not match its text.

    Attributes:
        reason: the heading under which conversion counts it.
    """

    def __init__(self, message: str, reason: str = "text read otherwise") -> None:
        super().__init__(message)
        self.reason = reason


def iterate_texts(json_value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys included."""
    if isinstance(json_value, str):
        yield json_value
    elif isinstance(json_value, dict):
        for key, item in json_value.items():
            yield key
            yield from iterate_texts(item)
    elif isinstance(json_value, list | tuple):
        for item in json_value:
            yield from iterate_texts(item)


def control_token_text(control_token: str) -> str:
    return (
        f"the text has the control token {control_token}, which would begin or end a turn, a document or an"
        " image; remove it, or write it otherwise (for instance with a space)"
    )


def find_special_token(text: str) -> tuple[str, str] | None:
    """Why a text of a record is refused: reason and detail; None if it has no token with a meaning."""
    if _MEDIA_PLACEHOLDER.search(text):
        return "placeholder token in text", "the text holds a token that stands for image or video features"
    if control_token := CONTROL_TOKEN.search(text):
        return "control token in text", control_token_text(control_token[0])
    return None


def check_control_tokens(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> None:
    """Raises ChatError if a text has a control token, or reasoning has tags of thinking."""
    for text in iterate_texts([*messages, *tools]):
        if control_token := CONTROL_TOKEN.search(text):
            raise ChatError(control_token_text(control_token[0]), "control token in text")
    for message in messages:
        if thinking_tag := THINKING_TAGS.search(message.get("reasoning_content") or ""):
            raise ChatError(f"reasoning_content has the tag {thinking_tag[0]}; leave the tags out")


# --- Results and their calls --------------------------------------------------------------------------------


def order_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each turn's results in the order of its calls, without the ids that connect them.

    Results without ids, and results of calls without ids, stay in their order.

    Raises:
        ChatError: calls and results differ in number or ids, or a result with media would have to move.
    """
    ordered_messages: list[dict[str, Any]] = []
    call_ids: list[Any] = []
    for are_results, group in groupby(messages, lambda message: message.get("role") == "tool"):
        group_messages = list(group)
        if are_results:
            ordered_messages += _in_call_order(group_messages, call_ids)
            continue
        call_ids = [call.get("id") for call in group_messages[-1].get("tool_calls") or ()]
        for message in group_messages:
            if calls := message.get("tool_calls"):
                message = {**message, "tool_calls": [_without_key(call, "id") for call in calls]}
            ordered_messages.append(message)
    return ordered_messages


def _without_key(json_object: dict[str, Any], dropped_key: str) -> dict[str, Any]:
    return {key: value for key, value in json_object.items() if key != dropped_key}


def _in_call_order(results: list[dict[str, Any]], call_ids: list[Any]) -> list[dict[str, Any]]:
    result_ids = [result.get("tool_call_id") for result in results]
    if any(result_id is not None for result_id in result_ids):
        # Ids of results alone connect nothing, but there must be one for each call.
        expected_ids = call_ids if any(call_id is not None for call_id in call_ids) else result_ids
        result_names, expected_names = list(map(str, result_ids)), list(map(str, expected_ids))
        if (
            None in result_ids
            or len(call_ids) != len(results)
            or len(set(result_names)) != len(results)
            or set(result_names) != set(expected_names)
        ):
            raise ChatError(
                f"the calls have the ids {call_ids}, but their results {result_ids}; each call needs one"
                " result with its id (tool_call_id)",
                "results and calls differ",
            )
        ordered_results = [results[result_names.index(name)] for name in expected_names]
        if ordered_results != results and any(isinstance(result["content"], list) for result in results):
            raise ChatError(
                f"results with media are not in the order of their calls {call_ids}; write them in that"
                " order",
                "results and calls differ",
            )
        results = ordered_results
    elif len(results) != len(call_ids):
        raise ChatError(
            f"{len(call_ids)} calls have {len(results)} results; each call needs one result",
            "results and calls differ",
        )
    return [_without_key(result, "tool_call_id") for result in results]


# --- What a template leaves out -----------------------------------------------------------------------------


def find_lost_text(
    messages: Sequence[dict[str, Any]],
    rendered_text: str,
    answer_spans: Sequence[tuple[int, int]],
    template_reads_thinking: bool,
) -> str:
    """The first text that the template left out or reads as something else; empty if there is none.

    White space around a text does not count. A block of thinking may be left out of answers before the last
    question, which is how these models are served.

    Args:
        answer_spans: start and end of each assistant turn, without its header, in ``rendered_text``.
    """
    remaining_spans = iter(answer_spans)
    last_question = max((i for i, turn in enumerate(messages) if turn.get("role") == "user"), default=-1)
    position = 0
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            texts, turn_text = _content_texts(message), rendered_text[position:]
        else:
            start, position = next(remaining_spans)
            turn_text = rendered_text[start:position]
            texts = [*filter(None, [message.get("reasoning_content")]), *_content_texts(message)]
            is_read = template_reads_thinking and "reasoning_content" not in message
            if is_read and texts and (misread_text := _misread_thinking(texts[0])):
                return misread_text
            if i < last_question and not turn_text.startswith(THINK_TAG):
                texts = _without_thinking(message)
        lost_text, found_end = _find_in_order(texts, turn_text)
        if message.get("role") != "assistant":
            position += found_end
        if lost_text := lost_text or _find_lost_argument(message, turn_text):
            return lost_text
    return ""


def _content_texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def _misread_thinking(answer_text: str) -> str:
    """What a template takes for thinking although no block is written: the text before ``</think>``."""
    text_before, closing_tag, _ = answer_text.partition(THINK_CLOSING)
    text_before = text_before.rstrip(" \t")
    is_block = text_before.lstrip().startswith(THINK_TAG) or text_before.endswith("\n") or not text_before
    return text_before + closing_tag if closing_tag and not is_block else ""


def _without_thinking(message: dict[str, Any]) -> list[str]:
    """The texts of an answer without its reasoning, or the block of thinking that its content begins with."""
    texts = _content_texts(message)
    if texts and "reasoning_content" not in message and not _misread_thinking(texts[0]):
        block_text, closing_tag, answer_text = texts[0].partition(THINK_CLOSING)
        if closing_tag and THINK_TAG not in block_text.lstrip().removeprefix(THINK_TAG):
            texts[0] = answer_text
    return texts


def _find_in_order(texts: list[str], turn_text: str) -> tuple[str, int]:
    """The first of ``texts`` that ``turn_text`` does not have after those before it, and where they end.

    A template may write a block of thinking with other white space, so that its tags are texts of their own.
    """
    position = 0
    for piece in [piece.strip() for text in texts for piece in THINKING_TAGS.split(text)]:
        found = turn_text.find(piece, position)
        if found < 0:  # a value within a list or an object is written as JSON
            piece = json.dumps(piece, ensure_ascii=False)[1:-1]
            found = turn_text.find(piece, position)
        if found < 0:
            return piece, position
        position = found + len(piece)
    return "", position


def _find_lost_argument(message: dict[str, Any], turn_text: str) -> str:
    """A name, key or value of the message's calls that the turn does not have."""
    for call in message.get("tool_calls") or ():
        for text in iterate_texts([call["function"]["name"], call["function"].get("arguments")]):
            if lost_text := _find_in_order([text], turn_text)[0]:
                return lost_text
    return ""
