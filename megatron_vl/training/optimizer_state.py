"""Optimizer state on disk: live tensors under canonical names, loadable in any layout.

Each rank writes what its optimizer holds. For each parameter, this is the range ``start:end`` of the
flattened tensor-parallel shard that this data-parallel rank owns, with master weights in fp32 and Adam's
moments in their dtype. What is read is fp32, whatever was written.
Megatron-core's ``dist_checkpointing`` is not used for two reasons: core 0.19.2 packs buckets without their
padding but slices them with it, so that moments silently get wrong offsets, and its files are pickled.

The key of a tensor is ``NAME[START:END]/KIND``, where KIND is ``main``, ``exp_avg``, ``exp_avg_sq`` or
``step``. For expert 17 of a stack, NAME ends in ``#17``,
and the range is that of the expert's own flattened shard.

``index.json`` says which file holds which ranges, so that a resuming rank opens only the files that it needs:
``{"files": [FILE, ...], "slices": {NAME: [[PART, START, END, FILE, KINDS, STEP], ...]}}``.
PART is the rank in tensor (or expert tensor) parallelism, FILE an index into ``files``, KINDS has a bit for
each of :data:`KINDS`, and STEP is Adam's step count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_vl import durable, progress
from megatron_vl.json_files import write_json
from megatron_vl.models.names import LiveTensor
from megatron_vl.parallel.grid import ProcessGrid
from megatron_vl.spec.tensors import Cut, TensorInfo, part_of
from megatron_vl.training.offload.build import chunked_state
from megatron_vl.training.offload.state import Parameter
from megatron_vl.training.offload.step import counts_by_group
from megatron_vl.weights.blocks import gather, part_blocks, shard_blocks
from megatron_vl.weights.run_folder import CheckpointError
from megatron_vl.weights.tensor_files import Region, make_header, matrix_shape

INDEX = "index.json"
KINDS = ("main", "exp_avg", "exp_avg_sq")
_KEY = re.compile(r"^(?P<name>.+)\[(?P<start>\d+):(?P<end>\d+)\]/(?P<kind>main|exp_avg|exp_avg_sq|step)$")
_CHUNK = 16 << 20


@dataclass(frozen=True)
class OptimizerSlice:
    """A contiguous range of one parameter's flattened shard,
    with this rank's optimizer tensors for it."""

    tensor: LiveTensor
    start: int
    end: int
    main: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    chunked: Parameter | None = None
    """Where the state is if it is in chunks; ``state`` is then empty, and ``main`` may be."""

    @property
    def name(self) -> str:
        """The canonical name; for one expert of a stack, followed by its number."""
        return state_name(self.tensor.name, self.tensor.expert)

    def key(self, kind: str) -> str:
        return f"{self.name}[{self.start}:{self.end}]/{kind}"

    def read(self, kind: str) -> Tensor | None:
        """A host copy [end - start] of one of :data:`KINDS`, in its dtype; None if there is none (before
        step 1)."""
        if self.chunked is not None:
            return self.chunked.read(kind)
        held = self.main if kind == "main" else self.state.get(kind)
        return None if held is None else host_copy(held).view(-1)

    def write(self, kind: str, value: Tensor | None) -> None:
        """Replaces one of :data:`KINDS` with fp32 [end - start]. None: there are no moments yet."""
        if self.chunked is not None:
            self.chunked.write(kind, torch.zeros(self.end - self.start) if value is None else value)
        elif kind == "main":
            assert value is not None
            self.main.copy_(value.view_as(self.main))
        elif value is not None:
            self.state[kind] = value.view_as(self.main).to(self.main.device)

    @property
    def steps(self) -> int:
        """Adam's step count: torch keeps it per parameter, Transformer Engine's FusedAdam per group."""
        if self.chunked is not None:
            return self.chunked.steps
        steps = self.state.get("step", self.group.get("step", 0))
        return int(steps.item() if isinstance(steps, Tensor) else steps)


def state_name(name: str, expert: int | None) -> str:
    """The name under which the state of a tensor, or of one expert of a stack, is stored."""
    return name if expert is None else f"{name}#{expert}"


def optimizer_slices(optimizer: ChainedOptimizer, parameters: list[LiveTensor]) -> Iterator[OptimizerSlice]:
    """The state that this rank's optimizer holds, parameter by parameter."""
    tensors = {id(tensor.parameter): tensor for tensor in parameters}
    kept = chunked_state(optimizer)
    chunked = kept.parameters if kept is not None else {}

    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False):
            continue
        if isinstance(part, DistributedOptimizer):
            for parameter in part.model_param_gbuf_map:
                if parameter not in part.model_param_group_index_map:
                    continue  # its range on this data-parallel rank is empty
                index, order = part.model_param_group_index_map[parameter]
                group = part.optimizer.param_groups[index]
                main = group["params"][order]
                span = part._get_model_param_range_map(parameter)["param"]
                state, stored = _state_of(part, main, chunked)
                yield OptimizerSlice(tensors[id(parameter)], span.start, span.end, main, state, group, stored)
            continue

        # Experts have their own optimizer, so each part of the chain holds only some of the parameters.
        groups = {id(main): group for group in part.optimizer.param_groups for main in group["params"]}
        for tensor in parameters:
            main = getattr(tensor.parameter, "main_param", tensor.parameter)
            if id(main) in groups:
                state, stored = _state_of(part, main, chunked)
                yield OptimizerSlice(tensor, 0, main.numel(), main, state, groups[id(main)], stored)


def _state_of(
    part: Any, main: Tensor, chunked: Mapping[int, Parameter]
) -> tuple[dict[str, Any], Parameter | None]:
    """The moments of a parameter in the optimizer, or where they are in chunks."""
    stored = chunked.get(id(main))
    return ({} if stored is not None else part.optimizer.state[main]), stored


def host_copy(tensor: Tensor) -> Tensor:
    """A host copy with its own storage (shards are views of one buffer),
    which the next step does not change."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def snapshot(optimizer: ChainedOptimizer, parameters: list[LiveTensor]) -> dict[str, Tensor]:
    """Host copies of this rank's optimizer state and random number generators."""
    tensors: dict[str, Tensor] = {"rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    for piece in optimizer_slices(optimizer, parameters):
        tensors[piece.key("step")] = torch.tensor([piece.steps], dtype=torch.int64)
        for kind in KINDS:
            value = piece.read(kind)
            if value is not None:
                tensors[piece.key(kind)] = value
    return tensors


def write_hashed(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Writes a safetensors file atomically and flushes it to the disk.

    Returns its size in bytes and the SHA-256 of its content.
    """
    digest, partial = hashlib.sha256(), path.with_name(path.name + ".partial")
    header = make_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, metadata)
    # The header puts wide types first, so that all tensors are aligned. The data follow in the same order.
    ordered = sorted(tensors.values(), key=lambda tensor: -tensor.element_size())

    size = 0
    try:
        with partial.open("wb") as file:
            for data in (memoryview(header), *(_bytes(tensor) for tensor in ordered)):
                for at in range(0, len(data), _CHUNK):
                    piece = data[at : at + _CHUNK]
                    file.write(piece)
                    digest.update(piece)
                    progress.tick()
                size += len(data)
            file.flush()
            durable.flush(file.fileno(), partial)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    durable.rename(partial, path)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def check_hash(path: Path, facts: Mapping[str, Any]) -> None:
    """Raises :class:`CheckpointError` unless the file exists with the size and content that were written."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the checkpoint is not whole")
    if path.stat().st_size != facts["bytes"]:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes; {facts['bytes']} were written")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    if digest.hexdigest() != facts["sha256"]:
        raise CheckpointError(f"{path} is damaged: its content is not what was written (SHA-256 differs)")


# --- The index: which file holds what


def slices_of(
    tensors: Mapping[str, Tensor], tp_rank: int, etp_rank: int, whole_vision: bool = False
) -> list[list[Any]]:
    """``[NAME, PART, START, END, KINDS, STEP]`` of each slice in what :func:`snapshot` returned.

    This is one rank's part of the index.

    Args:
        whole_vision: see :attr:`Cut.whole_vision`.
    """
    found = []
    for key, place in _places(tensors, tp_rank, etp_rank, whole_vision).items():
        step = int(tensors[f"{key}/step"])
        found.append([*place, step])
    return found


def _places(
    keys: Iterable[str], tp_rank: int, etp_rank: int, whole_vision: bool = False
) -> dict[str, tuple[str, int, int, int, int]]:
    """``NAME[START:END]`` -> (name, part, start, end, kinds) for the keys of one file."""
    kinds: dict[str, int] = {}
    matches: dict[str, re.Match[str]] = {}
    for key in keys:
        match = _KEY.match(key)
        if match and match["kind"] in KINDS:
            piece = key.rpartition("/")[0]
            matches[piece] = match
            kinds[piece] = kinds.get(piece, 0) | 1 << KINDS.index(match["kind"])

    def part(name: str) -> int:
        if whole_vision and part_of(name) != "language":
            return 0
        return etp_rank if "#" in name else tp_rank

    return {
        piece: (
            m["name"],
            part(m["name"]),
            int(m["start"]),
            int(m["end"]),
            kinds[piece],
        )
        for piece, m in matches.items()
        if kinds[piece] & 1  # a slice exists if its master weights do
    }


def write_index(folder: Path, slices: Mapping[str, Iterable[Iterable[Any]]]) -> dict[str, Any]:
    """Writes ``index.json`` beside the files. Returns its size in bytes and hash.

    Args:
        slices: file -> its slices, as :func:`slices_of` lists them.
    """
    files = sorted(slices)
    table: dict[str, list[list[Any]]] = {}
    for number, file in enumerate(files):
        for name, part, start, end, kinds, step in slices[file]:
            table.setdefault(name, []).append([part, start, end, number, kinds, step])
    return write_json(folder / INDEX, {"files": files, "slices": table})


def read_index(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The index that was written with the checkpoint.

    Raises:
        CheckpointError: the index is missing or damaged.
    """
    if INDEX not in files:
        raise CheckpointError(f"{folder}: run.json names no {INDEX}; the checkpoint is not whole")
    check_hash(folder / INDEX, files[INDEX])
    return json.loads((folder / INDEX).read_text())


class NoStateError(CheckpointError):
    """A checkpoint that is whole has no optimizer state for a tensor."""


class _Piece(NamedTuple):
    start: int
    end: int
    file: str
    kinds: int
    step: int


class _NotSaved(Exception):
    """There is no state of this kind: the optimizer had made no step."""


class OptimizerReader:
    """The optimizer state of a checkpoint, whatever layout wrote it.

    A file is opened and verified against its hash when one of its ranges is first needed.

    Args:
        folder: the checkpoint's ``optimizer`` folder.
        files: name -> size and hash, as in the checkpoint's ``run.json``.
        cut: how the tensors were cut in the layout that wrote the checkpoint.
        own: the file that this rank wrote, if it did. If several files hold the same state, this one is
            preferred, so that ranks share the reading.
    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Mapping[str, Any]],
        cut: Cut,
        own: str = "",
    ) -> None:
        self.folder, self.files, self.cut, self.own = folder, files, cut, own
        self._open: dict[str, Any] = {}
        self._pieces: dict[tuple[str, int], list[_Piece]] = {}
        self._take(read_index(folder, files))

    def _take(self, index: dict[str, Any]) -> None:
        try:
            names = index["files"]
            for name, slices in index["slices"].items():
                for part, start, end, file, kinds, step in slices:
                    if any(type(value) is not int for value in (part, start, end, file, kinds, step)):
                        raise TypeError(f"a slice of {name} has an entry that is not a number")
                    self._pieces.setdefault((name, part), []).append(
                        _Piece(start, end, names[file], kinds, step)
                    )
            unknown = set(names) - self.files.keys()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(
                f"{self.folder / INDEX} is damaged: {type(error).__name__}: {error}"
            ) from error

        if unknown:
            raise CheckpointError(
                f"{self.folder / INDEX} names {min(unknown)!r}, which is not a file of this checkpoint"
            )

    def _file(self, name: str) -> Any:
        if name not in self._open:
            check_hash(self.folder / name, self.files[name])
            self._open[name] = safe_open(self.folder / name, framework="pt").__enter__()
        return self._open[name]

    def close(self) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def _range(self, name: str, rank: int, kind: str, start: int, end: int) -> Tensor:
        """Elements ``start:end`` of what a tensor-parallel (or expert-tensor-parallel)
        rank wrote. Raises _NotSaved."""
        out = torch.empty(end - start, dtype=torch.float32)
        pieces = [
            piece for piece in self._pieces.get((name, rank), []) if piece.start < end and piece.end > start
        ]

        at = start
        while at < end:
            # A tied weight has state on two stages, and state that is not spread is on every replica. The
            # copies are equal, so any of them will do.
            covering = [piece for piece in pieces if piece.start <= at < piece.end]
            if not covering:
                self._nothing_for(name, rank, at, end)

            piece = min(covering, key=lambda piece: (piece.file not in self._open, piece.file != self.own))
            if not piece.kinds & 1 << KINDS.index(kind):
                raise _NotSaved

            upto = min(end, piece.end)
            data = self._tensor(piece, f"{name}[{piece.start}:{piece.end}]/{kind}")
            out[at - start : upto - start] = data[at - piece.start : upto - piece.start]
            at = upto
        return out

    def _tensor(self, piece: _Piece, key: str) -> Any:
        """A slice of a file, which is read later."""
        try:
            return self._file(piece.file).get_slice(key)
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.folder / piece.file} lacks {key}, which {INDEX} says it has: {error}"
            ) from error

    def _nothing_for(self, name: str, rank: int, at: int, end: int) -> NoReturn:
        raise NoStateError(
            f"{self.folder} has no optimizer state for {name}, elements {at} to {end} of tensor rank {rank};"
            " were other parts frozen when it was saved? Start a new run from its weights instead"
            " (model.checkpoint)"
        )

    def get(
        self,
        info: TensorInfo,
        kind: str,
        part: int,
        cut: Cut,
        start: int,
        end: int,
        expert: int | None = None,
    ) -> Tensor | None:
        """Elements ``start:end`` of a flattened part of a tensor, from whatever layout is on disk.

        Args:
            part: number of the part (see :meth:`Cut.part`).
            cut: how the tensor is to be cut.
            expert: for a stack of experts, the expert's number over all ranks.
                The range is then that of its own shard.

        Returns:
            None if there is no state of this kind (before step 1).
        """
        name, written = state_name(info.name, expert), self.cut
        if info.experts:
            # Which rank held an expert does not matter for its matrix,
            # which is cut as tensor parallelism cuts a dense one.
            info = dataclasses.replace(info, shape=info.shape[1:], experts=0)
            part, cut, written = part % cut.etp, Cut(cut.etp), Cut(written.etp)
        try:
            if cut.ways(info) == written.ways(info):
                return self._range(name, part, kind, start, end)
            return self._recut(name, info, kind, part, cut, written, start, end)
        except _NotSaved:
            return None

    def _recut(
        self, name: str, info: TensorInfo, kind: str, part: int, cut: Cut, written: Cut, start: int, end: int
    ) -> Tensor:
        """:meth:`get` from parts that were cut differently:
        reads those of their rows that the range touches."""
        columns = matrix_shape(info.shard_shape(cut))[1]
        theirs = matrix_shape(info.shard_shape(written))[1]
        first = start // columns

        def stored(rank: str | int, w: Region) -> Tensor:
            flat = self._range(name, int(rank), kind, w.row * theirs, w.row_end * theirs)
            return flat.view(-1, theirs)[:, w.col : w.col_end]

        def whole(_: str | int, w: Region) -> Tensor:
            return gather(shard_blocks(info, written), w, stored, torch.float32)

        region = Region(first, math.ceil(end / columns), 0, columns)
        data = gather(part_blocks(info, part, cut), region, whole, torch.float32)
        return data.reshape(-1)[start - first * columns : end - first * columns].clone()

    def step(self, name: str) -> int:
        """Adam's step count of a parameter."""
        ranks = range(max(self.cut.tp, self.cut.etp))
        pieces = [piece for rank in ranks for piece in self._pieces.get((name, rank), [])]
        if not pieces:
            return 0
        return pieces[0].step

    def rng(self, file: str) -> dict[str, Tensor]:
        """The states of random number generators that a rank saved in its file;
        empty if there is no such file."""
        if file not in self.files:
            return {}
        tensors = self._file(file)
        return {key: tensors.get_tensor(key) for key in tensors.keys() if key.startswith("rng/")}


@torch.no_grad()
def restore(
    reader: OptimizerReader,
    optimizer: ChainedOptimizer,
    parameters: list[LiveTensor],
    table: Mapping[str, TensorInfo],
    grid: ProcessGrid,
) -> None:
    """Restores this rank's master weights and moments from a checkpoint of any layout."""
    fused = any(counts_by_group(getattr(part, "optimizer", None)) for part in optimizer.chained_optimizers)
    for piece in optimizer_slices(optimizer, parameters):
        info, expert = table[piece.tensor.name], piece.tensor.expert
        for kind in KINDS:
            value = reader.get(info, kind, grid.part(info), grid.cut, piece.start, piece.end, expert)
            assert kind != "main" or value is not None
            piece.write(kind, value)

        steps = reader.step(piece.name)
        if piece.chunked is not None:
            piece.chunked.steps = steps
        if fused:
            piece.group["step"] = steps
        elif steps and piece.chunked is None:
            # Each parameter needs its own tensor: torch's Adam counts in place, so that a shared tensor would
            # be counted up once per parameter.
            piece.state["step"] = torch.tensor(float(steps))
