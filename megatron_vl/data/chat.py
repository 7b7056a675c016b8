"""Conversation -> tokens and loss mask, with the checkpoint's own tokenizer and chat template.

The text is what ``apply_chat_template`` renders (in transformers' sandbox) and the tokens are those of the
whole text; the placeholders of images and videos are repeated as ``Qwen2VLProcessor`` repeats them.

Where the family writes times into the text (Qwen3-VL), a video becomes, for each frame group,
``<1.5 seconds><|vision_start|>...<|vision_end|>``. The template writes a ``<|vision_start|>`` and a
``<|vision_end|>`` around the whole video too; whether they stay is a rule, ``data.video_prompt``:

* ``released``, the default: they go away. The processor does so that Qwen added to transformers for the
  release (4.57, which the model's README and fine-tuning code ask for), and so did Qwen's code in vLLM.
* ``transformers_5_10``: they stay. The processors of transformers keep them since they were rewritten in
  5.10, and vLLM follows where it finds 5.10 or later (its issue 46817).

Loss mask: of each assistant turn, its content and the token that ends the turn; not its header, not the
newline behind it. Released templates have no ``{% generation %}`` marks, so the turn is the difference of the
text rendered with and without it. A token that begins in the header (content that starts with a newline melts
into it) is not learnt, because nobody could have to predict it. Placeholders of media inside an assistant
turn, and what stands for a video there, are not learnt: they are no text of the assistant's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.config import VideoPrompt
from megatron_vl.errors import UserError
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW, placeholder_runs


class ChatError(UserError, ValueError):
    """A conversation that cannot be rendered, or whose media do not match its text."""


class ChatEncoder:
    """Tokenizes conversations for one checkpoint.

    Args:
        hf_dir: folder with tokenizer and chat template.
        spec: the model (its placeholder tokens and merge size).
        video_prompt: what stands around a video, for families that write times into the text.

    Raises:
        FileNotFoundError: the folder has no tokenizer or no chat template.
        ChatError: the tokenizer does not know the model's placeholder tokens.
    """

    def __init__(self, hf_dir: str | Path, spec: ModelSpec, video_prompt: VideoPrompt = "released") -> None:
        self.spec = spec
        self.tokenizer = _load_tokenizer(Path(hf_dir))
        self.template = read_chat_template(hf_dir)
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
        # Frame groups take the place of the video with its pair, where it has one, or of the placeholder.
        whole = [self._group] if video_prompt == "released" else []
        self._replaced = re.compile("|".join(map(re.escape, (*whole, self.image_token, self.video_token))))

        pad = self.tokenizer.pad_token_id
        self.pad_token_id: int | None = pad if pad is not None and pad < spec.language.vocab_size else None

    def render(self, messages: Sequence[dict[str, Any]], *, generation_prompt: bool = False) -> str:
        """The conversation as the checkpoint's template writes it, one placeholder a medium."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except Exception as error:  # jinja errors, and whatever a template raises
            raise ChatError(
                f"the chat template refuses the conversation ({type(error).__name__}: {error})"
            ) from error

    def assistant_spans(self, messages: Sequence[dict[str, Any]], text: str) -> list[tuple[int, int]]:
        """Start and end in ``text`` (the rendered conversation) of what is learnt of each assistant turn.

        Raises:
            ChatError: the template renders a turn differently depending on what follows it.
        """
        spans = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.render(messages[:i]) if i else ""
            after = self.render(messages[: i + 1])
            header = self.render(messages[: i + 1], generation_prompt=True)[len(after) :]
            start = after.find(header, len(before))
            if (
                not text.startswith(after)
                or not after.startswith(before)
                or not header
                or start < 0
                or (i and start > len(before))
            ):
                raise ChatError(
                    f"turn {i + 1}: the chat template does not write the conversation turn by turn"
                )
            spans.append((start + len(header), len(after.rstrip())))
        return spans

    def encode(self, messages: Sequence[dict[str, Any]], grids: Sequence[GridTHW]) -> tuple[Tensor, Tensor]:
        """Token ids int64 [n], placeholders expanded, and loss mask bool [n] (not shifted).

        Args:
            messages: HF messages: ``role`` and ``content`` (a string, or parts of type text, image, video).
            grids: the media in the order of the text.

        Raises:
            ChatError: the placeholders in the text are not those of the media.
        """
        text = self.render(messages)
        self._check_placeholders(text, grids)
        spans = self.assistant_spans(messages, text)
        text, spans, inserted = self._write_times(text, spans, grids)
        encoded = self.tokenizer(text, return_offsets_mapping=True)
        ids = torch.tensor(encoded["input_ids"], dtype=torch.int64)
        offsets = torch.tensor(encoded["offset_mapping"], dtype=torch.int64).view(-1, 2)
        is_media = (ids == self.spec.image_token_id) | (ids == self.spec.video_token_id)
        learnt = torch.zeros(len(ids), dtype=torch.bool)
        for start, end in spans:
            learnt |= (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > offsets[:, 0])
        for start, end in inserted:
            learnt &= (offsets[:, 1] <= start) | (offsets[:, 0] >= end)
        learnt &= ~is_media
        repeats = self._repeats(is_media, grids)
        return ids.repeat_interleave(repeats), learnt.repeat_interleave(repeats)

    def encode_prompt(self, messages: Sequence[dict[str, Any]], grids: Sequence[GridTHW]) -> Tensor:
        """Token ids int64 [n] up to the header of the assistant's next turn, placeholders expanded; else as
        :meth:`encode`."""
        text = self.render(messages, generation_prompt=True)
        self._check_placeholders(text, grids)
        ids = torch.tensor(
            self.tokenizer(self._write_times(text, [], grids)[0])["input_ids"], dtype=torch.int64
        )
        is_media = (ids == self.spec.image_token_id) | (ids == self.spec.video_token_id)
        return ids.repeat_interleave(self._repeats(is_media, grids))

    def _repeats(self, is_media: Tensor, grids: Sequence[GridTHW]) -> Tensor:
        """How often each token stands: a placeholder once for each merge unit of its medium, int64 [n].

        Repeating the ids equals tokenizing the repeated text: special tokens are cut out before anything is
        merged.
        """
        repeats = torch.ones(len(is_media), dtype=torch.int64)
        counts = [
            run.tokens(self.spec.vision.spatial_merge_size) for run in placeholder_runs(grids, self.spec)
        ]
        repeats[is_media] = torch.tensor(counts, dtype=torch.int64)
        return repeats

    def _write_times(
        self, text: str, spans: list[tuple[int, int]], grids: Sequence[GridTHW]
    ) -> tuple[str, list[tuple[int, int]], list[tuple[int, int]]]:
        """The text with one placeholder for each frame group of a video, after its time; the spans in the new
        text; and the spans of what was written. For families without times, the text as it is."""
        if not self.spec.vision.video_timestamps:
            return text, spans, []
        parts, inserted, moves, done, length = [], [], [], 0, 0
        for match, grid in zip(self._replaced.finditer(text), grids, strict=True):
            if grid.kind != "video":
                continue
            if len(grid.timestamps) != grid.t:
                raise ChatError(f"a video of {grid.t} frame groups brings {len(grid.timestamps)} times")
            written = "".join(f"<{time:.1f} seconds>{self._group}" for time in grid.timestamps)
            parts += [text[done : match.start()], written]
            start = length + match.start() - done
            inserted.append((start, start + len(written)))
            moves.append((match.end(), len(written) - len(match.group())))
            done, length = match.end(), start + len(written)
        moved = [tuple(at + sum(by for end, by in moves if end <= at) for at in span) for span in spans]
        return "".join([*parts, text[done:]]), moved, inserted  # type: ignore[return-value]

    def _check_placeholders(self, text: str, grids: Sequence[GridTHW]) -> None:
        written = [
            "image" if token == self.image_token else "video" for token in self._placeholder.findall(text)
        ]
        given: list[str] = [grid.kind for grid in grids]
        if written != given:
            raise ChatError(
                f"the text has placeholders for {_listed(written)}, the conversation brings {_listed(given)}"
            )


def _listed(kinds: list[str]) -> str:
    return (
        ", ".join(kinds[:8]) + (f" and {len(kinds) - 8} more" if len(kinds) > 8 else "")
        if kinds
        else "nothing"
    )


def read_chat_template(hf_dir: str | Path) -> str:
    """The chat template of an HF folder: ``chat_template.jinja``, ``chat_template.json`` or the tokenizer's
    config.

    Raises:
        FileNotFoundError: there is none.
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


def stop_tokens(hf_dir: str | Path) -> list[int]:
    """The tokens that end a turn: ``eos_token_id`` of ``generation_config.json``, else of ``config.json``, as
    in HF's generate.

    Raises:
        ChatError: neither file says one.
    """
    for name in ("generation_config.json", "config.json"):
        path = Path(hf_dir) / name
        config = json.loads(path.read_text()) if path.is_file() else {}
        found = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        if found is not None:
            return [int(token) for token in (found if isinstance(found, list) else [found])]
    raise ChatError(f"{hf_dir}: neither generation_config.json nor config.json has an eos_token_id")


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
