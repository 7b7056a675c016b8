"""Turns a conversation into tokens and a loss mask with the checkpoint's own tokenizer and chat template.

``apply_chat_template`` renders the text (in transformers' sandbox), and the whole text is tokenized at once.
The placeholders of images and videos are repeated as ``Qwen2VLProcessor`` repeats them.

In a family that writes timestamps into the text (Qwen3-VL), each frame group of a video becomes
``<1.5 seconds><|vision_start|>...<|vision_end|>``. The template also writes a ``<|vision_start|>`` and a
``<|vision_end|>`` around the whole video. ``data.video_prompt`` decides whether they stay:

* ``released``, the default: they are removed. So does the processor that Qwen added to transformers for the
  release (4.57, which the model's README and fine-tuning code require), and so did Qwen's code in vLLM.
* ``transformers_5_10``: they stay. The processors of transformers have kept them since they were rewritten in
  5.10, and vLLM does the same with 5.10 or later (its issue 46817).

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

from megatron_vl.config import VideoPrompt
from megatron_vl.data.sample.deadline import UNLIMITED, Deadline
from megatron_vl.data.sample.thinking import EMPTY, ThinkingRule, switches_thinking, writes_thinking
from megatron_vl.errors import UserError
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW, placeholder_runs

PROBE = "look_up_the_weather"
PROBE_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": PROBE, "arguments": {"city": "Oslo"}}}],
    },
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]
"""A conversation that shows whether a template writes calls."""

NOT_FOUND = (
    "the assistant's turns cannot be found in what the chat template writes: it does not write the"
    " conversation turn by turn"
)


class ChatError(UserError, ValueError):
    """A conversation cannot be rendered, or its media do not match its text."""


class TemplateError(ChatError):
    """A conversation has what the checkpoint's chat template does not write. No other data help."""


class ChatEncoder:
    """Tokenizes conversations for one checkpoint.

    Args:
        hf_dir: folder with the tokenizer and the chat template.
        spec: the model (its placeholder tokens and merge size).
        video_prompt: rule for the text around a video, for families that write timestamps into the text.
        thinking: what is learnt, for chat templates that write thinking.

    Raises:
        FileNotFoundError: the folder has no tokenizer or no chat template.
        ChatError: the tokenizer does not know the model's placeholder tokens.
    """

    def __init__(
        self,
        hf_dir: str | Path,
        spec: ModelSpec,
        video_prompt: VideoPrompt = "released",
        thinking: ThinkingRule | None = None,
    ) -> None:
        self.spec = spec
        self.thinking = thinking or ThinkingRule()
        self.tokenizer = _load_tokenizer(Path(hf_dir))
        # transformers calls this one too, and makes lists of masks and types around it that nobody needs.
        self._fast = self.tokenizer.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self.template = read_chat_template(hf_dir)
        self.writes_thinking = writes_thinking(self.template)
        ids = (spec.image_token_id, spec.video_token_id)
        if max(ids) >= len(self.tokenizer):
            raise ChatError(
                f"{hf_dir}: the tokenizer has {len(self.tokenizer)} tokens; the config's placeholders are"
                f" {ids}"
            )
        self.image_token, self.video_token = self.tokenizer.convert_ids_to_tokens(list(ids))
        self._placeholder = re.compile("|".join(map(re.escape, (self.image_token, self.video_token))))

        around = self.tokenizer.convert_ids_to_tokens([spec.vision_start_token_id, spec.vision_end_token_id])
        self._group = f"{around[0]}{self.video_token}{around[1]}"
        # Frame groups replace the video with the pair around it, if it has one, or else the placeholder.
        whole = [self._group] if video_prompt == "released" else []
        self._replaced = re.compile("|".join(map(re.escape, (*whole, self.image_token, self.video_token))))

        self._times: dict[str, int] = {}

        pad = self.tokenizer.pad_token_id
        self.pad_token_id: int | None = pad if pad is not None and pad < spec.language.vocab_size else None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        think: bool | None = None,
    ) -> str:
        """The conversation as the checkpoint's template renders it, with one placeholder for each medium.

        ``think`` sets the template's ``enable_thinking``; None leaves it to the template.
        """
        switch = {} if think is None else {"enable_thinking": think}
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **switch,
            )
        except Exception as error:  # jinja errors, and whatever a template raises
            raise ChatError(
                f"the chat template refuses the conversation ({type(error).__name__}: {error})"
            ) from error

    def assistant_spans(
        self,
        messages: Sequence[dict[str, Any]],
        text: str,
        tools: Sequence[dict[str, Any]] = (),
        deadline: Deadline = UNLIMITED,
    ) -> list[tuple[int, int]]:
        """Start and end in ``text`` (the rendered conversation) of the part of each assistant turn to learn.

        Raises:
            ChatError: the template renders other turns differently when an answer changes.
            OutOfTimeError: the deadline has passed.
        """
        spans = []
        for start, end, turn_end in self._answers(messages, text, tools, deadline):
            first = self.thinking.first_learnt(text[start:end]) if self.writes_thinking else 0
            spans.append(
                (end, end) if first is None else (start + first, start + len(text[start:turn_end].rstrip()))
            )
        return spans

    def _answers(
        self,
        messages: Sequence[dict[str, Any]],
        text: str,
        tools: Sequence[dict[str, Any]],
        deadline: Deadline,
    ) -> list[tuple[int, int, int]]:
        """Start and end in ``text`` of each answer, without its header, and the end of its turn.

        The number of renderings does not grow with the turns. With a mark in the place of all answers, what
        stands between two marks is known. With a mark in the place of every second answer, each of the others
        lies between two marks, so that its length is known, whatever it holds.
        """
        answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not answers:
            return []
        mark = _absent_from(text)
        closing: list[dict[str, Any]] = []
        if answers[-1] + 1 < len(messages):  # what ends a turn is seen after the last one
            closing = [_with_content(messages[answers[-1]], mark)]

        def around_marks(marked: Sequence[int]) -> list[str]:
            if not (marked or closing):
                return [text]
            deadline.check()
            other = list(messages)
            for i in marked:
                other[i] = _with_content(messages[i], mark)
            found = self.render([*other, *closing], tools=tools).split(mark)
            if len(found) != len(marked) + len(closing) + 1:
                raise ChatError(NOT_FOUND)
            return found

        between = around_marks(answers)
        alternating = [around_marks(answers[1 - kept :: 2]) for kept in range(min(2, len(answers)))]
        ending = between[-1]
        places = []
        at = 0
        for k in range(len(answers)):
            before, after = between[k].removesuffix(EMPTY), between[k + 1]
            piece = alternating[k % 2][(k + 1) // 2]
            start, end = at + len(before), at + len(piece) - len(after)
            if not (
                start <= end
                and piece.startswith(before)
                and piece.endswith(after)
                and after.startswith(ending)
                and text.startswith(piece[: end - at], at)
            ):
                raise ChatError(NOT_FOUND)
            places.append((start, end, end + len(ending)))
            at = end

        rest = between[len(answers)]
        if not (rest.startswith(text[at:]) and text.startswith(rest if not closing else ending, at)):
            raise ChatError(NOT_FOUND)
        return places

    def encode(
        self,
        messages: Sequence[dict[str, Any]],
        grids: Sequence[GridTHW],
        tools: Sequence[dict[str, Any]] = (),
        deadline: Deadline = UNLIMITED,
    ) -> tuple[Tensor, Tensor]:
        """Token ids int64 [n] with expanded placeholders, and loss mask [n] (not shifted): bool, or float32
        with the weights of the turns if a turn has ``loss_weight``.

        Args:
            messages: HF messages: ``role`` and ``content`` (a string, or parts of type text, image, video);
                also ``reasoning_content``, ``tool_calls`` and ``loss_weight`` in the assistant's.
            grids: the media in the order of the text.
            tools: the functions that the assistant may call.
            deadline: looked at between the steps.

        Raises:
            ChatError: the placeholders in the text do not match the media, or the template does not write
                tools, calls or reasoning that the conversation has.
            OutOfTimeError: the deadline has passed.
        """
        weights = [m.get("loss_weight", 1.0) for m in messages if m.get("role") == "assistant"]
        messages = [{k: v for k, v in message.items() if k != "loss_weight"} for message in messages]
        self._check_features(messages, tools)
        text = self.render(messages, tools=tools)
        self._check_placeholders(text, grids)
        spans = self.assistant_spans(messages, text, tools, deadline)
        text, spans, inserted = self._write_times(text, spans, grids)

        deadline.check()
        encoded = self._fast.encode(text)
        # NumPy, because an operation on so few numbers costs three times as much in torch.
        ids = np.array(encoded.ids, dtype=np.int64)
        starts, ends = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2).T
        is_media = (ids == self.spec.image_token_id) | (ids == self.spec.video_token_id)

        turns = _span_of(starts, ends, spans)
        learnt = (turns >= 0) & (ends > starts) & ~is_media & ~_overlapping(starts, ends, inserted)
        loss_mask = learnt
        if not set(weights) <= {1.0}:
            loss_mask = np.where(learnt, np.array(weights, np.float32)[turns], np.float32(0))

        repeats = self._repeats(is_media, grids)
        return torch.from_numpy(ids.repeat(repeats)), torch.from_numpy(loss_mask.repeat(repeats))

    def encode_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        grids: Sequence[GridTHW],
        tools: Sequence[dict[str, Any]] = (),
        think: bool | None = None,
    ) -> Tensor:
        """Token ids int64 [n] with expanded placeholders, up to the header of the assistant's next turn.

        Arguments and errors are those of :meth:`encode` and :meth:`render`. It is also an error to set
        ``think`` if the template has no switch for it.
        """
        messages = [{k: v for k, v in message.items() if k != "loss_weight"} for message in messages]
        self._check_features(messages, tools)
        if think is not None and not switches_thinking(self.template):
            raise ChatError(
                "the checkpoint's chat template does not let a request switch thinking on or off"
                " (enable_thinking); leave out --thinking"
            )
        text = self.render(messages, generation_prompt=True, tools=tools, think=think)
        self._check_placeholders(text, grids)
        text, _, _ = self._write_times(text, [], grids)
        ids = np.array(self._fast.encode(text).ids, dtype=np.int64)
        is_media = (ids == self.spec.image_token_id) | (ids == self.spec.video_token_id)
        return torch.from_numpy(ids.repeat(self._repeats(is_media, grids)))

    def medium_tokens(self, grid: GridTHW) -> int:
        """Number of tokens that a medium's size decides: placeholders, and timestamps if they are written.

        The other tokens of a conversation are the same for media of any size.
        """
        count = grid.tokens(self.spec.vision.spatial_merge_size)
        if grid.kind == "video" and self.spec.vision.video_timestamps:
            # A timestamp begins with "<". What stands before may merge with that, but not with its digits.
            count += sum(self._time_tokens(f"{time:.1f}") + 2 for time in grid.timestamps)
        return count

    def _time_tokens(self, seconds: str) -> int:
        if seconds not in self._times:
            text = f"<{seconds} seconds>"
            self._times[seconds] = len(self._fast.encode(text, add_special_tokens=False).ids)
        return self._times[seconds]

    def _repeats(self, is_media: np.ndarray, grids: Sequence[GridTHW]) -> np.ndarray:
        """How often to repeat each token, int64 [n]: a placeholder once for each merge unit of its medium.

        Repeating the ids equals tokenizing the repeated text,
        because special tokens are split off before merging.
        """
        repeats = np.ones(len(is_media), dtype=np.int64)
        counts = [
            run.tokens(self.spec.vision.spatial_merge_size) for run in placeholder_runs(grids, self.spec)
        ]
        repeats[is_media] = counts
        return repeats

    def _write_times(
        self, text: str, spans: list[tuple[int, int]], grids: Sequence[GridTHW]
    ) -> tuple[str, list[tuple[int, int]], list[tuple[int, int]]]:
        """Replaces each video by one placeholder with a timestamp for each of its frame groups.

        Returns the new text, the spans in it, and the spans of what was written. For families without
        timestamps, the text does not change.
        """
        if not self.spec.vision.video_timestamps:
            return text, spans, []

        parts, inserted, moves = [], [], []
        done = length = 0  # characters of the old text that were handled, and of the new text
        for match, grid in zip(self._replaced.finditer(text), grids, strict=True):
            if grid.kind != "video":
                continue
            if len(grid.timestamps) != grid.t:
                raise ChatError(f"a video of {grid.t} frame groups has {len(grid.timestamps)} timestamps")
            written = "".join(f"<{time:.1f} seconds>{self._group}" for time in grid.timestamps)
            parts += [text[done : match.start()], written]
            start = length + match.start() - done
            inserted.append((start, start + len(written)))
            moves.append((match.end(), len(written) - len(match.group())))
            done = match.end()
            length = start + len(written)

        ends = [end for end, _ in moves]
        shifts = list(accumulate((by for _, by in moves), initial=0))

        def moved(at: int) -> int:
            return at + shifts[bisect_right(ends, at)]

        new_spans = [(moved(start), moved(end)) for start, end in spans]
        return "".join([*parts, text[done:]]), new_spans, inserted

    def _check_features(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> None:
        """Raises TemplateError if the template would leave out a part of the conversation without a word."""
        calls = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
        missing = ""
        if tools and not self._writes_tools:
            missing = "tools"
        elif calls and not self._writes_calls:
            missing = "tool calls"
        elif any(m.get("reasoning_content") for m in messages) and "reasoning_content" not in self.template:
            missing = "reasoning_content"
        if missing:
            raise TemplateError(f"the checkpoint's chat template does not write {missing}")

    @cached_property
    def _writes_tools(self) -> bool:
        function = {"name": PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
        return self._shows([PROBE_TURNS[0]], [{"type": "function", "function": function}])

    @cached_property
    def _writes_calls(self) -> bool:
        return self._shows(PROBE_TURNS, ())

    def _shows(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> bool:
        """Whether the rendered text has the name of the function that is looked for."""
        try:
            return PROBE in self.render(messages, tools=tools)
        except ChatError:
            return False

    def _check_placeholders(self, text: str, grids: Sequence[GridTHW]) -> None:
        written = [
            "image" if token == self.image_token else "video" for token in self._placeholder.findall(text)
        ]
        given: list[str] = [grid.kind for grid in grids]
        if written != given:
            raise ChatError(
                f"the text has placeholders for {_listed(written)}; the conversation has {_listed(given)}"
            )


def _span_of(starts: np.ndarray, ends: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """The number of the span that holds each token, int64 [n]; -1: none.

    Args:
        starts, ends: [n], characters of each token. spans: characters, in order, none within another.
    """
    first, last = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    found = np.searchsorted(first, starts, side="right") - 1
    inside = (found >= 0) & (ends <= np.append(last, -1)[found])
    return np.where(inside, found, -1)


def _overlapping(starts: np.ndarray, ends: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Whether each token has characters of a span, bool [n]. The arguments are those of :func:`_span_of`."""
    first, last = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    found = np.searchsorted(first, ends, side="left") - 1
    return (found >= 0) & (np.append(last, -1)[found] > starts)


def _with_content(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """An answer that is nothing but ``mark``, in the shape that the template is given: text or parts."""
    parts = not isinstance(message.get("content"), str | None)
    return {"role": "assistant", "content": [{"type": "text", "text": mark}] if parts else mark}


def _absent_from(text: str) -> str:
    """A word that does not occur in ``text``, nor in part where two texts meet."""
    longest = max((len(found) for found in re.findall("answer(x*)", text)), default=-1)
    return "answer" + "x" * (longest + 1)


def _listed(kinds: list[str]) -> str:
    if not kinds:
        return "nothing"
    more = f" and {len(kinds) - 8} more" if len(kinds) > 8 else ""
    return ", ".join(kinds[:8]) + more


def read_chat_template(hf_dir: str | Path) -> str:
    """The chat template of an HF folder:
    ``chat_template.jinja``, ``chat_template.json`` or the tokenizer's config.

    Raises:
        FileNotFoundError: the folder has no chat template.
    """
    folder = Path(hf_dir)
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            template = json.loads((folder / name).read_text()).get("chat_template")
            if isinstance(template, str):
                return template
    raise FileNotFoundError(
        f"{folder} has no chat template (chat_template.jinja, chat_template.json or tokenizer_config.json)"
    )


def stop_tokens(hf_dir: str | Path, tokenizer: Any) -> list[int]:
    """The tokens that end a turn.

    They are ``eos_token_id`` of ``generation_config.json``, as in HF's generate. Without that file, they are
    the ``eos_token_id`` of ``config.json`` and the tokenizer's, as in serving engines: Qwen3.5 up to 9B comes
    without the file, and its config names ``<|endoftext|>`` alone, which does not end a turn.

    Raises:
        ChatError: none of them has an end token.
    """
    if own := _end_tokens(Path(hf_dir) / "generation_config.json"):
        return own
    of_tokenizer = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    found = list(dict.fromkeys([*of_tokenizer, *_end_tokens(Path(hf_dir) / "config.json")]))
    if not found:
        raise ChatError(
            f"{hf_dir}: neither generation_config.json, config.json nor the tokenizer has an eos_token_id"
        )
    return found


def _end_tokens(path: Path) -> list[int]:
    """``eos_token_id`` of a JSON file or of its ``text_config``; empty if it has none."""
    config = json.loads(path.read_text()) if path.is_file() else {}
    found = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    if found is None:
        return []
    return [int(token) for token in (found if isinstance(found, list) else [found])]


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise FileNotFoundError(f"{folder} has no tokenizer (tokenizer.json, or vocab.json and merges.txt)")
    tokenizer = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True, use_fast=True
    )
    if not tokenizer.is_fast:
        raise ChatError(f"{folder}: the tokenizer gives no character offsets; a tokenizer.json is needed")
    return tokenizer
