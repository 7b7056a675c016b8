"""The weights that a run starts from: ``model.checkpoint``, or those in the folder ``model.hf``.

Each rank reads only its own parts, in any layout. A Hugging Face folder is read by the rules of conversion,
so that a rank gets bit for bit what ``megatron-vl convert`` would have written.
"""

from pathlib import Path

from converters.hf_checkpoint import HfCheckpoint
from megatron_vl.config import RANDOM_WEIGHTS, TrainConfig
from megatron_vl.config.checks import check_weights_exist
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.tensors import MTP_PREFIX
from megatron_vl.training.lora import check_same_model
from megatron_vl.weights.canonical_weights import CanonicalWeights
from megatron_vl.weights.model_digest import model_digest
from megatron_vl.weights.run_folder import SavedCheckpoint
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


def open_added_weights(config: TrainConfig, source_checkpoint: SavedCheckpoint | None) -> HfCheckpoint | None:
    """The layer of multi-token prediction in ``model.hf``, if a run adds it to weights that lack it."""
    path = config.model.checkpoint if source_checkpoint is None else source_checkpoint.path
    if not config.mtp.loss or config.model.checkpoint == RANDOM_WEIGHTS or not path or _hold_mtp(path):
        return None
    weights = HfCheckpoint(config.model.hf, has_mtp=True)
    weights.tensor_infos = {  # what is loaded of the folder
        name: info for name, info in weights.tensor_infos.items() if name.startswith(MTP_PREFIX)
    }
    return weights


def added_layer_notes(config: TrainConfig, source_checkpoint: SavedCheckpoint | None) -> list[str]:
    """Notes on a layer that a run adds to the weights that it continues with, or leaves out of them."""
    path = config.model.checkpoint if source_checkpoint is None else source_checkpoint.path
    if open_added_weights(config, source_checkpoint) is not None:  # it checks the folder
        return ["multi-token prediction begins with the weights in model.hf"]
    if config.mtp.loss or not _hold_mtp(path):
        return []
    return [
        f"NOTE: the multi-token prediction in {path} is left out, as mtp.loss is 0; exports of this run have"
        " that of model.hf"
    ]


def _hold_mtp(path: str | Path) -> bool:
    """Whether a path names Megatron weights that hold multi-token prediction."""
    if path in ("", RANDOM_WEIGHTS):
        return False
    return WeightReader(path, should_verify=False, takes_lora=True).spec.language.has_mtp


def hf_weights_name(config: TrainConfig) -> str:
    """The name of the weights in ``model.hf`` among the digests, which are by path otherwise."""
    return f"{config.model.hf} (weights)"


def hf_digests(
    config: TrainConfig, source_checkpoint: SavedCheckpoint | None, reads_start_weights: bool
) -> dict[str, str]:
    """Digests of what a run reads of the weights in ``model.hf``. No file there holds their hashes."""
    digests: dict[str, str] = {}
    hf_weights: CanonicalWeights | None = open_added_weights(config, source_checkpoint)
    if reads_start_weights and not config.model.checkpoint:
        hf_weights = open_start_weights(config)
        assert hf_weights is not None
        digests[hf_weights_name(config)] = model_digest(hf_weights)
    if hf_weights is not None and config.mtp.loss:
        digests[f"{config.model.hf} (multi-token prediction)"] = model_digest(hf_weights, of_mtp=True)
    return digests


def check_start_weights(config: TrainConfig, spec: ModelSpec) -> CanonicalWeights | None:
    """Checks the weights, and returns them without comparing hashes."""
    check_weights_exist(config)
    if (start_weights := open_start_weights(config, should_verify=False)) is None:
        return None
    if isinstance(start_weights, HfCheckpoint):
        start_weights.check_tied_output()
    check_same_model(f"model.checkpoint {start_weights_path(config)}", start_weights.spec, config, spec)
    return start_weights
