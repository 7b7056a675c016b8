"""Model weights on disk: safetensors files and a manifest, in any tensor x pipeline x expert layout.

A folder of weights holds ``manifest.json`` and either the unsplit tensors
(``weights-00001-of-00003.safetensors``) or one file for each model-parallel rank (``tp00_pp01.safetensors``,
with all virtual chunks of that rank). Experts are in one file for each expert-parallel rank
(``ep00_etp00_pp01.safetensors``), because the mapping of experts to tensor-parallel ranks depends on the
data-parallel size, which weights do not have. Tensors have the canonical names of
:mod:`megatron_vl.spec.tensors`, with global layer numbers. A replicated tensor is in the file of every
tensor-parallel rank of its stage, so a rank reads only one or two files. A tied output layer is not stored:
the last stage reads the embedding from the first stage's file.

:meth:`megatron_vl.weights.reader.WeightReader.get` returns any slice for any layout, whatever layout is on
disk. Before data is returned, it is compared with the manifest's SHA-256, and the manifest with its own
digest, so that damaged data is never used. The mapping from one cut to another is a list of
:class:`~megatron_vl.weights.blocks.Block`, which converters also use. Nothing here imports Megatron-core, and
nothing is unpickled.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl import durable
from megatron_vl.json_files import check_version, manifest_digest
from megatron_vl.spec.families import ConfigError, ModelSpec, read_spec
from megatron_vl.spec.layout import Layout, read_layout
from megatron_vl.spec.tensors import WHOLE, Cut, LayoutError, TensorInfo, tensor_table
from megatron_vl.weights.tensor_files import (
    CODES,
    NAMES,
    TensorWriter,
    WeightsError,
    dtype_name,
    make_header,
    matrix_shape,
    row_regions,
)

FORMAT = "megatron-vl-weights"
VERSION = 1
MANIFEST = "manifest.json"
UNFINISHED = "unfinished.jsonl"
"""Journal of an unfinished conversion (see :mod:`converters.restart`). A folder that has a journal and no
manifest is not a checkpoint."""


def rank_file_name(tp_rank: int, pp_rank: int) -> str:
    return f"tp{tp_rank:02d}_pp{pp_rank:02d}.safetensors"


def expert_file_name(ep_rank: int, etp_rank: int, pp_rank: int) -> str:
    return f"ep{ep_rank:02d}_etp{etp_rank:02d}_pp{pp_rank:02d}.safetensors"


def file_entry(
    file: str, tensors: Mapping[str, tuple[torch.dtype, Sequence[int], str]], ranks: Mapping[str, int]
) -> dict[str, Any]:
    """Makes the manifest's entry for one rank's file.

    Args:
        tensors: name -> (type, stored shape, SHA-256).
        ranks: the ranks that the file belongs to: ``tp`` and ``pp``, or ``ep``, ``etp`` and ``pp``.
    """
    table = {
        name: {"dtype": dtype_name(dtype), "shape": list(shape), "sha256": digest}
        for name, (dtype, shape, digest) in tensors.items()
    }
    return {"file": file, **ranks, "tensors": table}


def write_rank_file(
    folder: str | Path, tp_rank: int, pp_rank: int, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Writes the dense tensors of one model-parallel rank atomically and flushes them to the disk.

    Args:
        tensors: canonical name -> this rank's slice, of all virtual chunks, on any device. They are copied in
            small pieces.

    Returns:
        The rank's entry (plain JSON types) for :func:`write_manifest`.

    Raises:
        WeightsError: weights cannot have the type of a tensor.
    """
    return _write_file(
        Path(folder) / rank_file_name(tp_rank, pp_rank), tensors, {"tp": tp_rank, "pp": pp_rank}
    )


def write_expert_file(
    folder: str | Path, ep_rank: int, etp_rank: int, pp_rank: int, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Writes the expert tensors of one expert-parallel rank, stacked ``[E / ep, ...]``.

    Otherwise, it is the same as :func:`write_rank_file`.
    """
    path = Path(folder) / expert_file_name(ep_rank, etp_rank, pp_rank)
    return _write_file(path, tensors, {"ep": ep_rank, "etp": etp_rank, "pp": pp_rank})


def _write_file(path: Path, tensors: Mapping[str, Tensor], ranks: Mapping[str, int]) -> dict[str, Any]:
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise WeightsError(
                f"tensor {name!r} has type {tensor.dtype}; weights may be {', '.join(map(dtype_name, CODES))}"
            )

    path.parent.mkdir(parents=True, exist_ok=True)
    header = make_header(
        {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, {"format": "pt"}
    )
    writer = TensorWriter(path, header)
    written = {}

    try:
        for name, tensor in tensors.items():
            matrix = tensor.detach().reshape(matrix_shape(tensor.shape))
            chunks = (matrix[w.row : w.row_end] for w in row_regions(tensor.shape, tensor.element_size()))
            written[name] = (tensor.dtype, tensor.shape, writer.write(name, chunks))
    except BaseException:
        writer.abort()
        raise

    writer.commit(sync=True)
    return file_entry(path.name, written, ranks)


def write_manifest(
    folder: str | Path,
    spec: ModelSpec,
    layout: Layout | None,
    rank_entries: Sequence[dict],
    origin: dict | None = None,
) -> str:
    """Checks that the entries make up the whole model, then writes ``manifest.json`` as the last file.

    Args:
        layout: None for unsplit weights.
        rank_entries: the results of :func:`write_rank_file` and :func:`write_expert_file` on all ranks, in
            any order.
        origin: facts about the origin of the weights. A reader compares ``step`` with the name of the folder.

    Returns:
        The manifest's digest, which identifies these weights.

    Raises:
        WeightsError: a tensor is missing, unexpected, or of a wrong shape, or its parts have different types.
            The message names it.
    """
    if not spec.hf_config or read_spec(spec.hf_config) != spec:
        raise WeightsError(
            "the model differs from its hf_config; write weights with the config that describes them"
        )

    tensors = _check_entries(spec, layout, rank_entries)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "kind": "full" if layout is None else "shards",
        "family": spec.family,
        "layout": layout and layout.as_dict(),
        "origin": origin or {},
        "hf_config": spec.hf_config,
        "tensors": tensors,
        "files": {
            entry["file"]: {
                **{rank: entry[rank] for rank in ("tp", "ep", "etp", "pp") if rank in entry},
                "tensors": {name: tensor["sha256"] for name, tensor in entry["tensors"].items()},
            }
            for entry in sorted(rank_entries, key=lambda entry: entry["file"])
        },
    }

    manifest["digest"] = manifest_digest(manifest)
    durable.write(Path(folder) / MANIFEST, json.dumps(manifest, indent=1).encode())
    return str(manifest["digest"])


def _part(info: TensorInfo | None, entry: Mapping[str, Any], layout: Layout | None) -> int | None:
    """The part of a tensor that the file of ``entry`` may hold; None if it does not belong in that file."""
    if info is None or layout is None or not info.experts:
        return entry.get("tp")
    return layout.cut.part(info, ep_rank=entry["ep"], etp_rank=entry["etp"]) if "ep" in entry else None


def _rank(info: TensorInfo, part: int, cut: Cut) -> str:
    """The name of the rank that holds a part, for messages."""
    if not info.experts:
        return f"tensor rank {part}"
    tensor_rank = f", expert tensor rank {part % cut.etp}" if cut.etp > 1 else ""
    return f"expert rank {part // cut.etp}{tensor_rank}"


def _check_entries(
    spec: ModelSpec, layout: Layout | None, entries: Sequence[dict]
) -> dict[str, dict[str, Any]]:
    """Checks that every part of every tensor is there once, with its shape and type.

    Returns:
        The manifest's tensor table.
    """
    infos = tensor_table(spec)
    cut = layout.cut if layout else WHOLE
    stored: dict[tuple[int, int, str], dict[str, Any]] = {}
    for entry in entries:
        for name, tensor in entry["tensors"].items():
            part = _part(infos.get(name), entry, layout)
            if part is None:
                raise WeightsError(f"tensor {name!r} does not belong in {entry['file']}")
            if (part, entry["pp"], name) in stored:
                raise WeightsError(f"tensor {name!r} exists twice, the second time in {entry['file']}")
            stored[part, entry["pp"], name] = tensor

    table = {}
    for name, info in infos.items():
        stage = layout.stage_of(info) if layout else 0
        shape = list(info.shard_shape(cut))
        found = []
        for part in range(cut.parts(info)):
            if (part, stage, name) not in stored:
                raise WeightsError(
                    f"tensor {name!r} is missing on {_rank(info, part, cut)}, pipeline rank {stage}"
                )
            tensor = stored.pop((part, stage, name))
            if tensor["shape"] != shape:
                where = _rank(info, part, cut)
                raise WeightsError(
                    f"tensor {name!r} has shape {tensor['shape']} on {where}; it should be {shape}"
                )
            found.append(tensor)

        if len({tensor["dtype"] for tensor in found}) > 1:
            raise WeightsError(f"tensor {name!r} has different types on its ranks")
        if info.split == "replicated" and len({tensor["sha256"] for tensor in found}) > 1:
            warnings.warn(
                f"replicated tensor {name!r} differs between tensor ranks; rank 0's is used",
                stacklevel=3,
            )

        table[name] = {"dtype": found[0]["dtype"], "shape": list(info.shape), "split": info.split}

    if stored:
        part, stage, name = next(iter(stored))
        raise WeightsError(f"tensor {name!r} does not belong on part {part} of pipeline rank {stage}")

    return table


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads a manifest.

    Raises:
        WeightsError: the file is not a manifest, has another version, or was changed.
    """
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON ({error}); write the weights again") from error

    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise WeightsError(f"{path} is not a manifest of {FORMAT!r}")
    check_version(path, manifest.get("version"), VERSION, "convert again", WeightsError)

    for field in ("kind", "family", "layout", "hf_config", "tensors", "files", "digest"):
        if field not in manifest:
            raise WeightsError(f"{path}: field {field!r} is missing")

    if manifest["digest"] != manifest_digest(manifest):
        raise WeightsError(
            f"{path} was changed after it was written (its digest differs); write the weights again"
        )

    return manifest


def _read_layout(spec: ModelSpec, manifest: dict[str, Any]) -> Layout | None:
    """Reads the layout of a manifest, and checks that the other fields agree with it and with the config."""
    layout, kind, family = manifest["layout"], manifest["kind"], manifest["family"]
    if family != spec.family:
        raise ConfigError(f"family is {family!r}, but hf_config describes a {spec.family} model")
    if kind != ("full" if layout is None else "shards"):
        raise LayoutError(f"kind is {kind!r}, but layout is {layout}")
    return None if layout is None else read_layout(spec, layout)


def _check_tensor_table(path: Path, manifest: dict[str, Any], table: Mapping[str, TensorInfo]) -> None:
    """Raises :class:`WeightsError` unless the manifest's tensors are those of its config."""
    expected = {name: {"shape": list(info.shape), "split": info.split} for name, info in table.items()}
    stated = {name: {"shape": t["shape"], "split": t["split"]} for name, t in manifest["tensors"].items()}
    for name in sorted(expected.keys() | stated.keys()):
        if expected.get(name) != stated.get(name):
            raise WeightsError(
                f"{path}: tensor {name!r} is {stated.get(name)}; its config says {expected.get(name)}"
            )
        if manifest["tensors"][name]["dtype"] not in NAMES:
            raise WeightsError(f"{path}: tensor {name!r} has type {manifest['tensors'][name]['dtype']!r}")
