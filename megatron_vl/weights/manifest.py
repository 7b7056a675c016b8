"""Model weights on disk: safetensors files and a manifest, in any tensor x pipeline x expert layout.

A folder of weights holds ``manifest.json`` and either the unsplit tensors
(``weights-00001-of-00003.safetensors``) or one file for each model-parallel rank (``tp00_pp01.safetensors``,
with all virtual chunks of that rank). Experts are in one file for each expert-parallel rank
(``ep00_etp00_pp01.safetensors``), because the mapping of experts to tensor-parallel ranks depends on the
data-parallel size, which weights do not have. Tensors have the canonical names of
:mod:`megatron_vl.spec.tensors`, with global layer numbers. A replicated tensor is in the file of every
tensor-parallel rank of its stage, so a rank reads only one or two files. A tied output layer is not stored:
the last stage reads the embedding from the first stage's file.

:meth:`megatron_vl.weights.weight_reader.WeightReader.read_shard` returns any slice for any layout, whatever
layout is on disk. Before data is returned, it is compared with the manifest's SHA-256, and the manifest with
its own digest, so that damaged data is never used. The mapping from one cut to another is a list of
:class:`~megatron_vl.weights.matrix_blocks.MatrixBlock`, which converters also use. Nothing here imports
Megatron-core, and nothing is unpickled.
"""

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.config import LoraConfig
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.lora import trained_table
from megatron_vl.spec.tensors import UNSHARDED, Sharding, TensorInfo
from megatron_vl.system import durable_files
from megatron_vl.system.json_files import check_format_version, manifest_digest
from megatron_vl.weights.tensor_files import (
    CODE_BY_DTYPE,
    TensorWriter,
    WeightsError,
    dtype_name,
    make_safetensors_header,
    matrix_shape,
    row_regions,
)

WEIGHTS_FORMAT = "megatron-vl-weights"
MANIFEST_VERSION = 1
MANIFEST_FILE = "manifest.json"


def rank_file_name(**ranks: int) -> str:
    """The file of a rank: ``tp00_pp01.safetensors``, or ``ep00_etp00_pp01.safetensors`` for experts."""
    return "_".join(f"{axis}{rank:02d}" for axis, rank in ranks.items()) + ".safetensors"


def file_entry(
    file_name: str,
    stored_tensors: Mapping[str, tuple[torch.dtype, Sequence[int], str]],
    file_ranks: Mapping[str, int],
) -> dict[str, Any]:
    """Makes the manifest's entry for one rank's file.

    Args:
        stored_tensors: name -> (type, stored shape, SHA-256).
        file_ranks: the ranks that the file belongs to: ``tp`` and ``pp``, or ``ep``, ``etp`` and ``pp``.
    """
    tensors = {
        name: {"dtype": dtype_name(dtype), "shape": list(shape), "sha256": digest}
        for name, (dtype, shape, digest) in stored_tensors.items()
    }
    return {"file": file_name, **file_ranks, "tensors": tensors}


def write_rank_file(
    weights_dir: str | Path,
    tensors: Mapping[str, Tensor],
    map_tensors: Callable[..., Iterable[str]] = map,
    **ranks: int,
) -> dict[str, Any]:
    """Writes the dense tensors of a rank, or its experts, atomically and flushes them to the disk.

    Args:
        tensors: canonical name -> this rank's slice, of all virtual chunks, on any device. Experts are
            stacked ``[E / ep, ...]``. Tensors are copied in small pieces.
        map_tensors: writes several tensors at a time if it is the ``map`` of an executor.
        ranks: ``tp`` and ``pp``; for experts ``ep``, ``etp`` and ``pp``.

    Returns:
        The file's entry (plain JSON types) for :func:`write_manifest`.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in CODE_BY_DTYPE:
            valid = ", ".join(map(dtype_name, CODE_BY_DTYPE))
            raise WeightsError(f"tensor {name!r} has type {tensor.dtype}; weights may be {valid}")

    file_path = Path(weights_dir) / rank_file_name(**ranks)
    durable_files.make_dirs(file_path.parent)
    types = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    tensor_writer = TensorWriter(file_path, make_safetensors_header(types, {"format": "pt"}))

    def write(name: str) -> str:
        matrix = tensors[name].detach().reshape(matrix_shape(tensors[name].shape))
        regions = row_regions(tensors[name].shape, tensors[name].element_size())
        return tensor_writer.write_tensor(name, (matrix[r.row : r.row_end] for r in regions))

    try:
        digests = map_tensors(write, tensors)
        written = {name: (*types[name], digest) for name, digest in zip(tensors, digests, strict=True)}
    except BaseException:
        tensor_writer.abort()
        raise

    tensor_writer.commit()
    return file_entry(file_path.name, written, ranks)


def write_manifest(
    weights_dir: str | Path,
    spec: ModelSpec,
    layout: Layout | None,
    rank_entries: Sequence[dict],
    weights_origin: dict | None = None,
    lora: LoraConfig | None = None,
) -> str:
    """Checks that the entries make up the whole model, then writes ``manifest.json`` as the last file.

    Args:
        layout: None for unsplit weights.
        rank_entries: results of :func:`write_rank_file` on all ranks.
        weights_origin: their origin. A reader compares its ``step`` with the name of the folder.
        lora: for the factors of adapters, the adapters; None for a whole model.

    Returns:
        The manifest's digest, which identifies these weights.
    """
    if not spec.hf_config or read_spec(spec.hf_config) != spec.with_mtp(False):
        raise WeightsError(
            "the model differs from its hf_config; write weights with the config that describes them"
        )

    lora = lora or LoraConfig()
    manifest = {
        "format": WEIGHTS_FORMAT,
        "version": MANIFEST_VERSION,
        "kind": "full" if layout is None else "shards",
        "family": spec.family,
        "layout": layout and layout.as_dict(),
        "origin": weights_origin or {},
        # What the factors in the files belong to; null for a whole model.
        "lora": dataclasses.asdict(dataclasses.replace(lora, adapter="")) if lora.rank else None,
        # The reader needs no other file to know the model.
        "hf_config": spec.hf_config,
        **({"mtp": True} if spec.language.has_mtp else {}),
        "tensors": _check_entries(trained_table(spec, lora), layout, rank_entries),
        # Sorted, so that the manifest does not depend on the order in which ranks finish.
        "files": {
            entry["file"]: {
                **{axis: entry[axis] for axis in ("tp", "ep", "etp", "pp") if axis in entry},
                "tensors": {name: tensor["sha256"] for name, tensor in entry["tensors"].items()},
            }
            for entry in sorted(rank_entries, key=lambda entry: entry["file"])
        },
    }
    manifest["digest"] = manifest_digest(manifest)
    # The folder counts as weights from here on, so this file must be written as a whole or not at all.
    durable_files.write_file(Path(weights_dir) / MANIFEST_FILE, json.dumps(manifest, indent=1).encode())
    return str(manifest["digest"])


def locate_shards(
    tensor_infos: Mapping[str, TensorInfo], layout: Layout | None, file_entries: Iterable[Mapping[str, Any]]
) -> dict[tuple[int, str], str]:
    """(part, tensor) -> file, after checking that the files hold every part of every tensor once.

    Args:
        file_entries: for each file its name, its ranks and its tensors, as :func:`file_entry` makes it.
    """
    sharding = layout.sharding if layout else UNSHARDED
    file_by_shard: dict[tuple[int, str], str] = {}
    for entry in file_entries:
        for tensor_name in entry["tensors"]:
            tensor_info = tensor_infos.get(tensor_name)
            shard_index = None if tensor_info is None else _shard_index_in_file(tensor_info, entry, layout)
            if tensor_info is None or shard_index is None:
                raise WeightsError(
                    f"tensor {tensor_name!r} does not belong in {entry['file']}, pipeline rank {entry['pp']}"
                )
            if (shard_index, tensor_name) in file_by_shard:
                rank_text = _describe_rank(tensor_info, shard_index, sharding)
                raise WeightsError(f"tensor {tensor_name!r} of {rank_text} is in two files")
            file_by_shard[shard_index, tensor_name] = entry["file"]

    for tensor_name, tensor_info in tensor_infos.items():
        for shard_index in range(sharding.num_shards(tensor_info)):
            if (shard_index, tensor_name) not in file_by_shard:
                rank_text = _describe_rank(tensor_info, shard_index, sharding)
                pipeline_stage = layout.owning_pipeline_rank(tensor_info) if layout else 0
                raise WeightsError(
                    f"tensor {tensor_name!r} is missing on {rank_text}, pipeline rank {pipeline_stage}"
                )
    if len(file_by_shard) != sum(map(sharding.num_shards, tensor_infos.values())):
        raise WeightsError(f"there are files of more ranks than the layout {sharding} has")
    return file_by_shard


def _shard_index_in_file(
    tensor_info: TensorInfo, entry: Mapping[str, Any], layout: Layout | None
) -> int | None:
    """Which part of a tensor the file of ``entry`` may hold; None: the tensor belongs elsewhere."""
    if (layout.owning_pipeline_rank(tensor_info) if layout else 0) != entry["pp"]:
        return None
    if layout is None or not tensor_info.num_experts:
        return entry.get("tp")
    if "ep" not in entry:
        return None
    return layout.sharding.shard_index(tensor_info, ep_rank=entry["ep"], etp_rank=entry["etp"])


def _describe_rank(tensor_info: TensorInfo, shard_index: int, sharding: Sharding) -> str:
    if not tensor_info.num_experts:
        return f"tensor rank {shard_index}"
    tensor_rank = f", expert tensor rank {shard_index % sharding.etp}" if sharding.etp > 1 else ""
    return f"expert rank {shard_index // sharding.etp}{tensor_rank}"


def _check_entries(
    tensor_infos: Mapping[str, TensorInfo], layout: Layout | None, rank_entries: Sequence[dict]
) -> dict[str, dict[str, Any]]:
    """The manifest's tensor table. Every part of every tensor must be there once, with its shape and type."""
    sharding = layout.sharding if layout else UNSHARDED
    file_by_shard = locate_shards(tensor_infos, layout, rank_entries)
    tensors_by_file = {entry["file"]: entry["tensors"] for entry in rank_entries}
    tensors = {}
    for name, info in tensor_infos.items():
        files = [file_by_shard[shard_index, name] for shard_index in range(sharding.num_shards(info))]
        dtype = _common_dtype(info, [tensors_by_file[file][name] for file in files], sharding)
        tensors[name] = {"dtype": dtype, "shape": list(info.shape), "split": info.parallel_style}
    return tensors


def _common_dtype(tensor_info: TensorInfo, part_entries: Sequence[dict[str, Any]], sharding: Sharding) -> str:
    """The type that the parts of a tensor have in common, after checking their shapes."""
    shard_shape = list(tensor_info.shard_shape(sharding))
    dtypes, digests = ({part[key] for part in part_entries} for key in ("dtype", "sha256"))
    for shard_index, part_entry in enumerate(part_entries):
        if part_entry["shape"] != shard_shape:
            raise WeightsError(
                f"tensor {tensor_info.name!r} has shape {part_entry['shape']} "
                f"on {_describe_rank(tensor_info, shard_index, sharding)}; it should be {shard_shape}"
            )

    if len(dtypes) > 1:
        raise WeightsError(f"tensor {tensor_info.name!r} has different types on its ranks")
    # Each expert-parallel rank has other experts.
    if tensor_info.parallel_style == "replicated" and not tensor_info.num_experts and len(digests) > 1:
        warnings.warn(
            f"replicated tensor {tensor_info.name!r} differs between tensor ranks; rank 0's is used",
            stacklevel=4,
        )
    return dtypes.pop()


def read_manifest(manifest_path: Path) -> dict[str, Any]:
    """Reads a manifest. Raises WeightsError if it is no manifest, has another version, or was changed."""
    try:
        manifest = json.loads(manifest_path.read_text())
    except ValueError as error:
        raise WeightsError(f"{manifest_path} is not JSON ({error}); write the weights again") from error

    if not isinstance(manifest, dict) or manifest.get("format") != WEIGHTS_FORMAT:
        raise WeightsError(f"{manifest_path} is not a manifest of {WEIGHTS_FORMAT!r}")
    check_format_version(
        manifest_path, manifest.get("version"), MANIFEST_VERSION, "convert again", WeightsError
    )

    if manifest.get("digest") != manifest_digest(manifest):
        raise WeightsError(
            f"{manifest_path} was changed after it was written (its digest differs); write the weights again"
        )

    return manifest
