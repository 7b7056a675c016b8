"""``megatron-vl generate``: answers prompts with ``transformers``."""

import sys

from megatron_vl.config import parse_config
from megatron_vl.system.errors import UsageError

from .options import GenerateOptions


def generate(options: GenerateOptions) -> int:
    config = parse_config(options.fields)
    if config.lora.adapter and (options.checkpoint / "config.json").is_file():
        raise UsageError(
            "lora.adapter is for training: merge it first (`megatron-vl export --checkpoint"
            f" {config.lora.adapter} --hf {options.checkpoint} --merge --out MERGED`) and give MERGED"
        )
    from toolkit.data.statistics import escape_unprintable

    from . import answers

    hf_dir = answers.exported_folder(options.checkpoint, config.model.hf)
    limits = (options.max_new_tokens,) * 2 if options.max_new_tokens else (128, 2048)
    answerer = answers.Answerer(hf_dir, answers.with_trained_media(config.data, hf_dir), limits)
    if options.out is not None:
        if not config.data.path or config.data.is_synthetic:
            raise UsageError("--out needs --data.path, the data set whose samples are answered")
        print(f"{answers.answer_dataset(answerer, config, options.out)} ({options.out})")
        return 0

    answer, shortcoming = answerer.answer(answers.encode_prompt(answerer.encoder, options))
    if shortcoming:
        print(shortcoming, file=sys.stderr)
    if answer.thinking_text is not None:
        print(f"<think>\n{escape_unprintable(answer.thinking_text)}\n</think>\n", file=sys.stderr)
    print(escape_unprintable(answer.answer_text))
    return 0
