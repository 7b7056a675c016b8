"""Fields of a run and commands of 0.1.0 that are gone, and what to do instead."""

from __future__ import annotations

ANSWERS = "the loss is still evaluated; answer a split with `megatron-vl generate --data SET --split val`"

REMOVED_FIELDS = {
    "eval.samples": ANSWERS,
    "eval.max_new_tokens": ANSWERS,
}
"""Dotted name -> what to do instead."""
