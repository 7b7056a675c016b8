"""The weights that a run starts from: ``model.checkpoint``, or those in the folder ``model.hf``.

Each rank reads only its own parts, in any layout. A Hugging Face folder is read by the rules of conversion,
so that a rank gets bit for bit what ``megatron-vl convert`` would have written.
"""

from pathlib import Path

from converters.hf_checkpoint import HfCheckpoint
from megatron_vl.config import RANDOM_WEIGHTS, TrainConfig
from megatron_vl.config.checks import check_weights_exist
from megatron_vl.spec.families import ModelSpec
from megatron_vl.training.lora import check_same_model
from megatron_vl.weights.canonical_weights import CanonicalWeights
from megatron_vl.weights.weight_reader import WeightReader


def start_weights_path(config: TrainConfig) -> str:
    return "" if config.model.checkpoint == RANDOM_WEIGHTS else config.model.checkpoint or config.model.hf


def open_start_weights(config: TrainConfig, *, should_verify: bool = True) -> CanonicalWeights | None:
    """Opens the weights; None if they are random.

    Args:
        should_verify: whether Megatron weights are compared with their SHA-256. A Hugging Face folder has
            none.
    """
    if config.model.checkpoint == RANDOM_WEIGHTS:
        return None
    if config.model.checkpoint:
        return WeightReader(config.model.checkpoint, should_verify=should_verify)
    return HfCheckpoint(config.model.hf, has_mtp=bool(config.mtp.loss))


def open_mtp_weights(config: TrainConfig, checkpoint_path: Path | None) -> CanonicalWeights | None:
    """The folder ``model.hf``, if a run trains multi-token prediction and continues with weights without."""
    weights_path = checkpoint_path or config.model.checkpoint
    if not config.mtp.loss or not weights_path or config.model.checkpoint == RANDOM_WEIGHTS:
        return None
    return None if has_mtp_weights(weights_path) else HfCheckpoint(config.model.hf, has_mtp=True)


def has_mtp_weights(weights_path: str | Path) -> bool:
    """Whether Megatron weights hold multi-token prediction."""
    return WeightReader(weights_path, should_verify=False, takes_lora=True).spec.language.has_mtp


def check_start_weights(config: TrainConfig, spec: ModelSpec) -> CanonicalWeights | None:
    """Checks the weights, and returns them without comparing hashes."""
    if config.model.checkpoint == RANDOM_WEIGHTS:
        return None
    check_weights_exist(config)
    start_weights = open_start_weights(config, should_verify=False)
    assert start_weights is not None
    if isinstance(start_weights, HfCheckpoint):
        start_weights.check_tied_output()
    check_same_model(f"model.checkpoint {start_weights_path(config)}", start_weights.spec, config, spec)
    return start_weights
