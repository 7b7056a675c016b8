"""Turns a conversation into tokens and a loss mask with the checkpoint's own tokenizer and chat template.

``apply_chat_template`` renders the text (in transformers' sandbox), and the whole text is tokenized at once.
The placeholders of images and videos are repeated as ``Qwen2VLProcessor`` repeats them.

In a family that writes timestamps into the text (Qwen3-VL), each frame group of a video becomes
``<1.5 seconds><|vision_start|>...<|vision_end|>``. The template also writes a ``<|vision_start|>`` and a
``<|vision_end|>`` around the whole video, which are removed. So does the processor that Qwen added to
transformers for the release (4.57, which the model's README and fine-tuning code require), and so did Qwen's
code in vLLM. The processors of transformers have kept them since 5.10, and so does vLLM with 5.10 or later
(its issue 46817).

The loss mask covers the content of each assistant turn and the token that ends the turn, but neither its
header nor the newline after it. Released templates have no ``{% generation %}`` marks, so an answer is what
changes when another one stands there (:meth:`ChatEncoder.assistant_spans`). A token that begins in the header
is not learnt, because the model never has to predict it (this happens if the content starts with a newline,
which merges with the header). Placeholders of media inside an assistant turn, and the text of a video there,
are not learnt because the assistant did not write them. A turn with the weight 0 is not learnt; the weights
of others multiply the losses of their tokens. :mod:`.thinking` says what is learnt where the template writes
thinking.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vl.data.sample.conversation_checks import (
    ChatError,
    check_control_tokens,
    find_lost_text,
    order_results,
)
from megatron_vl.data.sample.deadline import NO_DEADLINE, SampleDeadline
from megatron_vl.data.sample.thinking import (
    EMPTY_THINK_BLOCK,
    ThinkingRule,
    has_thinking_switch,
    template_has_thinking,
)
from megatron_vl.data.sample.tokenizer import (
    check_embedding_rows,
    compute_tokenizer_digest,
    load_tokenizer,
)
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.families.hf_folder import chat_template_note, read_chat_template
from megatron_vl.spec.positions import GridTHW, placeholder_runs
from megatron_vl.system.errors import is_machine_fault

PROBE_FUNCTION = "look_up_the_weather"
PROBE_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": PROBE_FUNCTION, "arguments": {"city": "Oslo"}}}
        ],
    },
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]
"""A conversation that shows whether a template writes tool calls."""

TURNS_NOT_FOUND_TEXT = (
    "the assistant's turns cannot be found in what the chat template writes: it does not write the"
    " conversation turn by turn"
)


class ChatTemplateError(ChatError):
    """The checkpoint's chat template leaves out a part of the conversation. Only another template helps."""


class ChatEncoder:
    """Tokenizes conversations for one checkpoint.

    Args:
        hf_dir: folder with the tokenizer and the chat template.
        spec: the model (its placeholder tokens and merge size).
        thinking_rule: what is learnt, for chat templates that write thinking.

    Raises:
        FileNotFoundError: the folder has no tokenizer or no chat template.
        ChatError: the tokenizer does not know the model's placeholder tokens, or has tokens without a row in
            the embedding.
    """

    def __init__(
        self,
        hf_dir: str | Path,
        spec: ModelSpec,
        thinking_rule: ThinkingRule | None = None,
    ) -> None:
        self.spec = spec
        self.thinking_rule = thinking_rule or ThinkingRule()
        self._hf_dir = Path(hf_dir)
        self.tokenizer, self.serving_note = load_tokenizer(hf_dir)
        # transformers calls this one too, and makes lists of masks and types around it that nobody needs.
        self._fast_tokenizer = self.tokenizer.backend_tokenizer
        check_embedding_rows(self._fast_tokenizer, spec.language.vocab_size, hf_dir)
        added_tokens = self._fast_tokenizer.get_added_tokens_decoder()
        self._space_eating_ids = [token_id for token_id, token in added_tokens.items() if token.rstrip]
        """Added tokens that take the white space after them, as their ``rstrip`` says."""
        self.chat_template = read_chat_template(hf_dir)
        self.template_writes_thinking = template_has_thinking(self.chat_template)
        placeholder_ids = (spec.image_token_id, spec.video_token_id)
        if max(placeholder_ids) >= len(self.tokenizer):
            raise ChatError(
                f"{hf_dir}: the tokenizer has {len(self.tokenizer)} tokens; the config's placeholders are"
                f" {placeholder_ids}"
            )
        self.image_token, self.video_token = self.tokenizer.convert_ids_to_tokens(list(placeholder_ids))
        self._placeholder_pattern = re.compile("|".join(map(re.escape, (self.image_token, self.video_token))))

        vision_markers = self.tokenizer.convert_ids_to_tokens(
            [spec.vision_start_token_id, spec.vision_end_token_id]
        )
        self._frame_group_text = f"{vision_markers[0]}{self.video_token}{vision_markers[1]}"
        # Frame groups replace the video with the pair around it, if it has one, or else the placeholder.
        self._replaced_pattern = re.compile(
            "|".join(map(re.escape, (self._frame_group_text, self.image_token, self.video_token)))
        )

        self._timestamp_token_counts: dict[str, int] = {}

        pad_token = self.tokenizer.pad_token_id
        self.pad_token_id: int | None = (
            pad_token if pad_token is not None and pad_token < spec.language.vocab_size else None
        )

    def start_notes(self) -> list[str]:
        """Notes on what a server of this folder would do otherwise than training."""
        notes = [note] if (note := chat_template_note(self._hf_dir)) else []
        try:
            turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
            token_ids, loss_mask = self.encode(turns, [])
            end_token = int(token_ids[loss_mask.nonzero()[-1]])
            stop_tokens = read_stop_tokens(self._hf_dir, self.tokenizer)
        except (ChatError, IndexError):
            return notes  # the template refuses this conversation, or its answer is not trained on
        if end_token not in stop_tokens:
            name, *stops = self.tokenizer.convert_ids_to_tokens([end_token, *stop_tokens])
            notes.append(
                f"{self._hf_dir}: answers end with {name!r} (id {end_token}), but generation stops only at"
                f" {', '.join(map(repr, stops))}, so it continues after an answer; add {end_token} to"
                " eos_token_id in generation_config.json"
            )
        return notes

    def tokenizer_digest(self) -> str:
        """Identifies what turns text into tokens: :func:`compute_tokenizer_digest` of the tokenizer."""
        return compute_tokenizer_digest(self._fast_tokenizer)

    def render_conversation(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        enable_thinking: bool | None = None,
    ) -> str:
        """The conversation as the checkpoint's template renders it, with one placeholder for each medium.

        Args:
            messages, tools: as for :meth:`encode`.
            generation_prompt: whether the header of the assistant's next turn follows.
            enable_thinking: the template's variable of this name; None leaves it undefined.

        Raises:
            ChatError: the template refuses the conversation.
        """
        template_arguments = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **template_arguments,
            )
        except Exception as error:  # jinja errors, and whatever a template raises
            if is_machine_fault(error):
                raise
            raise ChatError(
                f"the chat template refuses the conversation ({type(error).__name__}: {error})"
            ) from error

    def assistant_spans(
        self,
        messages: Sequence[dict[str, Any]],
        rendered_text: str,
        tools: Sequence[dict[str, Any]] = (),
        deadline: SampleDeadline = NO_DEADLINE,
    ) -> list[tuple[int, int]]:
        """The part of each assistant turn that is learnt: its start and end in ``rendered_text``.

        Args:
            rendered_text: the conversation ``messages`` as :meth:`render_conversation` renders it.

        Raises:
            ChatError: the template renders other turns differently when an answer changes.
            SampleTimeoutError: the deadline has passed.
        """
        return self._learnt_spans(rendered_text, self._find_answers(messages, rendered_text, tools, deadline))

    def _learnt_spans(
        self, rendered_text: str, answer_places: Sequence[tuple[int, int, int]]
    ) -> list[tuple[int, int]]:
        learnt_spans = []
        for answer_start, answer_end, turn_end in answer_places:
            first_learnt: int | None = 0
            if self.template_writes_thinking:
                answer_text = rendered_text[answer_start:answer_end]
                first_learnt = self.thinking_rule.first_learnt_character(answer_text)

            if first_learnt is None:  # nothing of the turn is learnt
                learnt_spans.append((answer_end, answer_end))
                continue
            # The token that ends the turn is learnt, the newline after it is not.
            turn_length = len(rendered_text[answer_start:turn_end].rstrip())
            learnt_spans.append((answer_start + first_learnt, answer_start + turn_length))
        return learnt_spans

    def _find_answers(
        self,
        messages: Sequence[dict[str, Any]],
        rendered_text: str,
        tools: Sequence[dict[str, Any]],
        deadline: SampleDeadline,
    ) -> list[tuple[int, int, int]]:
        """Start and end in ``rendered_text`` of each answer, without its header, and the end of its turn.

        Three renderings are enough for any number of turns. One has a mark in place of every answer, which
        gives the texts between answers. The other two have a mark in place of every second answer. Then each
        of the others lies between two marks, so that its length is known, whatever it contains.
        """
        answer_indices = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not answer_indices:
            return []
        mark_word = _absent_word(rendered_text)

        # The text after the last answer shows how a turn ends. If other turns follow that answer, one more
        # answer is added at the end.
        closing_indices: list[int] = []
        if answer_indices[-1] + 1 < len(messages):
            closing_indices = [len(messages)]
            messages = [*messages, messages[answer_indices[-1]]]

        def split_at_marks(chosen_answers: list[int]) -> list[str]:
            marked_indices = chosen_answers + closing_indices
            if not marked_indices:
                return [rendered_text]
            deadline.check_time()
            marked_messages = list(messages)
            for i in marked_indices:
                marked_messages[i] = _answer_with_content(messages[i], mark_word)
            split_texts = self.render_conversation(marked_messages, tools=tools).split(mark_word)
            if len(split_texts) != len(marked_indices) + 1:
                raise ChatError(TURNS_NOT_FOUND_TEXT)
            return split_texts

        # Even answers are unmarked in the first of the alternating texts, odd ones in the second.
        texts_between_marks = split_at_marks(answer_indices)
        alternating_texts = [split_at_marks(answer_indices[1::2])]
        if len(answer_indices) > 1:
            alternating_texts.append(split_at_marks(answer_indices[0::2]))
        answer_pieces = []
        for k in range(len(answer_indices)):
            answer_pieces.append(alternating_texts[k % 2][(k + 1) // 2])
        return _place_answers(rendered_text, texts_between_marks, answer_pieces)

    def encode(
        self,
        messages: Sequence[dict[str, Any]],
        media_grids: Sequence[GridTHW],
        tools: Sequence[dict[str, Any]] = (),
        deadline: SampleDeadline = NO_DEADLINE,
    ) -> tuple[Tensor, Tensor]:
        """Tokenizes a conversation.

        Args:
            messages: HF messages: ``role`` and ``content`` (a string, or parts of type text, image, video);
                also ``reasoning_content``, ``tool_calls`` and ``loss_weight`` in the assistant's.
            media_grids: the media in the order of the text.
            tools: the functions that the assistant may call.
            deadline: checked between the steps.

        Returns:
            Token ids, int64 [n], with expanded placeholders, and the loss mask [n], not shifted. The mask is
            bool. If a turn has a ``loss_weight``, it is float32 and holds the weights.

        Raises:
            ChatError: the placeholders in the text do not match the media, or the template does not write
                tools, calls or reasoning that the conversation has.
            SampleTimeoutError: the deadline has passed.
        """
        turn_weights = []
        for message in messages:
            if message.get("role") == "assistant":
                turn_weights.append(message.get("loss_weight", 1.0))

        messages = self._checked_messages(messages, tools)
        rendered_text = self.render_conversation(messages, tools=tools)
        self._check_placeholders(rendered_text, media_grids)

        # Turns are found before timestamps change the text.
        answer_places = self._find_answers(messages, rendered_text, tools, deadline)
        lost_text = find_lost_text(
            messages,
            rendered_text,
            [(answer_start, answer_end) for answer_start, answer_end, _ in answer_places],
            self.template_writes_thinking,
        )
        if lost_text:
            raise ChatError(
                f"the chat template leaves out a text or reads it as thinking: {lost_text[:80]!r}; write"
                " reasoning as one block (<think>...</think>) before the answer, or as reasoning_content"
            )
        learnt_spans = self._learnt_spans(rendered_text, answer_places)
        rendered_text, learnt_spans, timestamp_spans = self._insert_timestamps(
            rendered_text, learnt_spans, media_grids
        )

        deadline.check_time()
        encoded_text = self._fast_tokenizer.encode(rendered_text)
        # NumPy, because an operation on so few numbers costs three times as much in torch.
        token_ids = np.array(encoded_text.ids, dtype=np.int64)
        loss_mask = self._loss_mask(
            token_ids, encoded_text.offsets, learnt_spans, timestamp_spans, turn_weights
        )

        # Placeholders are expanded as ids, which is much cheaper than to tokenize the expanded text.
        repeat_counts = self._repeat_counts(token_ids, media_grids)
        expanded_ids = torch.from_numpy(token_ids.repeat(repeat_counts))
        return expanded_ids, torch.from_numpy(loss_mask.repeat(repeat_counts))

    def encode_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        media_grids: Sequence[GridTHW],
        tools: Sequence[dict[str, Any]] = (),
        enable_thinking: bool | None = None,
    ) -> Tensor:
        """Token ids int64 [n] with expanded placeholders, up to the header of the assistant's next turn.

        Arguments and errors are those of :meth:`encode` and :meth:`render_conversation`. It is also an error
        to set ``enable_thinking`` if the template has no switch for it.
        """
        messages = self._checked_messages(messages, tools)
        if enable_thinking is not None and not has_thinking_switch(self.chat_template):
            raise ChatError(
                "the checkpoint's chat template does not let a request switch thinking on or off"
                " (enable_thinking); leave out --thinking"
            )
        rendered_text = self.render_conversation(
            messages, generation_prompt=True, tools=tools, enable_thinking=enable_thinking
        )
        self._check_placeholders(rendered_text, media_grids)
        rendered_text, _, _ = self._insert_timestamps(rendered_text, [], media_grids)
        token_ids = np.array(self._fast_tokenizer.encode(rendered_text).ids, dtype=np.int64)
        return torch.from_numpy(token_ids.repeat(self._repeat_counts(token_ids, media_grids)))

    def media_token_count(self, media_grid: GridTHW) -> int:
        """Number of a medium's tokens: placeholders, and timestamps if the family writes them.

        The other tokens of a conversation are the same for media of any size.
        """
        token_count = media_grid.num_tokens(self.spec.vision.spatial_merge_size)
        if media_grid.kind == "video" and self.spec.vision.video_timestamps:
            # A timestamp begins with "<". What stands before may merge with that, but not with its digits.
            # The two markers around a frame group come on top.
            for time in media_grid.timestamps:
                token_count += self._timestamp_token_count(f"{time:.1f}") + 2
        return token_count

    def _timestamp_token_count(self, seconds_text: str) -> int:
        """Number of tokens of a timestamp. The counts are stored, because videos share most timestamps."""
        if seconds_text not in self._timestamp_token_counts:
            text = f"<{seconds_text} seconds>"
            self._timestamp_token_counts[seconds_text] = len(
                self._fast_tokenizer.encode(text, add_special_tokens=False).ids
            )
        return self._timestamp_token_counts[seconds_text]

    def _is_media(self, token_ids: np.ndarray) -> np.ndarray:
        return (token_ids == self.spec.image_token_id) | (token_ids == self.spec.video_token_id)

    def _loss_mask(
        self,
        token_ids: np.ndarray,
        token_spans: Sequence[tuple[int, int]],
        learnt_spans: Sequence[tuple[int, int]],
        timestamp_spans: Sequence[tuple[int, int]],
        turn_weights: Sequence[float],
    ) -> np.ndarray:
        """The loss mask of tokens before placeholders are expanded, [n], as :meth:`encode` returns it.

        Args:
            token_spans, learnt_spans, timestamp_spans: start and end in characters of each token, of what is
                learnt of each assistant turn, and of each video's text.
            turn_weights: the ``loss_weight`` of each assistant turn.
        """
        token_starts, token_ends = np.array(token_spans, dtype=np.int64).reshape(-1, 2).T
        # Tokens without characters and the media's own tokens are not text that the assistant wrote.
        is_written = ~self._is_media(token_ids) & (token_ends > token_starts)
        is_written &= ~_overlaps_spans(token_starts, token_ends, timestamp_spans)

        # The token that ends a turn may have taken the newline after it.
        written_ends = np.where(np.isin(token_ids, self._space_eating_ids), token_starts + 1, token_ends)
        turn_of_token = _span_index_of_tokens(token_starts, written_ends, learnt_spans)
        loss_mask = is_written & (turn_of_token >= 0)
        if set(turn_weights) <= {1.0}:
            return loss_mask
        return np.where(loss_mask, np.array(turn_weights, np.float32)[turn_of_token], np.float32(0))

    def _repeat_counts(self, token_ids: np.ndarray, media_grids: Sequence[GridTHW]) -> np.ndarray:
        """How often to repeat each token, int64 [n]: a placeholder once for each merge unit of its medium.

        Repeated ids equal the ids of the repeated text, because special tokens are split off before merging.
        """
        repeat_counts = np.ones(len(token_ids), dtype=np.int64)
        merge_size = self.spec.vision.spatial_merge_size
        run_grids = placeholder_runs(media_grids, self.spec)
        repeat_counts[self._is_media(token_ids)] = [grid.num_tokens(merge_size) for grid in run_grids]
        return repeat_counts

    def _insert_timestamps(
        self, rendered_text: str, learnt_spans: list[tuple[int, int]], media_grids: Sequence[GridTHW]
    ) -> tuple[str, list[tuple[int, int]], list[tuple[int, int]]]:
        """Replaces each video by one placeholder with a timestamp for each of its frame groups.

        For families without timestamps, the text does not change.

        Returns:
            The new text, ``learnt_spans`` in the new text, and the spans of the inserted texts.
        """
        if not self.spec.vision.video_timestamps:
            return rendered_text, learnt_spans, []

        text_parts, inserted_spans = [], []
        # Where in the old text a video ends, and by how much the text after it moves.
        video_ends, length_changes = [], []
        handled_length = new_length = 0  # characters of the old text that were handled, and of the new text
        for placeholder_match, media_grid in zip(
            self._replaced_pattern.finditer(rendered_text), media_grids, strict=True
        ):
            if media_grid.kind != "video":
                continue
            if len(media_grid.timestamps) != media_grid.t:
                raise ChatError(
                    f"a video of {media_grid.t} frame groups has {len(media_grid.timestamps)} timestamps"
                )
            timestamp_text = "".join(
                f"<{time:.1f} seconds>{self._frame_group_text}" for time in media_grid.timestamps
            )
            text_parts += [rendered_text[handled_length : placeholder_match.start()], timestamp_text]
            inserted_start = new_length + placeholder_match.start() - handled_length
            inserted_spans.append((inserted_start, inserted_start + len(timestamp_text)))
            video_ends.append(placeholder_match.end())
            length_changes.append(len(timestamp_text) - len(placeholder_match.group()))
            handled_length = placeholder_match.end()
            new_length = inserted_start + len(timestamp_text)

        cumulative_shifts = list(accumulate(length_changes, initial=0))

        def new_position(old_position: int) -> int:
            return old_position + cumulative_shifts[bisect_right(video_ends, old_position)]

        new_spans = [(new_position(start), new_position(end)) for start, end in learnt_spans]
        return "".join([*text_parts, rendered_text[handled_length:]]), new_spans, inserted_spans

    def _checked_messages(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The messages for the template, which might write loss weights and ids."""
        messages = order_results(_without_loss_weights(messages))
        check_control_tokens(messages, tools)
        self._check_template_features(messages, tools)
        return messages

    def _check_template_features(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> None:
        """Raises ChatTemplateError if the template would silently leave out a part of the conversation."""
        has_tool_calls = any(
            message.get("tool_calls") or message.get("role") == "tool" for message in messages
        )
        has_reasoning = any(message.get("reasoning_content") for message in messages)
        missing_feature = ""
        if tools and not self._writes_tools:
            missing_feature = "tools"
        elif has_tool_calls and not self._writes_calls:
            missing_feature = "tool calls"
        elif has_reasoning and "reasoning_content" not in self.chat_template:
            missing_feature = "reasoning_content"
        if missing_feature:
            raise ChatTemplateError(f"the checkpoint's chat template does not write {missing_feature}")

    @cached_property
    def _writes_tools(self) -> bool:
        function = {
            "name": PROBE_FUNCTION,
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        }
        return self._template_shows_probe([PROBE_TURNS[0]], [{"type": "function", "function": function}])

    @cached_property
    def _writes_calls(self) -> bool:
        return self._template_shows_probe(PROBE_TURNS, ())

    def _template_shows_probe(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> bool:
        """Whether the template writes the name of the probe's function."""
        try:
            return PROBE_FUNCTION in self.render_conversation(messages, tools=tools)
        except ChatError:
            return False

    def _check_placeholders(self, rendered_text: str, media_grids: Sequence[GridTHW]) -> None:
        placeholders = self._placeholder_pattern.findall(rendered_text)
        written_kinds = ["image" if token == self.image_token else "video" for token in placeholders]
        given_kinds: list[str] = [grid.kind for grid in media_grids]
        if written_kinds != given_kinds:
            raise ChatError(
                f"the text has placeholders for {_list_kinds(written_kinds)}; the conversation has"
                f" {_list_kinds(given_kinds)}"
            )


def _without_loss_weights(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    unweighted_messages = [dict(message) for message in messages]
    for message in unweighted_messages:
        message.pop("loss_weight", None)
    return unweighted_messages


def _span_index_of_tokens(
    token_starts: np.ndarray, token_ends: np.ndarray, spans: Sequence[tuple[int, int]]
) -> np.ndarray:
    """The number of the span that holds each token, int64 [n]; -1: none.

    Args:
        token_starts, token_ends: [n], first character of each token and the one after its last.
        spans: start and end of each span in characters. They are in order and do not overlap.
    """
    span_starts, span_ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    span_indices = np.searchsorted(span_starts, token_starts, side="right") - 1
    is_inside = (span_indices >= 0) & (token_ends <= np.append(span_ends, -1)[span_indices])
    return np.where(is_inside, span_indices, -1)


def _overlaps_spans(
    token_starts: np.ndarray, token_ends: np.ndarray, spans: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Whether each token has characters of a span, bool [n]. The arguments are those of
    :func:`_span_index_of_tokens`."""
    span_starts, span_ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    span_indices = np.searchsorted(span_starts, token_ends, side="left") - 1
    return (span_indices >= 0) & (np.append(span_ends, -1)[span_indices] > token_starts)


def _answer_with_content(message: dict[str, Any], mark_word: str) -> dict[str, Any]:
    """An answer that is nothing but ``mark_word``: a string or a list of parts, as in ``message``."""
    uses_parts = not isinstance(message.get("content"), str | None)
    return {
        "role": "assistant",
        "content": [{"type": "text", "text": mark_word}] if uses_parts else mark_word,
    }


def _place_answers(
    rendered_text: str, texts_between_marks: list[str], answer_pieces: list[str]
) -> list[tuple[int, int, int]]:
    """What :meth:`ChatEncoder._find_answers` returns, from the texts of marked conversations.

    Args:
        texts_between_marks: the texts before, between and after answers. The last one is how a turn ends.
        answer_pieces: for each answer, its header, the answer itself and the text after it.

    Raises:
        ChatError: the pieces do not make up ``rendered_text``.
    """
    turn_ending = texts_between_marks[-1]
    answer_places = []
    text_position = 0
    for answer_piece, text_before, following_text in zip(
        answer_pieces, texts_between_marks, texts_between_marks[1:], strict=False
    ):
        header_text = text_before.removesuffix(EMPTY_THINK_BLOCK)
        answer_start = text_position + len(header_text)
        answer_end = text_position + len(answer_piece) - len(following_text)
        if not (
            answer_start <= answer_end
            and answer_piece.startswith(header_text)
            and answer_piece.endswith(following_text)
            and following_text.startswith(turn_ending)
            and rendered_text.startswith(answer_piece[: answer_end - text_position], text_position)
        ):
            raise ChatError(TURNS_NOT_FOUND_TEXT)
        answer_places.append((answer_start, answer_end, answer_end + len(turn_ending)))
        text_position = answer_end

    remaining_text = texts_between_marks[len(answer_pieces)]
    if not (
        remaining_text.startswith(rendered_text[text_position:])
        and rendered_text.startswith(turn_ending, text_position)
    ):
        raise ChatError(TURNS_NOT_FOUND_TEXT)
    return answer_places


def _absent_word(rendered_text: str) -> str:
    """A word that is not in ``rendered_text``, and does not arise where it is joined to other text."""
    longest_suffix = max(map(len, re.findall("answer(x*)", rendered_text)), default=-1)
    return "answer" + "x" * (longest_suffix + 1)


def _list_kinds(media_kinds: list[str]) -> str:
    if not media_kinds:
        return "nothing"
    further_count_text = f" and {len(media_kinds) - 8} more" if len(media_kinds) > 8 else ""
    return ", ".join(media_kinds[:8]) + further_count_text


def read_stop_tokens(hf_dir: str | Path, tokenizer: Any) -> list[int]:
    """The tokens that end a turn.

    They are the ``eos_token_id`` of ``generation_config.json``, as in HF's generate. Without that file, they
    are those of ``config.json`` and of the tokenizer, as in serving engines. Qwen3.5 up to 9B comes without
    the file, and its config names only ``<|endoftext|>``, which does not end a turn.

    Raises:
        ChatError: none of them has an end token.
    """
    if generation_eos_tokens := _read_eos_tokens(Path(hf_dir) / "generation_config.json"):
        return generation_eos_tokens
    tokenizer_eos_tokens = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    eos_tokens = list(dict.fromkeys([*tokenizer_eos_tokens, *_read_eos_tokens(Path(hf_dir) / "config.json")]))
    if not eos_tokens:
        raise ChatError(
            f"{hf_dir}: neither generation_config.json, config.json nor the tokenizer has an eos_token_id"
        )
    return eos_tokens


def _read_eos_tokens(config_path: Path) -> list[int]:
    """``eos_token_id`` of a JSON file or of its ``text_config``; empty if it has none."""
    config = json.loads(config_path.read_text()) if config_path.is_file() else {}
    eos_token_id = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    if eos_token_id is None:
        return []
    return [int(token) for token in (eos_token_id if isinstance(eos_token_id, list) else [eos_token_id])]
