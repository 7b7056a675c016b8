"""Messages that dependencies write at every start, on every rank, and that are no findings here
(Megatron-core 0.19.2, torch 2.11.0)."""

from __future__ import annotations

import logging
import warnings

WARNINGS = (
    # Without Transformer Engine (on CPU) the fallbacks are what is wanted.
    ".*Apex (are|is) not installed.*",
    ".*full scope is deprecated.*",
    ".*MimoModelConfig is experimental.*",
    ".*attribute of a Tensor that is not a leaf.*",
    # Of experts' layers, which are cut by etp: parallel.sequence_parallel without parallel.tp is refused
    # before.
    ".*`sequence_parallel` is set to `True`, but tensor model parallel size is 1.*",
)

LOGGERS = (
    # GPTModel announces its deprecation.
    "megatron.core.models.gpt.gpt_model",
    # DDP says that it computes a layout.
    "megatron.core.distributed.distributed_data_parallel",
    # Core's imports look for a CUDA toolkit to compile with; without a GPU there is none, and nothing is
    # compiled.
    "torch.utils.cpp_extension",
)
"""Of these, errors are shown and nothing below them."""


def silence() -> None:
    """Before core is imported. Idempotent."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
