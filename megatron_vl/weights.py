"""Model weights on disk: safetensors files and a manifest, in any tensor x pipeline layout.

A folder of weights holds ``manifest.json`` and either the unsplit tensors (``weights-00001-of-00003.safetensors``) or
one file for each model-parallel rank (``tp00_pp01.safetensors``, all virtual chunks of that rank). Tensors carry the
canonical names of :mod:`megatron_vl.models.tensors` with global layer numbers. A replicated tensor is in the file of
every tensor-parallel rank of its stage, so a rank reads its own file only; a tied output layer is not stored (the last
stage reads the embedding from the first stage's file).

Whatever lies on disk, :meth:`WeightReader.get` gives any slice for any tensor-parallel size. What is read is compared with
the manifest's SHA-256 first, and the manifest with a digest of its own: nothing damaged is handed out.
How one cut maps to another is written as :class:`Block` lists, rectangles of a matrix: converters use the same ones.
Nothing here imports Megatron-core, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vl.models.families import ConfigError, ModelSpec, read_spec
from megatron_vl.models.tensors import LayoutError, TensorInfo, check_tp, tensor_table
from megatron_vl.parallel.layout import Layout, make_layout
from megatron_vl.tensor_files import (
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
LATEST = "latest.json"
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

    def inverted(self, whole: str | int) -> Block:
        """The same rectangle seen from the part: ``whole`` becomes the part."""
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
        down, across = block.part_row - block.row, block.part_col - block.col
        data = read(block.part, Window(top + down, bottom + down, left + across, right + across))
        if (top, bottom, left, right) == window and data.dtype == dtype:
            return data
        if out is None:
            out = torch.zeros(window.row_end - window.row, window.col_end - window.col, dtype=dtype)
        out[top - window.row : bottom - window.row, left - window.col : right - window.col] = data
    return out if out is not None else torch.zeros(window.row_end - window.row, window.col_end - window.col, dtype=dtype)


def shard_blocks(info: TensorInfo, tp: int) -> list[Block]:
    """How the full matrix is made of its ``tp`` shards (:attr:`Block.part` is the rank).

    A replicated tensor is taken from rank 0.
    """
    rows, cols = matrix_shape(info.shape)
    if info.split == "replicated":
        return [Block(0, rows, cols)]
    if info.split == "row":
        width = cols // tp
        return [Block(t, rows, width, col=t * width) for t in range(tp)]
    if info.split == "column":
        height = rows // tp
        return [Block(t, height, cols, row=t * height) for t in range(tp)]
    half, height = rows // 2, rows // 2 // tp
    return [Block(t, height, cols, row=i * half + t * height, part_row=i * height) for i in (0, 1) for t in range(tp)]


def shard(tensor: Tensor, info: TensorInfo, tp_rank: int, tp: int) -> Tensor:
    """The part of a full tensor that ``tp_rank`` holds; a view where the cut allows it."""
    if info.split == "replicated" or tp == 1:
        return tensor
    if info.split == "gated":
        return torch.cat([half.chunk(tp)[tp_rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp, dim=1 if info.split == "row" else 0)[tp_rank]


def unshard(shards: Sequence[Tensor], info: TensorInfo) -> Tensor:
    """The full tensor of all shards in rank order: the inverse of :func:`shard`."""
    if info.split == "replicated" or len(shards) == 1:
        return shards[0]
    if info.split == "gated":
        halves = [part.chunk(2) for part in shards]
        return torch.cat([half[i] for i in (0, 1) for half in halves])
    return torch.cat(list(shards), dim=1 if info.split == "row" else 0)


# --- Writing a folder -----------------------------------------------------------------------------------------------


def rank_file_name(tp_rank: int, pp_rank: int) -> str:
    return f"tp{tp_rank:02d}_pp{pp_rank:02d}.safetensors"


def file_entry(
    file: str, tensors: Mapping[str, tuple[torch.dtype, Sequence[int], str]], tp: int = 0, pp: int = 0
) -> dict[str, Any]:
    """What the manifest needs to know of one rank's file; ``tensors`` is name -> (type, stored shape, SHA-256)."""
    table = {
        name: {"dtype": dtype_name(dtype), "shape": list(shape), "sha256": digest}
        for name, (dtype, shape, digest) in tensors.items()
    }
    return {"file": file, "tp": tp, "pp": pp, "tensors": table}


def write_rank_file(folder: str | Path, tp_rank: int, pp_rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes the tensors of one model-parallel rank, atomically and synced to disk.

    Args:
        tensors: canonical name -> this rank's slice, of all virtual chunks; on any device, copied in small pieces.

    Returns:
        The rank's entry (plain JSON types) for :func:`write_manifest`.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise WeightsError(f"tensor {name!r} has type {tensor.dtype}; weights may be {', '.join(map(dtype_name, CODES))}")
    path = Path(folder) / rank_file_name(tp_rank, pp_rank)
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
    return file_entry(path.name, written, tp_rank, pp_rank)


def write_manifest(
    folder: str | Path, spec: ModelSpec, layout: Layout | None, rank_entries: Sequence[dict], origin: dict | None = None
) -> str:
    """Writes ``manifest.json``, last of all files, after checking that the entries are the whole model.

    Args:
        layout: None for unsplit weights.
        rank_entries: what :func:`write_rank_file` returned on each model-parallel rank, in any order.
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
                "tp": entry["tp"],
                "pp": entry["pp"],
                "tensors": {name: tensor["sha256"] for name, tensor in entry["tensors"].items()},
            }
            for entry in sorted(rank_entries, key=lambda entry: entry["file"])
        },
    }
    manifest["digest"] = manifest_digest(manifest)
    path = Path(folder) / MANIFEST
    partial = path.with_name(MANIFEST + ".partial")
    with open(partial, "w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return str(manifest["digest"])


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of everything in a manifest but its digest, as JSON without spaces and with sorted keys.

    It finds damage and edits by hand, not forgery: who can write the folder can write a digest.
    """
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_entries(spec: ModelSpec, layout: Layout | None, entries: Sequence[dict]) -> dict[str, dict[str, Any]]:
    """The manifest's tensor table, once every tensor is found where it belongs, with its shape and one type."""
    stored: dict[tuple[int, int, str], dict[str, Any]] = {}
    for entry in entries:
        for name, tensor in entry["tensors"].items():
            if (entry["tp"], entry["pp"], name) in stored:
                raise WeightsError(f"tensor {name!r} is there twice in tensor rank {entry['tp']}, pipeline rank {entry['pp']}")
            stored[entry["tp"], entry["pp"], name] = tensor
    tp = layout.tp if layout else 1
    table = {}
    for name, info in tensor_table(spec).items():
        stage = layout.stage_of(info) if layout else 0
        shape = list(info.shard_shape(tp))
        found = []
        for t in range(tp):
            if (t, stage, name) not in stored:
                raise WeightsError(f"tensor {name!r} is missing in tensor rank {t}, pipeline rank {stage}")
            tensor = stored.pop((t, stage, name))
            if tensor["shape"] != shape:
                raise WeightsError(f"tensor {name!r} has shape {tensor['shape']} in tensor rank {t}; it should be {shape}")
            found.append(tensor)
        if len({tensor["dtype"] for tensor in found}) > 1:
            raise WeightsError(f"tensor {name!r} has different types on its tensor ranks")
        if info.split == "replicated" and len({tensor["sha256"] for tensor in found}) > 1:
            warnings.warn(f"replicated tensor {name!r} differs between tensor ranks; rank 0's counts", stacklevel=3)
        table[name] = {"dtype": found[0]["dtype"], "shape": list(info.shape), "split": info.split}
    if stored:
        t, stage, name = next(iter(stored))
        raise WeightsError(f"tensor {name!r} does not belong on tensor rank {t}, pipeline rank {stage}")
    return table


# --- Reading a folder -----------------------------------------------------------------------------------------------


def find_weights(path: str | Path) -> Path:
    """The weights folder meant by ``path``: itself, a step folder of a run, or a run folder (its newest complete step).

    Raises:
        FileNotFoundError: nothing there is a folder of weights; the message says what was looked for.
        WeightsError: ``latest.json`` is damaged.
    """
    path = Path(path)
    for folder in (path, path / "weights"):
        if (folder / MANIFEST).is_file():
            return folder
    steps = [int(step.name[5:]) for step in path.glob("step_*") if step.is_dir() and step.name[5:].isdigit()]
    if (path / LATEST).is_file():
        steps.append(_latest_step(path / LATEST))
    elif (path / UNFINISHED).is_file():
        raise FileNotFoundError(f"{path} holds a conversion that is not finished; run it again to let it go on")
    if not steps:
        raise FileNotFoundError(f"{path} holds no weights: looked for {MANIFEST}, weights/{MANIFEST} and {LATEST}")
    # As resuming does: a run that was killed between naming a checkpoint and writing latest.json has a newer one.
    weights = path / f"step_{max(steps):08d}" / "weights"
    if not (weights / MANIFEST).is_file():
        raise FileNotFoundError(f"{weights / MANIFEST} is missing, though step {max(steps)} is the latest of {path}")
    return weights


def _latest_step(path: Path) -> int:
    """What ``latest.json`` says, when the step is there."""
    try:
        step = json.loads(path.read_text())["step"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path} is damaged ({error}); remove it to use the newest step_ folder") from error
    if type(step) is not int or not (path.parent / f"step_{step:08d}").is_dir():
        raise FileNotFoundError(f"{path} names step {step}, but there is no such step_ folder; give the folder of another step")
    return step


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
    return None if layout is None else make_layout(spec, **{key: layout[key] for key in ("tp", "pp", "vpp", "layers")})


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
        layout: None for unsplit weights.
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
        """(tensor rank, tensor) -> file, once the manifest is known to describe this model."""
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
                if where.setdefault((entry["tp"], name), file) != file:
                    raise WeightsError(f"{path}: tensor {name!r} of tensor rank {entry['tp']} is in two files")
        tp = self.layout.tp if self.layout else 1
        for name, info in self.table.items():
            for t in range(tp):
                if (t, name) not in where:
                    raise WeightsError(f"{path}: no file holds tensor {name!r} ({info.split}) of tensor rank {t}")
        if len(where) != tp * len(self.table):
            raise WeightsError(f"{path}: files of more tensor ranks than its layout's {tp}")
        return where

    def _check_step(self) -> None:
        """Weights that a run saved say of which step they are; a step's folder holds those of its own."""
        step, folder = (self.manifest.get("origin") or {}).get("step"), self.path.parent.name
        if step is not None and self.path.name == "weights" and folder.startswith("step_") and folder != f"step_{step:08d}":
            raise WeightsError(f"{self.path / MANIFEST}: the weights are those of step {step}, but they lie in {folder}")

    def names(self) -> list[str]:
        """Canonical names, in model order."""
        return list(self.table)

    def dtype(self, name: str) -> torch.dtype:
        """The type in which a tensor is stored."""
        return NAMES[self.manifest["tensors"][name]["dtype"]]

    def _open(self, tp_rank: int, name: str) -> TensorReader:
        """The file with one rank's slice of a tensor, opened and checked once, the tensor verified once."""
        file = self._where[tp_rank, name]
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
            shape = self.table[tensor].shard_shape(self.layout.tp if self.layout else 1)
            if tensor not in held or reader.shape(tensor) != shape or reader.dtype(tensor) != self.dtype(tensor):
                raise WeightsError(f"{reader.path}: tensor {tensor!r} is missing or differs from {MANIFEST}")
        return reader

    def check(self, name: str) -> None:
        """Verifies now what :meth:`window` of this tensor reads; raises :class:`WeightsError` when it is damaged."""
        for rank in {block.part for block in shard_blocks(self.table[name], self.layout.tp if self.layout else 1)}:
            self._open(int(rank), name)

    def fingerprint(self) -> dict[str, str]:
        """What changes when any of these weights do."""
        return {MANIFEST: self.manifest["digest"]}

    def window(self, name: str, window: Window) -> Tensor:
        """A window of the full tensor taken as a matrix. May be a view of a file: do not write to it."""
        blocks = shard_blocks(self.table[name], self.layout.tp if self.layout else 1)
        return gather(blocks, window, lambda t, w: self._open(int(t), name).window(name, w), self.dtype(name))

    def shard_window(self, name: str, window: Window, tp_rank: int, tp: int) -> Tensor:
        """A window of one of ``tp`` slices taken as a matrix. May be a view of a file: do not write to it."""
        if self.layout and self.layout.tp == tp:
            return self._open(tp_rank, name).window(name, window)
        part = tp_rank if self.table[name].split != "replicated" else 0
        blocks = [block.inverted(name) for block in shard_blocks(self.table[name], tp) if block.part == part]
        return gather(blocks, window, lambda _, w: self.window(name, w), self.dtype(name))

    def get(self, name: str, tp_rank: int = 0, tp: int = 1) -> Tensor:
        """The slice of a tensor that ``tp_rank`` of ``tp`` holds, whatever layout is on disk, in memory of its own."""
        check_tp(self.spec, tp)
        shape, dtype = self.table[name].shard_shape(tp), self.dtype(name)
        out = torch.empty(matrix_shape(shape), dtype=dtype)
        for window in row_windows(shape, dtype.itemsize):
            out[window.row : window.row_end] = self.shard_window(name, window, tp_rank, tp)
        return out.view(shape)
