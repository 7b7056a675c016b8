"""Model weights on disk: safetensors files and a manifest, in any tensor x pipeline x expert layout.

A folder of weights holds ``manifest.json`` and either the unsplit tensors (``weights-00001-of-00003.safetensors``) or
one file for each model-parallel rank (``tp00_pp01.safetensors``, all virtual chunks of that rank) and, for models with
experts, one for each expert-parallel rank (``ep00_etp00_pp01.safetensors``, only experts): which tensor ranks hold which
experts depends on the data-parallel size, which weights do not have. Tensors carry the canonical names of
:mod:`megatron_vl.spec.tensors` with global layer numbers. A replicated tensor is in the file of every tensor-parallel
rank of its stage, so a rank reads one file, or two; a tied output layer is not stored (the last stage reads the embedding
from the first stage's file).

Whatever lies on disk, :meth:`WeightReader.get` gives any slice for any layout. What is read is compared with
the manifest's SHA-256 first, and the manifest with a digest of its own: nothing damaged is handed out.
How one cut maps to another is written as :class:`Block` lists, rectangles of a matrix: converters use the same ones.
Nothing here imports Megatron-core, and nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vl import durable
from megatron_vl.json_files import manifest_digest
from megatron_vl.spec.families import ConfigError, ModelSpec, read_spec
from megatron_vl.spec.layout import Layout, read_layout
from megatron_vl.spec.tensors import WHOLE, Cut, LayoutError, TensorInfo, check_cut, tensor_table
from megatron_vl.weights import run_folder
from megatron_vl.weights.tensor_files import (
    CODES,
    NAMES,
    TensorReader,
    TensorWriter,
    WeightsError,
    Window,
    dtype_name,
    make_header,
    matrix_shape,
    row_windows,
)

FORMAT = "megatron-vl-weights"
VERSION = 2
"""2 added the manifest's own digest."""
MANIFEST = "manifest.json"
UNFINISHED = "unfinished.jsonl"
"""Journal of a conversion under way (see :mod:`converters.restart`): who finds it without a manifest finds no checkpoint."""


# --- Rectangles -----------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A rectangle of ``rows`` x ``cols`` that a whole matrix and one of its parts have in common."""

    part: str | int
    rows: int
    cols: int
    row: int = 0
    """First row in the whole; ``col`` likewise, ``part_row`` and ``part_col`` in the part."""
    col: int = 0
    part_row: int = 0
    part_col: int = 0
    transposed: bool = False
    """Whether the part has the rectangle with rows and columns changed, ``cols`` x ``rows``."""

    def inverted(self, whole: str | int) -> Block:
        """The same rectangle seen from the part: ``whole`` becomes the part."""
        if self.transposed:
            return Block(whole, self.cols, self.rows, self.part_row, self.part_col, self.row, self.col, True)
        return Block(whole, self.rows, self.cols, self.part_row, self.part_col, self.row, self.col)


def gather(blocks: Sequence[Block], window: Window, read: Callable[[str | int, Window], Tensor], dtype: torch.dtype) -> Tensor:
    """A window of a matrix made of ``blocks``; what no block covers is zero.

    Args:
        read: gives a window of a part, as a matrix.

    Returns:
        ``[rows, cols]`` of ``dtype``; without a copy when one block covers the window and has that type.
    """
    out: Tensor | None = None
    for block in blocks:
        top, bottom = max(window.row, block.row), min(window.row_end, block.row + block.rows)
        left, right = max(window.col, block.col), min(window.col_end, block.col + block.cols)
        if top >= bottom or left >= right:
            continue
        data = _read_block(block, Window(top, bottom, left, right), read)
        if (top, bottom, left, right) == window and data.dtype == dtype and not block.transposed:
            return data
        if out is None:
            out = torch.zeros(window.row_end - window.row, window.col_end - window.col, dtype=dtype)
        _copy(data, out[top - window.row : bottom - window.row, left - window.col : right - window.col], block.transposed)
    return out if out is not None else torch.zeros(window.row_end - window.row, window.col_end - window.col, dtype=dtype)


def _copy(data: Tensor, out: Tensor, transposed: bool) -> None:
    """Copies a matrix; a transposed one in strips that fit the cache, four times as fast, without a copy in between."""
    strip = 64 if transposed else max(1, data.shape[1])
    for col in range(0, data.shape[1], strip):
        out[:, col : col + strip] = data[:, col : col + strip]


def _read_block(block: Block, window: Window, read: Callable[[str | int, Window], Tensor]) -> Tensor:
    """A window (of the whole, within ``block``) from the part."""
    if block.transposed:
        down, across = block.part_row - block.col, block.part_col - block.row
        turned = Window(window.col + down, window.col_end + down, window.row + across, window.row_end + across)
        return read(block.part, turned).t()
    down, across = block.part_row - block.row, block.part_col - block.col
    return read(block.part, Window(window.row + down, window.row_end + down, window.col + across, window.col_end + across))


@lru_cache(maxsize=256)  # asked for with every window, and a tensor of many experts has many
def shard_blocks(info: TensorInfo, cut: Cut) -> tuple[Block, ...]:
    """How the full matrix is made of its parts (:attr:`Block.part` is the number of the part, see :meth:`Cut.part`).

    A replicated tensor is taken from part 0.
    """
    rows, cols = matrix_shape(info.shape)
    if info.experts:
        return tuple(_expert_blocks(info, cut))
    if info.split == "replicated":
        return (Block(0, rows, cols),)
    tp = cut.tp
    if info.split == "row":
        width = cols // tp
        return tuple(Block(t, rows, width, col=t * width) for t in range(tp))
    if info.split == "column":
        height = rows // tp
        return tuple(Block(t, height, cols, row=t * height) for t in range(tp))
    half, height = rows // 2, rows // 2 // tp
    return tuple(Block(t, height, cols, row=i * half + t * height, part_row=i * height) for i in (0, 1) for t in range(tp))


def _expert_blocks(info: TensorInfo, cut: Cut) -> list[Block]:
    """The blocks of one expert, once for each; runs of whole experts are one block."""
    one = dataclasses.replace(info, shape=info.shape[1:], experts=0)
    rows, part_rows, run = one.shape[0], one.shard_shape(Cut(cut.etp))[0], info.experts // cut.ep
    blocks = [
        block._replace(
            part=expert // run * cut.etp + int(block.part),
            row=block.row + expert * rows,
            part_row=block.part_row + expert % run * part_rows,
        )
        for expert in range(info.experts)
        for block in shard_blocks(one, Cut(cut.etp))
    ]
    joined: list[Block] = []
    for block in sorted(blocks, key=lambda block: (block.part, block.part_row)):
        if joined and (last := joined[-1])._replace(rows=0) == block._replace(
            rows=0, row=block.row - last.rows, part_row=block.part_row - last.rows
        ):
            joined[-1] = last._replace(rows=last.rows + block.rows)
        else:
            joined.append(block)
    return joined


def part_blocks(info: TensorInfo, part: int, cut: Cut) -> list[Block]:
    """How one part is made of the full matrix: the inverse of :func:`shard_blocks`."""
    source = 0 if info.split == "replicated" else part
    return [block.inverted(info.name) for block in shard_blocks(info, cut) if block.part == source]


def shard(tensor: Tensor, info: TensorInfo, part: int, cut: Cut) -> Tensor:
    """One part (see :meth:`Cut.part`) of a full tensor; a view where the cut allows it."""
    axis, ways = (1 if info.split == "row" else 0), cut.tp
    if info.experts:
        tensor = tensor.chunk(cut.ep)[part // cut.etp]
        axis, ways, part = axis + 1, cut.etp, part % cut.etp
    if info.split == "replicated" or ways == 1:
        return tensor
    if info.split == "gated":
        return torch.cat([half.chunk(ways, axis)[part] for half in tensor.chunk(2, axis)], axis)
    return tensor.chunk(ways, axis)[part]


def unshard(shards: Sequence[Tensor], info: TensorInfo, cut: Cut) -> Tensor:
    """The full tensor of all parts in order: the inverse of :func:`shard`."""
    if info.experts:
        one = dataclasses.replace(info, shape=info.shape[1:], experts=0)
        runs = [zip(*shards[at : at + cut.etp], strict=True) for at in range(0, len(shards), cut.etp)]
        return torch.stack([unshard(parts, one, Cut(cut.etp)) for run in runs for parts in run])
    if info.split == "replicated" or cut.tp == 1:
        return shards[0]
    if info.split == "gated":
        halves = [part.chunk(2) for part in shards]
        return torch.cat([half[i] for i in (0, 1) for half in halves])
    return torch.cat(list(shards), dim=1 if info.split == "row" else 0)


# --- Writing a folder -----------------------------------------------------------------------------------------------


def rank_file_name(tp_rank: int, pp_rank: int) -> str:
    return f"tp{tp_rank:02d}_pp{pp_rank:02d}.safetensors"


def expert_file_name(ep_rank: int, etp_rank: int, pp_rank: int) -> str:
    return f"ep{ep_rank:02d}_etp{etp_rank:02d}_pp{pp_rank:02d}.safetensors"


def file_entry(
    file: str, tensors: Mapping[str, tuple[torch.dtype, Sequence[int], str]], place: Mapping[str, int]
) -> dict[str, Any]:
    """What the manifest needs to know of one rank's file.

    Args:
        tensors: name -> (type, stored shape, SHA-256).
        place: the ranks whose file it is: ``tp`` and ``pp``, or ``ep``, ``etp`` and ``pp``.
    """
    table = {
        name: {"dtype": dtype_name(dtype), "shape": list(shape), "sha256": digest}
        for name, (dtype, shape, digest) in tensors.items()
    }
    return {"file": file, **place, "tensors": table}


def write_rank_file(folder: str | Path, tp_rank: int, pp_rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes the dense tensors of one model-parallel rank, atomically and synced to disk.

    Args:
        tensors: canonical name -> this rank's slice, of all virtual chunks; on any device, copied in small pieces.

    Returns:
        The rank's entry (plain JSON types) for :func:`write_manifest`.
    """
    return _write_file(Path(folder) / rank_file_name(tp_rank, pp_rank), tensors, {"tp": tp_rank, "pp": pp_rank})


def write_expert_file(
    folder: str | Path, ep_rank: int, etp_rank: int, pp_rank: int, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """:func:`write_rank_file` for the expert tensors of one expert-parallel rank, stacked ``[E / ep, ...]``."""
    path = Path(folder) / expert_file_name(ep_rank, etp_rank, pp_rank)
    return _write_file(path, tensors, {"ep": ep_rank, "etp": etp_rank, "pp": pp_rank})


def _write_file(path: Path, tensors: Mapping[str, Tensor], place: Mapping[str, int]) -> dict[str, Any]:
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise WeightsError(f"tensor {name!r} has type {tensor.dtype}; weights may be {', '.join(map(dtype_name, CODES))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    header = make_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, {"format": "pt"})
    writer = TensorWriter(path, header)
    written = {}
    try:
        for name, tensor in tensors.items():
            matrix = tensor.detach().reshape(matrix_shape(tensor.shape))
            chunks = (matrix[w.row : w.row_end] for w in row_windows(tensor.shape, tensor.element_size()))
            written[name] = (tensor.dtype, tensor.shape, writer.write(name, chunks))
    except BaseException:
        writer.abort()
        raise
    writer.commit(sync=True)
    return file_entry(path.name, written, place)


def write_manifest(
    folder: str | Path, spec: ModelSpec, layout: Layout | None, rank_entries: Sequence[dict], origin: dict | None = None
) -> str:
    """Writes ``manifest.json``, last of all files, after checking that the entries are the whole model.

    Args:
        layout: None for unsplit weights.
        rank_entries: what :func:`write_rank_file` and :func:`write_expert_file` returned on each rank, in any order.
        origin: anything worth keeping about where the weights came from; a run's ``step`` is compared with its folder's.

    Returns:
        The manifest's digest, which stands for these weights.

    Raises:
        WeightsError: a tensor or file is missing, too many, of another shape or of two types; the message names it.
    """
    if not spec.hf_config or read_spec(spec.hf_config) != spec:
        raise WeightsError("the model differs from its hf_config; weights are written with the config that describes them")
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
    """Which part of a tensor the file of ``entry`` holds; None where it is a file of ranks that hold no part of it."""
    if info is None or layout is None or not info.experts:
        return entry.get("tp")
    return layout.cut.part(info, ep_rank=entry["ep"], etp_rank=entry["etp"]) if "ep" in entry else None


def _rank(info: TensorInfo, part: int, cut: Cut) -> str:
    """The words for who holds a part."""
    if not info.experts:
        return f"tensor rank {part}"
    return f"expert rank {part // cut.etp}" + (f", expert tensor rank {part % cut.etp}" if cut.etp > 1 else "")


def _check_entries(spec: ModelSpec, layout: Layout | None, entries: Sequence[dict]) -> dict[str, dict[str, Any]]:
    """The manifest's tensor table, once every tensor is found where it belongs, with its shape and one type."""
    infos, cut = tensor_table(spec), layout.cut if layout else WHOLE
    stored: dict[tuple[int, int, str], dict[str, Any]] = {}
    for entry in entries:
        for name, tensor in entry["tensors"].items():
            part = _part(infos.get(name), entry, layout)
            if part is None:
                raise WeightsError(f"tensor {name!r} does not belong in {entry['file']}")
            if (part, entry["pp"], name) in stored:
                raise WeightsError(f"tensor {name!r} is there twice: a second time in {entry['file']}")
            stored[part, entry["pp"], name] = tensor
    table = {}
    for name, info in infos.items():
        stage = layout.stage_of(info) if layout else 0
        shape = list(info.shard_shape(cut))
        found = []
        for part in range(cut.parts(info)):
            if (part, stage, name) not in stored:
                raise WeightsError(f"tensor {name!r} is missing in {_rank(info, part, cut)}, pipeline rank {stage}")
            tensor = stored.pop((part, stage, name))
            if tensor["shape"] != shape:
                where = _rank(info, part, cut)
                raise WeightsError(f"tensor {name!r} has shape {tensor['shape']} in {where}; it should be {shape}")
            found.append(tensor)
        if len({tensor["dtype"] for tensor in found}) > 1:
            raise WeightsError(f"tensor {name!r} has different types on its ranks")
        if info.split == "replicated" and len({tensor["sha256"] for tensor in found}) > 1:
            warnings.warn(f"replicated tensor {name!r} differs between tensor ranks; rank 0's counts", stacklevel=3)
        table[name] = {"dtype": found[0]["dtype"], "shape": list(info.shape), "split": info.split}
    if stored:
        part, stage, name = next(iter(stored))
        raise WeightsError(f"tensor {name!r} does not belong on part {part} of pipeline rank {stage}")
    return table


# --- Reading a folder -----------------------------------------------------------------------------------------------


def find_weights(path: str | Path) -> Path:
    """The weights folder meant by ``path``: itself, a step folder of a run, or a run folder (its latest checkpoint).

    Raises:
        FileNotFoundError: nothing there is a folder of weights; the message says what was looked for.
        WeightsError: it cannot be known which checkpoint of a run is the latest.
    """
    path = Path(path)
    for folder in (path, path / "weights"):
        if (folder / MANIFEST).is_file():
            return folder
    if (path / UNFINISHED).is_file() and not (path / run_folder.LATEST).is_file():
        raise FileNotFoundError(f"{path} holds a conversion that is not finished; run it again to let it go on")
    try:
        saved = run_folder.latest(path)
    except run_folder.StepMissingError as error:
        raise FileNotFoundError(str(error)) from error
    except run_folder.CheckpointError as error:
        raise WeightsError(str(error)) from error
    if saved is None:
        looks = f"holds no weights: looked for {MANIFEST}, weights/{MANIFEST} and {run_folder.LATEST}"
        if (path / "config.json").is_file():
            looks = f"is a Hugging Face folder, not Megatron weights; `megatron-vl convert --hf {path} --out DIR` writes those"
        raise FileNotFoundError(f"{path} {looks}")
    weights = saved.path / "weights"
    if not (weights / MANIFEST).is_file():
        raise FileNotFoundError(f"{weights / MANIFEST} is missing, though step {saved.step} is the latest of {path}")
    return weights


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest as it was written. Raises :class:`WeightsError` when it is not one, or not as it was written."""
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON ({error}); write the weights again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise WeightsError(f"{path} is not a manifest of {FORMAT!r}")
    if manifest.get("version") != VERSION:
        raise WeightsError(f"{path} has version {manifest.get('version')!r}; this program reads version {VERSION}: convert again")
    for field in ("kind", "family", "layout", "hf_config", "tensors", "files", "digest"):
        if field not in manifest:
            raise WeightsError(f"{path}: field {field!r} is missing")
    if manifest["digest"] != manifest_digest(manifest):
        raise WeightsError(f"{path} was changed after it was written (its digest differs); write the weights again")
    return manifest


def _read_layout(spec: ModelSpec, manifest: dict[str, Any]) -> Layout | None:
    """The layout in a manifest, when its other fields agree with it and with the config."""
    layout, kind, family = manifest["layout"], manifest["kind"], manifest["family"]
    if family != spec.family:
        raise ConfigError(f"family is {family!r}, but hf_config is of a {spec.family} model")
    if kind != ("full" if layout is None else "shards"):
        raise LayoutError(f"kind is {kind!r}, but layout is {layout}")
    return None if layout is None else read_layout(spec, layout)


def _check_tensor_table(path: Path, manifest: dict[str, Any], table: Mapping[str, TensorInfo]) -> None:
    """Raises :class:`WeightsError` unless the manifest's tensors are those of its config."""
    expected = {name: {"shape": list(info.shape), "split": info.split} for name, info in table.items()}
    stated = {name: {"shape": t["shape"], "split": t["split"]} for name, t in manifest["tensors"].items()}
    for name in sorted(expected.keys() | stated.keys()):
        if expected.get(name) != stated.get(name):
            raise WeightsError(f"{path}: tensor {name!r} is {stated.get(name)}, its config says {expected.get(name)}")
        if manifest["tensors"][name]["dtype"] not in NAMES:
            raise WeightsError(f"{path}: tensor {name!r} has type {manifest['tensors'][name]['dtype']!r}")


class WeightReader:
    """Reads weights of any layout as if of any other.

    Args:
        verify: compare each stored tensor with its SHA-256 when it is first touched, before any of it is handed out.
            A slice of a larger stored tensor costs a pass over all of that (1 to 2 GB/s a core).

    Attributes:
        path: the folder of weights (a run or step folder is resolved to it).
        manifest: the manifest as read.
        spec: the model.
        layout: None for unsplit weights; ``cut``: what it means for one stage.
        table: canonical name -> :class:`TensorInfo`.

    Raises:
        FileNotFoundError: no weights there.
        WeightsError: the manifest or a file does not fit; the message names it.
    """

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        self.path = find_weights(path)
        self.manifest = read_manifest(self.path / MANIFEST)
        try:
            self.spec = read_spec(self.manifest["hf_config"])
            self.layout = _read_layout(self.spec, self.manifest)
            self.cut = self.layout.cut if self.layout else WHOLE
            self.table = tensor_table(self.spec)
            self._where = self._place_files()
            self._check_step()
        except (WeightsError, FileNotFoundError):
            raise
        except (ConfigError, LayoutError) as error:
            raise WeightsError(f"{self.path / MANIFEST}: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # a field of another type than we write
            raise WeightsError(f"{self.path / MANIFEST} is damaged: {type(error).__name__}: {error}") from error
        self._verify = verify
        self._files: dict[str, TensorReader] = {}
        self._checked: set[tuple[str, str]] = set()
        self._checks: dict[tuple[str, str], threading.Lock] = {}
        self._lock = threading.Lock()

    def _place_files(self) -> dict[tuple[int, str], str]:
        """(part, tensor) -> file, once the manifest is known to describe this model."""
        path = self.path / MANIFEST
        _check_tensor_table(path, self.manifest, self.table)
        where: dict[tuple[int, str], str] = {}
        for file, entry in self.manifest["files"].items():
            # A manifest may come from anybody: its names stay inside its folder.
            if not re.fullmatch(r"[\w.-]+\.safetensors", file):
                raise WeightsError(f"{path}: {file!r} is not a file name of weights")
            if not (self.path / file).is_file():
                raise WeightsError(f"{self.path / file} is missing, though {MANIFEST} names it")
            for name in entry["tensors"]:
                if name not in self.table or (self.layout.stage_of(self.table[name]) if self.layout else 0) != entry["pp"]:
                    raise WeightsError(f"{path}: tensor {name!r} does not belong in {file}, pipeline rank {entry['pp']}")
                part = _part(self.table[name], entry, self.layout)
                if part is None:
                    raise WeightsError(f"{path}: tensor {name!r} does not belong in {file}")
                if where.setdefault((part, name), file) != file:
                    raise WeightsError(f"{path}: tensor {name!r} of {_rank(self.table[name], part, self.cut)} is in two files")
        for name, info in self.table.items():
            for part in range(self.cut.parts(info)):
                if (part, name) not in where:
                    raise WeightsError(f"{path}: no file holds tensor {name!r} ({info.split}) of {_rank(info, part, self.cut)}")
        if len(where) != sum(self.cut.parts(info) for info in self.table.values()):
            raise WeightsError(f"{path}: files of more ranks than its layout's {self.cut}")
        return where

    def _check_step(self) -> None:
        """Weights that a run saved say of which step they are; a step's folder holds those of its own."""
        step, folder = (self.manifest.get("origin") or {}).get("step"), self.path.parent
        if step is not None and self.path.name == "weights" and run_folder.folder_step(folder) not in (None, step):
            raise WeightsError(f"{self.path / MANIFEST}: the weights are those of step {step}, but they lie in {folder.name}")

    def names(self) -> list[str]:
        """Canonical names, in model order."""
        return list(self.table)

    def dtype(self, name: str) -> torch.dtype:
        """The type in which a tensor is stored."""
        return NAMES[self.manifest["tensors"][name]["dtype"]]

    def _open(self, part: int, name: str) -> TensorReader:
        """The file with one part of a tensor, opened and checked once, the tensor verified once."""
        file = self._where[part, name]
        with self._lock:
            if file not in self._files:
                self._files[file] = self.open_file(file)
            check = self._checks.setdefault((file, name), threading.Lock())
        reader = self._files[file]
        if self._verify and (file, name) not in self._checked:
            with check:  # others that want this tensor wait, those that want another do not
                if (file, name) not in self._checked and reader.sha256(name) != self.manifest["files"][file]["tensors"][name]:
                    raise WeightsError(
                        f"{reader.path} is damaged: tensor {name!r} is not what was written (SHA-256 differs from {MANIFEST}); "
                        "fetch or write the weights again"
                    )
                self._checked.add((file, name))
        return reader

    def open_file(self, file: str) -> TensorReader:
        """One of the manifest's files, once it holds the tensors that the manifest says."""
        reader = TensorReader(self.path / file)
        held = set(reader.names())
        for tensor in self.manifest["files"][file]["tensors"]:
            shape = self.table[tensor].shard_shape(self.cut)
            if tensor not in held or reader.shape(tensor) != shape or reader.dtype(tensor) != self.dtype(tensor):
                raise WeightsError(f"{reader.path}: tensor {tensor!r} is missing or differs from {MANIFEST}")
        return reader

    def check(self, name: str) -> None:
        """Verifies now what :meth:`window` of this tensor reads; raises :class:`WeightsError` when it is damaged."""
        for part in {block.part for block in shard_blocks(self.table[name], self.cut)}:
            self._open(int(part), name)

    def fingerprint(self) -> dict[str, str]:
        """What changes when any of these weights do."""
        return {MANIFEST: self.manifest["digest"]}

    def window(self, name: str, window: Window) -> Tensor:
        """A window of the full tensor taken as a matrix. May be a view of a file: do not write to it."""
        blocks = shard_blocks(self.table[name], self.cut)
        return gather(blocks, window, lambda part, w: self._open(int(part), name).window(name, w), self.dtype(name))

    def get(self, name: str, part: int = 0, cut: Cut = WHOLE, expert: int | None = None) -> Tensor:
        """One part of a tensor, whatever layout is on disk, in memory of its own.

        Args:
            part: which of the ``cut.parts(info)`` parts (see :meth:`Cut.part`).
            cut: how the model is to be cut; the default gives the full tensor.
            expert: this one alone (counted within the part) of an expert tensor, without the leading dimension.

        Raises:
            LayoutError: the model cannot be cut so.
            WeightsError: what is on disk is damaged.
        """
        check_cut(self.spec, cut)
        info, dtype = self.table[name], self.dtype(name)
        shape, first = info.shard_shape(cut), 0
        if expert is not None:
            first, shape = range(shape[0])[expert] * shape[1], shape[1:]
        as_stored = cut[1:] == self.cut[1:] if info.experts else cut.tp == self.cut.tp
        blocks = part_blocks(info, part, cut)
        out = torch.empty(matrix_shape(shape), dtype=dtype)
        for window in row_windows(shape, dtype.itemsize):
            wanted = window._replace(row=window.row + first, row_end=window.row_end + first)
            if as_stored:
                data = self._open(part, name).window(name, wanted)
            else:
                data = gather(blocks, wanted, lambda _, full: self.window(name, full), dtype)
            out[window.row : window.row_end] = data
        return out.view(shape)
