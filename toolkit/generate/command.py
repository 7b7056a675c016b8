"""``megatron-vl generate``: answers pictures, videos and text with a Megatron checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.platform_choice import choose_platform

from .options import GenerateOptions

if TYPE_CHECKING:
    from .answers import SourcedConversation


def generate(options: GenerateOptions) -> int:
    """Answers the prompts and prints the answers. Returns the exit code."""
    from megatron_vl.config import DataConfig

    from .answers import GenerateRequest, run_generate

    for input_path in (*options.image, *options.video, *options.prompt_file):
        if not input_path.is_file():
            raise FileNotFoundError(f"{input_path} is not a file")
    platform = choose_platform(options.platform)
    layout_arguments = {name: getattr(options, name) for name in ("tp", "pp", "layers", "ep", "etp")}
    generate_request = GenerateRequest(
        hf_dir=options.hf,
        checkpoint_dir=options.checkpoint,
        conversations=_read_conversations(options),
        layout_arguments=layout_arguments,
        max_new_tokens=options.max_new_tokens,
        think={"on": True, "off": False, None: None}[options.thinking],
        dtype=options.dtype or ("bfloat16" if platform == "cuda" else "float32"),
        platform=platform,
        batch_size=options.batch,
        data_config=DataConfig(video_fps=options.video_fps, video_max_frames=options.video_max_frames),
        asked_rules=options.asked_rules(),
    )

    answers = run_generate(generate_request, lambda text_line: print(text_line, file=sys.stderr))
    if options.json:
        print(json.dumps(answers, indent=2, ensure_ascii=False))
    else:
        print("\n".join(answer_lines(answers, options.show_thinking)))
    return 0


def _read_conversations(options: GenerateOptions) -> list[SourcedConversation]:
    from .answers import make_conversation, read_prompt_files

    if not options.prompt_file:
        return [(make_conversation(options.prompt[0], options.image, options.video), Path("/"), "")]
    prompt_files = []
    for prompt_file in options.prompt_file:
        prompt_files.append((prompt_file, (options.media_root or prompt_file.parent).resolve()))
    return read_prompt_files(prompt_files)


def answer_lines(answers: list[dict[str, Any]], show_thinking: bool) -> list[str]:
    """The lines to print, one per answer. Several answers are numbered, and truncated ones are marked."""
    lines = []
    for number, answer in enumerate(answers, 1):
        text = _without_control_characters(answer_text(answer, show_thinking))
        truncation_mark = "" if answer["finished"] else ", cut"
        lines.append(f"[{number}{truncation_mark}] {text}" if len(answers) > 1 else text)
    return lines


def answer_text(answer: dict[str, Any], show_thinking: bool) -> str:
    """An answer of :func:`run_generate` as it is printed."""
    if answer["thinking"] is None or not show_thinking:
        return answer["text"]
    return f"<think>\n{answer['thinking']}\n</think>\n\n{answer['text']}"


def _without_control_characters(raw_text: str) -> str:
    """Removes control characters, which a terminal could execute as commands."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for character in raw_text
    )
