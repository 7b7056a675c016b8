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
header nor the newline after it (:mod:`.answer_places` finds the turns). A token that begins in the header is
not trained on, because the model never has to predict it (this happens if the content starts with a newline,
which merges with the header). Placeholders of media inside an assistant turn, and the text of a video there,
are not trained on because the assistant did not write them. A turn with the weight 0 is not trained on; the
weights of others multiply the losses of their tokens. :mod:`.thinking` says what is trained on where the
template writes thinking.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vl.config import DataConfig
from megatron_vl.data.sample.answer_places import AnswerPlace, find_answers, find_exchanges
from megatron_vl.data.sample.chat_template import (
    TOOLS_FAMILIES,
    TOOLS_TEMPLATE,
    ChatTemplateError,
    check_template_arguments,
    read_run_template,
)
from megatron_vl.data.sample.conversation_checks import (
    ChatError,
    check_control_tokens,
    find_lost_text,
    order_results,
)
from megatron_vl.data.sample.deadline import check_time
from megatron_vl.data.sample.parts import ExchangeStart
from megatron_vl.data.sample.thinking import THINK_CLOSING, first_trained_character, has_thinking_switch
from megatron_vl.data.sample.tokenizer import check_embedding_rows, shared_tokenizer
from megatron_vl.data.sample.written_numbers import mark_numbers, unmark_numbers
from megatron_vl.spec.families import ModelSpec
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
PROBES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a system turn after the start": (
        [PROBE_TURNS[0], {"role": "system", "content": PROBE_FUNCTION}, PROBE_TURNS[-1]],
        [],
    ),
    "tools": (
        PROBE_TURNS[:1],
        [
            {
                "type": "function",
                "function": {
                    "name": PROBE_FUNCTION,
                    "description": "",
                    "parameters": {"type": "object", "properties": {}},
                },
            }
        ],
    ),
    "tool calls": (PROBE_TURNS, []),
}
"""For each feature of a template, messages and tools that show whether it has it."""

type Span = tuple[int, int]
"""Start and end in characters."""


class ChatEncoder:
    """Tokenizes conversations for one checkpoint.

    Args:
        hf_dir: folder with the tokenizer and the chat template.
        spec: the model (its placeholder tokens and merge size).
        data_config: another template than the folder's, arguments of the template, and what is trained on if
            it writes thinking.

    Raises:
        FileNotFoundError: the folder has no tokenizer or no chat template.
        ChatError: the tokenizer does not know the model's placeholder tokens, or has tokens without a row in
            the embedding; or the given template cannot be used, or does not read its arguments.
    """

    def __init__(self, hf_dir: str | Path, spec: ModelSpec, data_config: DataConfig | None = None) -> None:
        self.spec = spec
        self.data_config = data_config or DataConfig()
        self.hf_dir = Path(hf_dir)
        self.tokenizer, self.serving_note = shared_tokenizer(hf_dir)
        # transformers calls this one too, and makes lists of masks and types around it that nobody needs.
        self._fast_tokenizer = self.tokenizer.backend_tokenizer
        check_embedding_rows(self._fast_tokenizer, spec.language.vocab_size, hf_dir)
        added_tokens = self._fast_tokenizer.get_added_tokens_decoder()
        self._space_eating_ids = [token_id for token_id, token in added_tokens.items() if token.rstrip]
        """Added tokens that take the white space after them, as their ``rstrip`` says."""
        self.given_template = self.data_config.chat_template
        self.chat_template = read_run_template(hf_dir, self.given_template)
        self.template_writes_thinking = THINK_CLOSING in self.chat_template
        self.template_arguments = self.data_config.template_arguments
        check_template_arguments(self.chat_template, self.template_arguments, "data.template_arguments")

        placeholder_ids = (spec.image_token_id, spec.video_token_id)
        if max(placeholder_ids) >= len(self.tokenizer):
            raise ChatError(
                f"{hf_dir}: the tokenizer has {len(self.tokenizer)} tokens; the config's placeholders are"
                f" {placeholder_ids}"
            )
        self.image_token, self.video_token, vision_start, vision_end = self.tokenizer.convert_ids_to_tokens(
            [*placeholder_ids, spec.vision_start_token_id, spec.vision_end_token_id]
        )
        self._frame_group_text = f"{vision_start}{self.video_token}{vision_end}"
        self._image_text = f"{vision_start}{self.image_token}{vision_end}"
        self._placeholder_pattern = _any_of(self.image_token, self.video_token)
        # Frame groups replace the video with the pair around it, if it has one, or else the placeholder.
        self._replaced_pattern = _any_of(self._frame_group_text, self.image_token, self.video_token)
        self._timestamp_tokens: dict[str, int] = {}
        """Number of tokens of each timestamp so far: videos share most of them."""
        self._written_features = {"reasoning_content": "reasoning_content" in self.chat_template}
        """Which features the template writes: of :data:`PROBES`, as far as it was asked."""

        pad_token = self.tokenizer.pad_token_id
        self.pad_token_id: int | None = (
            pad_token if pad_token is not None and pad_token < spec.language.vocab_size else None
        )
        if self.given_template:
            self._check_given_template()

    def render_conversation(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the checkpoint's template renders it, with one placeholder for each medium.

        Args:
            messages, tools: as for :meth:`encode`.
            generation_prompt: whether the header of the assistant's next turn follows.
            template_arguments: the template's arguments that replace those of the run.

        Raises:
            ChatError: the template refuses the conversation.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                mark_numbers(list(messages)),
                tools=mark_numbers(list(tools)) or None,
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **(self.template_arguments | dict(template_arguments or {})),
            )
        except Exception as error:  # jinja errors, and whatever a template raises
            if is_machine_fault(error):
                raise
            roles = [message.get("role") for message in messages]
            repeated = next((role for role, following in pairwise(roles) if role == following != "tool"), "")
            advice = f"; the {repeated} has several turns in a row: join them" if repeated else ""
            raise ChatError(
                f"the chat template refuses the conversation ({type(error).__name__}: {error}){advice}"
            ) from error
        return unmark_numbers(text)

    def encode(
        self,
        messages: Sequence[dict[str, Any]],
        media_grids: Sequence[GridTHW],
        tools: Sequence[dict[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        exchange_starts: list[ExchangeStart] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokenizes a conversation.

        Args:
            messages: HF messages: ``role`` and ``content`` (a string, or parts of type text, image, video);
                also ``reasoning_content``, ``tool_calls`` and ``loss_weight`` in the assistant's.
            media_grids: the media in the order of the text.
            tools: the functions that the assistant may call.
            template_arguments: the record's own ``chat_template_kwargs``.
            exchange_starts: gets the beginnings of the exchanges, or none if the conversation cannot be cut.

        Returns:
            Token ids, int64 [n], with expanded placeholders, and the loss mask [n], not shifted. The mask is
            bool. If a turn has a ``loss_weight``, it is float32 and holds the weights.

        Raises:
            ChatError: the placeholders in the text do not match the media, or the template does not write
                tools, calls or reasoning that the conversation has.
        """
        turn_weights = [m.get("loss_weight", 1.0) for m in messages if m.get("role") == "assistant"]
        messages = self._checked_messages(messages, tools)
        check_template_arguments(self.chat_template, template_arguments or {}, "chat_template_kwargs")
        render = partial(self.render_conversation, tools=tools, template_arguments=template_arguments)
        text = render(messages)
        self._check_placeholders(text, media_grids)

        # Turns are found before timestamps change the text.
        places = find_answers(messages, text, render)
        answer_spans = [(start, end) for start, end, _ in places]
        if lost_text := find_lost_text(messages, text, answer_spans, self.template_writes_thinking):
            raise ChatError(
                f"the chat template leaves out a text or reads it as thinking: {lost_text[:80]!r}; write"
                " reasoning as one block (<think>...</think>) before the answer, or as reasoning_content"
            )
        spans = [self._trained_span(text, place) for place in places]
        cuts = find_exchanges(messages, text, places, render) if exchange_starts is not None else []
        spans += [(cut, cut) for cut in cuts]
        text, spans, video_spans = self._insert_timestamps(text, spans, media_grids)
        trained_spans, cut_spans = spans[: len(places)], spans[len(places) :]

        check_time()
        encoded_text = self._fast_tokenizer.encode(text)
        # NumPy, because an operation on so few numbers costs three times as much in torch.
        token_ids = np.array(encoded_text.ids, dtype=np.int64)
        loss_mask = self._loss_mask(token_ids, encoded_text.offsets, trained_spans, video_spans, turn_weights)

        # Placeholders are expanded as ids, which is much cheaper than to tokenize the expanded text.
        repeats = self.repeat_counts(token_ids, media_grids)
        if exchange_starts is not None:
            exchange_starts += self._exchange_starts(
                token_ids, encoded_text.offsets, cut_spans, media_grids, repeats
            )
        return torch.from_numpy(token_ids.repeat(repeats)), torch.from_numpy(loss_mask.repeat(repeats))

    def encode_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        media_grids: Sequence[GridTHW],
        tools: Sequence[dict[str, Any]] = (),
        enable_thinking: bool | None = None,
    ) -> Tensor:
        """Token ids int64 [n] with expanded placeholders, up to the header of the assistant's next turn.

        ``enable_thinking`` is the template's argument; None leaves that of the run. The other arguments and
        the errors are those of :meth:`encode`. It is also an error to set ``enable_thinking`` if the template
        has no switch for it.
        """
        messages = self._checked_messages(messages, tools)
        if enable_thinking is not None and not has_thinking_switch(self.chat_template):
            raise ChatError(
                "the checkpoint's chat template does not let a request switch thinking on or off"
                " (enable_thinking); leave out --thinking"
            )
        arguments = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        text = self.render_conversation(
            messages, generation_prompt=True, tools=tools, template_arguments=arguments
        )
        self._check_placeholders(text, media_grids)
        text, _, _ = self._insert_timestamps(text, [], media_grids)
        token_ids = np.array(self._fast_tokenizer.encode(text).ids, dtype=np.int64)
        return torch.from_numpy(token_ids.repeat(self.repeat_counts(token_ids, media_grids)))

    def media_token_count(self, grid: GridTHW) -> int:
        """Number of a medium's tokens: placeholders, and timestamps if the family writes them.

        The other tokens of a conversation are the same for media of any size.
        """
        num_tokens = grid.num_tokens(self.spec.vision.spatial_merge_size)
        if grid.kind == "video" and self.spec.vision.video_timestamps:
            # A timestamp begins with "<". What stands before may merge with that, but not with its digits.
            # The two markers around a frame group come on top.
            for time in grid.timestamps:
                if (text := f"<{time:.1f} seconds>") not in self._timestamp_tokens:
                    self._timestamp_tokens[text] = len(
                        self._fast_tokenizer.encode(text, add_special_tokens=False)
                    )
                num_tokens += self._timestamp_tokens[text] + 2
        return num_tokens

    def medium_text(self, grid: GridTHW) -> str:
        """A medium as text, with the tokens around its placeholders, one for an image or frame group."""
        if grid.kind == "image":
            return self._image_text
        if not self.spec.vision.video_timestamps:
            return self._frame_group_text
        if len(grid.timestamps) != grid.t:
            raise ChatError(f"a video of {grid.t} frame groups has {len(grid.timestamps)} timestamps")
        return "".join(f"<{time:.1f} seconds>{self._frame_group_text}" for time in grid.timestamps)

    def document_token_count(self, grid: GridTHW) -> int:
        """Number of tokens of :meth:`medium_text` with expanded placeholders."""
        return self.media_token_count(grid) + 2 * (
            grid.kind == "image" or not self.spec.vision.video_timestamps
        )

    # --- Checks ---------------------------------------------------------------------------------------------

    def _check_given_template(self) -> None:
        """Raises ChatError if the answers of a plain conversation cannot be found with the run's template."""
        try:
            _, loss_mask = self.encode(2 * [PROBE_TURNS[0], PROBE_TURNS[-1]], [])
        except ChatError as error:
            raise ChatError(f"data.chat_template {self.given_template}: {error}") from error
        if not loss_mask.any():
            raise ChatError(f"data.chat_template {self.given_template} writes no answer that is trained on")

    def _checked_messages(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The messages for the template, which might write loss weights and ids."""
        messages = order_results(
            [{k: v for k, v in message.items() if k != "loss_weight"} for message in messages]
        )
        check_control_tokens(messages, tools)
        self._check_template_features(messages, tools)
        return messages

    def _check_template_features(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> None:
        """Raises ChatTemplateError if the template would silently leave out a part of the conversation."""
        used_features = {
            "a system turn after the start": any(turn.get("role") == "system" for turn in messages[1:]),
            "tools": bool(tools),
            "tool calls": any(turn.get("tool_calls") or turn.get("role") == "tool" for turn in messages),
            "reasoning_content": any(turn.get("reasoning_content") for turn in messages),
        }
        for feature, is_used in used_features.items():
            if is_used and not self._writes(feature):
                given, advice = self.given_template, ""
                owner = f"chat template {given}" if given else "checkpoint's chat template"
                if feature.startswith("a system turn"):
                    advice = "; join them into one at the start"
                elif feature.startswith("tool") and self.spec.family in TOOLS_FAMILIES:
                    advice = f"; give --data.chat_template {TOOLS_TEMPLATE}, which does"
                raise ChatTemplateError(f"the {owner} does not write {feature}{advice}")

    def _writes(self, feature: str) -> bool:
        """Whether the template writes the name of the probe's function, which stands in this feature."""
        if feature not in self._written_features:
            messages, tools = PROBES[feature]
            try:
                self._written_features[feature] = PROBE_FUNCTION in self.render_conversation(
                    messages, tools=tools
                )
            except ChatError:
                self._written_features[feature] = False
        return self._written_features[feature]

    def _check_placeholders(self, text: str, media_grids: Sequence[GridTHW]) -> None:
        written_kinds = [
            "image" if token == self.image_token else "video"
            for token in self._placeholder_pattern.findall(text)
        ]
        given_kinds: list[str] = [grid.kind for grid in media_grids]
        if written_kinds != given_kinds:
            raise ChatError(
                f"the text has placeholders for {_list_kinds(written_kinds)}; the conversation has"
                f" {_list_kinds(given_kinds)}"
            )

    # --- Loss mask and placeholders -------------------------------------------------------------------------

    def _trained_span(self, text: str, place: AnswerPlace) -> Span:
        start, end, turn_end = place
        first: int | None = 0
        if self.template_writes_thinking:
            first = first_trained_character(text[start:end], self.data_config)
        if first is None:
            return end, end
        # The token that ends the turn is trained on, the newline after it is not.
        return start + first, start + len(text[start:turn_end].rstrip())

    def _is_media(self, token_ids: np.ndarray) -> np.ndarray:
        return (token_ids == self.spec.image_token_id) | (token_ids == self.spec.video_token_id)

    def _loss_mask(
        self,
        token_ids: np.ndarray,
        token_spans: Sequence[Span],
        trained_spans: Sequence[Span],
        video_spans: Sequence[Span],
        turn_weights: Sequence[float],
    ) -> np.ndarray:
        """The loss mask of tokens before placeholders are expanded, [n], as :meth:`encode` returns it.

        Args:
            token_spans, trained_spans, video_spans: start and end in characters of each token, of what is
                trained on of each assistant turn, and of each video's text.
            turn_weights: the ``loss_weight`` of each assistant turn.
        """
        starts, ends = starts_and_ends(token_spans)
        # Tokens without characters and the media's own tokens are not text that the assistant wrote.
        is_written = ~self._is_media(token_ids) & (ends > starts)
        if video_spans:
            video_starts, video_ends = starts_and_ends(video_spans)
            last_video = np.searchsorted(video_starts, ends, side="left") - 1
            is_written &= (last_video < 0) | (video_ends[last_video] <= starts)

        # The token that ends a turn may have taken the newline after it.
        written_ends = ends
        if self._space_eating_ids:
            written_ends = np.where(np.isin(token_ids, self._space_eating_ids), starts + 1, ends)
        turn_starts, turn_ends = starts_and_ends(trained_spans)
        turns = np.searchsorted(turn_starts, starts, side="right") - 1
        loss_mask = is_written & (turns >= 0) & (written_ends <= np.append(turn_ends, -1)[turns])
        if set(turn_weights) <= {1.0}:
            return loss_mask
        return np.where(loss_mask, np.array(turn_weights, np.float32)[turns], np.float32(0))

    def _exchange_starts(
        self,
        token_ids: np.ndarray,
        token_spans: Sequence[Span],
        cut_spans: Sequence[Span],
        media_grids: Sequence[GridTHW],
        repeats: np.ndarray,
    ) -> list[ExchangeStart]:
        """Where exchanges begin that begin at these characters; nothing if one begins within a token."""
        cuts, token_starts = starts_and_ends(cut_spans)[0], starts_and_ends(token_spans)[0]
        first_tokens = np.searchsorted(token_starts, cuts)
        if not len(cuts) or (np.append(token_starts, -1)[first_tokens] != cuts).any():
            return []
        placeholders_before = np.append(0, self._is_media(token_ids).cumsum())[first_tokens]
        placeholders = np.cumsum([len(placeholder_runs([grid], self.spec)) for grid in media_grids])
        media_before = np.searchsorted(placeholders, placeholders_before, side="right")
        new_positions = np.append(0, repeats.cumsum())[first_tokens]
        return list(zip(new_positions.tolist(), media_before.tolist(), strict=True))

    def repeat_counts(self, token_ids: np.ndarray, media_grids: Sequence[GridTHW]) -> np.ndarray:
        """How often to repeat each token, int64 [n]: a placeholder once for each merge unit of its medium.

        Repeated ids equal the ids of the repeated text, because special tokens are split off before merging.
        """
        repeats = np.ones(len(token_ids), dtype=np.int64)
        merge_size = self.spec.vision.spatial_merge_size
        run_grids = placeholder_runs(media_grids, self.spec)
        is_media = self._is_media(token_ids)
        # NumPy would repeat a single number for any number of placeholders.
        if np.count_nonzero(is_media) != len(run_grids):
            raise ChatError("the text has placeholders of images or videos that stand for no medium")
        repeats[is_media] = [grid.num_tokens(merge_size) for grid in run_grids]
        return repeats

    def _insert_timestamps(
        self, text: str, trained_spans: list[Span], media_grids: Sequence[GridTHW]
    ) -> tuple[str, list[Span], list[Span]]:
        """Replaces each video by one placeholder with a timestamp for each of its frame groups.

        For families without timestamps, the text does not change.

        Returns:
            The new text, ``trained_spans`` in the new text, and the spans of the inserted texts.
        """
        if not self.spec.vision.video_timestamps:
            return text, trained_spans, []

        new_text = ""
        video_spans: list[Span] = []
        # Where in the old text a video ends, and by how much the text after it moves.
        video_ends: list[int] = []
        shifts = [0]
        for match, grid in zip(self._replaced_pattern.finditer(text), media_grids, strict=True):
            if grid.kind != "video":
                continue
            new_text += text[video_ends[-1] if video_ends else 0 : match.start()]
            start = len(new_text)
            new_text += self.medium_text(grid)
            video_spans.append((start, len(new_text)))
            video_ends.append(match.end())
            shifts.append(len(new_text) - match.end())

        def moved(position: int) -> int:
            return position + shifts[bisect_right(video_ends, position)]

        new_text += text[video_ends[-1] if video_ends else 0 :]
        return new_text, [(moved(start), moved(end)) for start, end in trained_spans], video_spans


def _any_of(*texts: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


def starts_and_ends(spans: Sequence[Span]) -> np.ndarray:
    """int64 [2, n]"""
    return np.fromiter(chain.from_iterable(spans), np.int64, 2 * len(spans)).reshape(-1, 2).T


def _list_kinds(kinds: list[str]) -> str:
    if not kinds:
        return "nothing"
    return ", ".join(kinds[:8]) + (f" and {len(kinds) - 8} more" if len(kinds) > 8 else "")
