"""``megatron-vl generate``: answers prompts with ``transformers``."""

from __future__ import annotations

import sys
from functools import partial

from megatron_vl.config import parse_config
from megatron_vl.system.errors import UsageError

from .options import GenerateOptions


def generate(options: GenerateOptions) -> int:
    """Answers the prompt or the data set. Returns the exit code."""
    config = parse_config(options.fields)
    if config.lora.adapter and (options.checkpoint / "config.json").is_file():
        raise UsageError(
            "lora.adapter is for training: merge it first (`megatron-vl export --checkpoint"
            f" {config.lora.adapter} --hf {options.checkpoint} --merge --out MERGED`) and give MERGED"
        )
    from . import answers

    print_line = partial(print, file=sys.stderr, flush=True)
    hf_dir = answers.exported_folder(options.checkpoint, config.model.hf, print_line)
    limit = options.max_new_tokens
    limits = (limit, limit) if limit else answers.DEFAULT_LIMITS
    answerer = answers.Answerer(hf_dir, answers.with_trained_media(config.data, hf_dir), limits)
    if options.out is not None:
        if not config.data.path or config.data.is_synthetic:
            raise UsageError("--out needs --data.path, the data set whose samples are answered")
        print(f"{answers.answer_dataset(answerer, config, options.out, print_line)} ({options.out})")
        return 0

    answer, shortcoming = answerer.answer(answers.encode_prompt(answerer.encoder, options))
    if shortcoming:
        print_line(shortcoming)
    if answer.thinking_text is not None:
        print_line(f"<think>\n{_without_control_characters(answer.thinking_text)}\n</think>\n")
    print(_without_control_characters(answer.answer_text))
    return 0


def _without_control_characters(text: str) -> str:
    """Removes control characters, which a terminal could execute as commands."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
