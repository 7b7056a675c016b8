"""Silences messages that Megatron-core 0.19.2 and torch 2.11.0 write at every start, on every rank.

None of them reports a problem of a run of this project.
"""

import logging
import warnings

IGNORED_WARNINGS = (
    # Without Transformer Engine, on CPU, the fallbacks are intended.
    ".*Apex (are|is) not installed.*",
    ".*full scope is deprecated.*",
    ".*MimoModelConfig is experimental.*",
    ".*attribute of a Tensor that is not a leaf.*",
    # This comes from experts' layers, which are cut by etp. parallel.sequence_parallel without parallel.tp is
    # refused earlier.
    ".*`sequence_parallel` is set to `True`, but tensor model parallel size is 1.*",
)

QUIET_LOGGERS = (
    # GPTModel announces its deprecation.
    "megatron.core.models.gpt.gpt_model",
    # DDP says that it computes a layout.
    "megatron.core.distributed.distributed_data_parallel",
    # Core's imports look for a CUDA toolkit. Without a GPU there is none, and nothing is compiled.
    "torch.utils.cpp_extension",
)


def silence_messages() -> None:
    """Silences these messages. Call it before core is imported. Idempotent."""
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
