"""``megatron-vl generate``: answers pictures, videos and text with a Megatron checkpoint."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from toolkit.platform_choice import choose_platform

from .options import GenerateOptions


def generate(options: GenerateOptions) -> int:
    """Answers the prompts and prints the answers. Returns the exit code."""
    from .answers import make_conversation, read_prompt_files, run_generate

    for input_path in (*options.image, *options.video, *options.prompt_file):
        if not input_path.is_file():
            raise FileNotFoundError(f"{input_path} is not a file")

    if options.prompt_file:
        media_roots = []
        for input_path in options.prompt_file:
            media_roots.append((options.media_root or input_path.parent).resolve())

        conversations = read_prompt_files(list(zip(options.prompt_file, media_roots, strict=True)))
    else:
        conversations = [(make_conversation(options.prompt[0], options.image, options.video), Path("/"), "")]

    platform = choose_platform(options.platform)
    dtype = options.dtype or ("bfloat16" if platform == "cuda" else "float32")
    options = dataclasses.replace(options, platform=platform, dtype=dtype)
    answers = run_generate(options, conversations, lambda text_line: print(text_line, file=sys.stderr))
    if options.json:
        print(json.dumps(answers, indent=2, ensure_ascii=False))
        return 0

    for text_line in answer_lines(answers, options.show_thinking):
        print(text_line)
    return 0


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
