"""``megatron-vl card``: measures a model beside its prediction and beside ``transformers``."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from toolkit.bench.command import ALLOCATOR_VARIABLES
from toolkit.platform_choice import choose_platform

from .options import CardOptions
from .page import loss_picture


def card(options: CardOptions) -> int:
    """Measures in this process, writes the card and prints its main figures. Returns the exit code."""
    # Before torch is imported.
    for name, value in (ALLOCATOR_VARIABLES | {"TOKENIZERS_PARALLELISM": "false"}).items():
        os.environ.setdefault(name, value)
    bench_run = options.bench_run(choose_platform(options.platform))
    for path in filter(None, (options.out, options.picture)):
        path.parent.mkdir(parents=True, exist_ok=True)

    from .measure import make_card, summary_lines

    model_card = make_card(options, bench_run)
    options.out.write_text(_card_text(model_card))
    if options.picture:
        options.picture.write_text(loss_picture(model_card["curve"]) + "\n")
    print("\n".join([*summary_lines(model_card), f"written: {options.out}"]))
    return 0


def _card_text(model_card: dict[str, Any]) -> str:
    """The card as JSON, with each list of numbers on one line."""
    indented_text = json.dumps(model_card, indent=1)
    return re.sub(r"\[[-+.\de,\s]+\]", lambda numbers: " ".join(numbers[0].split()), indented_text) + "\n"
