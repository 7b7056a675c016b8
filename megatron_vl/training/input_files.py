"""Compares the files that decide what a run trains on between its ranks.

Nodes may have other files under the same path: a stale copy of weights, another image processor. Rank 0
records a digest of each such file in the :class:`~megatron_vl.training.resolved_run.ResolvedRun`, and every
rank compares those that it reads itself. The files of weights and shards are not read: manifests and ids of
content hold their hashes. Of weights in a Hugging Face folder, a sample of values is compared.
"""

import socket
from collections.abc import Iterable
from pathlib import Path

from megatron_vl.config import RANDOM_WEIGHTS, RunConfigError, TrainConfig
from megatron_vl.data.source.dataset_description import METADATA_DIR, DatasetDescription, Description
from megatron_vl.system.errors import UserError
from megatron_vl.system.json_files import file_sha256
from megatron_vl.training.resolved_run import ResolvedRun
from megatron_vl.weights.run_folder import SavedCheckpoint

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
)
DATASET_FILES = ("dataset.yaml", "split.yaml", ".info.json", "index.uuid", "tars.json")


def read_model_digests(config: TrainConfig, source_checkpoint: SavedCheckpoint | None) -> dict[str, str]:
    """Digests of what every rank reads, by path: the processor's settings, and where the weights come
    from."""
    from converters.peft_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE, is_peft_folder  # they import torch
    from megatron_vl.training.start_weights import hf_digests
    from megatron_vl.weights.manifest import MANIFEST_FILE
    from megatron_vl.weights.weight_reader import find_weights_dir

    files = [Path(config.model.hf) / name for name in PROCESSOR_FILES]
    reads_start_weights = bool(config.lora.rank) or source_checkpoint is None
    weights = [config.model.checkpoint] if reads_start_weights else []
    if source_checkpoint is not None:
        files.append(source_checkpoint.path / "run.json")
    elif is_peft_folder(config.lora.adapter):
        files += [Path(config.lora.adapter) / name for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE)]
    else:
        weights.append(config.lora.adapter)
    folders = [folder for folder in weights if folder and folder != RANDOM_WEIGHTS]
    digests = _digests([*files, *(find_weights_dir(folder) / MANIFEST_FILE for folder in folders)])
    return digests | hf_digests(config, source_checkpoint, reads_start_weights)


def read_loader_digests(config: TrainConfig, description: Description) -> dict[str, str]:
    """Digests of what only ranks that own a loader read: tokenizer, chat template, and the description of
    the data set."""
    files = [Path(config.model.hf) / name for name in TOKENIZER_FILES]
    if config.data.chat_template:  # the name of one that comes with this program is no file, on any node
        files.append(Path(config.data.chat_template))
    return _digests([*files, *_data_files(description)])


def check_same_files(resolved_run: ResolvedRun, owns_loader: bool) -> None:
    try:
        own_digests = read_model_digests(resolved_run.config, resolved_run.source_checkpoint)
    except (OSError, UserError) as error:
        raise RunConfigError(f"{socket.gethostname()}: {error}") from error
    expected_digests = resolved_run.model_digests
    if owns_loader:
        own_digests |= _digests(map(Path, resolved_run.loader_digests))
        expected_digests = expected_digests | resolved_run.loader_digests
    for path, digest in own_digests.items():
        if digest != expected_digests.get(path):
            raise RunConfigError(
                f"{socket.gethostname()}: {path} is not as rank 0 reads it"
                f"{'' if digest else ': it is missing'}. Give all nodes the same files, for instance on"
                " shared storage"
            )


def _data_files(description: Description) -> list[Path]:
    """The files that describe a data set on a disk. An object store is the same one for all nodes."""
    if not isinstance(description.path, Path):
        return []
    if isinstance(description, DatasetDescription):
        return [description.path / METADATA_DIR / name for name in DATASET_FILES]
    inner_files = (file for inner in description.dataset_by_path.values() for file in _data_files(inner))
    return [description.path, *inner_files]


def _digests(files: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of each file, by path; empty for a file that does not exist."""
    digests = {}
    for file_path in files:
        try:
            digests[str(file_path)] = file_sha256(file_path)
        except (FileNotFoundError, NotADirectoryError):  # model.hf may be a config.json
            digests[str(file_path)] = ""
    return digests
