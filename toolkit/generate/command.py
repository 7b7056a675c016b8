"""``megatron-vl generate``: answers pictures, videos and text with a Megatron checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from toolkit.device import chosen_platform

from .options import GenerateOptions


def generate(options: GenerateOptions) -> int:
    """Answers the prompts and prints the answers. Returns the exit code."""
    from megatron_vl.config import DataConfig

    from .answers import GenerateRequest, one_conversation, read_prompt_files, run_generate

    for path in (*options.image, *options.video, *options.prompt_file):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file")

    if options.prompt_file:
        roots = [(options.media_root or path.parent).resolve() for path in options.prompt_file]
        conversations = read_prompt_files(list(zip(options.prompt_file, roots, strict=True)))
    else:
        conversations = [(one_conversation(options.prompt[0], options.image, options.video), Path("/"), "")]

    platform = chosen_platform(options.platform)
    request = GenerateRequest(
        hf=options.hf,
        checkpoint=options.checkpoint,
        conversations=conversations,
        layout={
            "tp": options.tp,
            "pp": options.pp,
            "layers": options.layers,
            "ep": options.ep,
            "etp": options.etp,
        },
        max_new_tokens=options.max_new_tokens,
        think={"on": True, "off": False, None: None}[options.thinking],
        dtype=options.dtype or ("bfloat16" if platform == "cuda" else "float32"),
        platform=platform,
        batch=options.batch,
        data=DataConfig(
            video_fps=options.video_fps,
            video_max_frames=options.video_max_frames,
        ),
        asked_rules=options.asked_rules(),
    )

    answers = run_generate(request, lambda line: print(line, file=sys.stderr))
    if options.json:
        print(json.dumps(answers, indent=2, ensure_ascii=False))
        return 0

    for line in lines_of(answers, options.show_thinking):
        print(line)
    return 0


def lines_of(answers: list[dict[str, Any]], show_thinking: bool) -> list[str]:
    """What is printed: answers alone. Several ones have their numbers, and those that were cut are marked."""
    lines = []
    for number, answer in enumerate(answers, 1):
        text = _shown(as_text(answer, show_thinking))
        cut = "" if answer["finished"] else ", cut"
        lines.append(f"[{number}{cut}] {text}" if len(answers) > 1 else text)
    return lines


def as_text(answer: dict[str, Any], show_thinking: bool) -> str:
    """An answer of :func:`run_generate` as it is printed."""
    if answer["thinking"] is None or not show_thinking:
        return answer["text"]
    return f"<think>\n{answer['thinking']}\n</think>\n\n{answer['text']}"


def _shown(text: str) -> str:
    """Removes control characters, which a terminal could execute as commands."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
