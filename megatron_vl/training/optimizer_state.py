"""Optimizer state on disk: live fp32 tensors under canonical names, loadable in any layout.

Each rank writes what its optimizer holds: for each parameter the range ``start:end`` of its flattened tensor-parallel
shard that this data-parallel rank owns, with the master weights and Adam's moments. Megatron-core's
``dist_checkpointing`` is not used: core 0.19.2 packs buckets without their padding and slices them with it, so moments
land at wrong offsets without a word, and its files are pickled.

Key of a tensor: ``NAME[START:END]/KIND``, KIND one of ``main``, ``exp_avg``, ``exp_avg_sq``, ``step``; NAME is followed by
``#17`` for expert 17 of a stack, whose range is that of its own flattened shard.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_vl import durable
from megatron_vl.errors import UserError
from megatron_vl.models.names import LiveTensor
from megatron_vl.models.tensors import Cut, TensorInfo
from megatron_vl.parallel.grid import Grid
from megatron_vl.tensor_files import make_header
from megatron_vl.weights import shard, unshard

KINDS = ("main", "exp_avg", "exp_avg_sq")
_KEY = re.compile(r"^(?P<name>.+)\[(?P<start>\d+):(?P<end>\d+)\]/(?P<kind>main|exp_avg|exp_avg_sq|step)$")
_CHUNK = 16 << 20


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written or resumed from; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class OptimizerSlice:
    """A contiguous range of one parameter's flattened shard and the optimizer's fp32 tensors for it on this rank."""

    tensor: LiveTensor
    start: int
    end: int
    main: Tensor
    state: dict[str, Any]
    group: dict[str, Any]

    @property
    def name(self) -> str:
        """The canonical name; of one expert of a stack, with its number."""
        return state_name(self.tensor.name, self.tensor.expert)

    def key(self, kind: str) -> str:
        return f"{self.name}[{self.start}:{self.end}]/{kind}"


def state_name(name: str, expert: int | None) -> str:
    """What the state of a tensor, or of one expert of a stack, is filed under."""
    return name if expert is None else f"{name}#{expert}"


def optimizer_slices(optimizer: ChainedOptimizer, parameters: list[LiveTensor]) -> Iterator[OptimizerSlice]:
    """What this rank's optimizer holds, parameter by parameter."""
    tensors = {id(tensor.parameter): tensor for tensor in parameters}
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False):
            continue
        if isinstance(part, DistributedOptimizer):
            for parameter in part.model_param_gbuf_map:
                if parameter not in part.model_param_group_index_map:
                    continue  # its range on this data-parallel rank is empty
                index, order = part.model_param_group_index_map[parameter]
                group = part.optimizer.param_groups[index]
                main, span = group["params"][order], part._get_model_param_range_map(parameter)["param"]
                yield OptimizerSlice(tensors[id(parameter)], span.start, span.end, main, part.optimizer.state[main], group)
            continue
        # Experts have an optimizer of their own, so each part of the chain has some of the parameters.
        groups = {id(main): group for group in part.optimizer.param_groups for main in group["params"]}
        for tensor in parameters:
            main = getattr(tensor.parameter, "main_param", tensor.parameter)
            if id(main) in groups:
                yield OptimizerSlice(tensor, 0, main.numel(), main, part.optimizer.state[main], groups[id(main)])


def host_copy(tensor: Tensor) -> Tensor:
    """A copy on the host, alone in its storage (shards are views of one buffer), safe from the next step."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def snapshot(optimizer: ChainedOptimizer, parameters: list[LiveTensor]) -> dict[str, Tensor]:
    """Host copies of this rank's optimizer state and random number generators."""
    tensors: dict[str, Tensor] = {"rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    for piece in optimizer_slices(optimizer, parameters):
        tensors[piece.key("main")] = host_copy(piece.main).view(-1)
        tensors[piece.key("step")] = torch.tensor([_step_of(piece)], dtype=torch.int64)
        for kind in KINDS[1:]:
            if kind in piece.state:
                tensors[piece.key(kind)] = host_copy(piece.state[kind]).view(-1)
    return tensors


def _step_of(piece: OptimizerSlice) -> int:
    """Adam's step count: torch keeps it per parameter, Transformer Engine's FusedAdam per group."""
    step = piece.state.get("step", piece.group.get("step", 0))
    return int(step.item() if isinstance(step, Tensor) else step)


def write_hashed(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Writes a safetensors file atomically and synced. Returns its size in bytes and the SHA-256 of its content."""
    digest, partial = hashlib.sha256(), path.with_name(path.name + ".partial")
    header = make_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, metadata)
    # The header puts wide types first, so that all are aligned; the data follow in its order.
    ordered = sorted(tensors.values(), key=lambda tensor: -tensor.element_size())
    size = 0
    try:
        with partial.open("wb") as file:
            for data in (memoryview(header), *(_bytes(tensor) for tensor in ordered)):
                for at in range(0, len(data), _CHUNK):
                    piece = data[at : at + _CHUNK]
                    file.write(piece)
                    digest.update(piece)
                size += len(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    durable.rename(partial, path)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def check_hash(path: Path, facts: Mapping[str, Any]) -> None:
    """Raises :class:`CheckpointError` unless the file is there with the size and content that were written."""
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


class _Piece(NamedTuple):
    start: int
    end: int
    file: str


class OptimizerReader:
    """The optimizer state of a checkpoint, whatever layout wrote it.

    Only headers are read at first; content is verified against its hash when a file is first needed.

    Args:
        folder: the checkpoint's ``optimizer`` folder.
        files: name -> size and hash, as the checkpoint's ``run.json`` has them.
        cut: how the tensors of what wrote it were cut.
    """

    def __init__(self, folder: Path, files: Mapping[str, Mapping[str, Any]], cut: Cut) -> None:
        self.folder, self.files, self.cut = folder, files, cut
        self._open: dict[str, Any] = {}
        self._keys: dict[str, frozenset[str]] = {}
        self._pieces: dict[tuple[str, int], list[_Piece]] = {}
        for name in sorted(files):
            self._index(name)

    def _index(self, file: str) -> None:
        path = self.folder / file
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; the checkpoint is not whole")
        try:
            with safe_open(path, framework="pt") as tensors:
                metadata, keys = tensors.metadata() or {}, list(tensors.keys())
                tp_rank, etp_rank = int(metadata["tp"]), int(metadata.get("etp", 0))
        except (SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        self._keys[file] = frozenset(keys)
        for key in keys:
            match = _KEY.match(key)
            if match and match["kind"] == "main":
                # A tied weight has state on two stages; they are equal, so either may serve.
                piece = _Piece(int(match["start"]), int(match["end"]), file)
                rank = etp_rank if "#" in match["name"] else tp_rank
                self._pieces.setdefault((match["name"], rank), []).append(piece)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            check_hash(self.folder / name, self.files[name])
            self._open[name] = safe_open(self.folder / name, framework="pt").__enter__()
        return self._open[name]

    def close(self) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def _range(self, name: str, rank: int, kind: str, start: int, end: int) -> Tensor | None:
        """Elements ``start:end`` of what a tensor (or expert tensor) rank wrote; None when not of this kind (before step 1)."""
        out = torch.empty(end - start, dtype=torch.float32)
        at = start
        for piece in sorted(self._pieces.get((name, rank), [])):
            if piece.end <= at or piece.start >= end:
                continue
            if piece.start > at:
                break
            key = f"{name}[{piece.start}:{piece.end}]/{kind}"
            file = self._file(piece.file)
            if key not in self._keys[piece.file]:
                return None
            upto = min(end, piece.end)
            out[at - start : upto - start] = file.get_slice(key)[at - piece.start : upto - piece.start]
            at = upto
        if at < end:
            for file, facts in self.files.items():  # a damaged header hides what its file holds: name that file
                check_hash(self.folder / file, facts)
            raise CheckpointError(
                f"{self.folder} has no optimizer state for {name}, elements {at} to {end} of tensor rank {rank}; were other "
                "parts frozen when it was saved? Start a new run from its weights instead (model.checkpoint)"
            )
        return out

    def get(
        self, info: TensorInfo, kind: str, part: int, cut: Cut, start: int, end: int, expert: int | None = None
    ) -> Tensor | None:
        """Elements ``start:end`` of a flattened part of a tensor, from whatever layout is on disk.

        Args:
            part: which part (see :meth:`Cut.part`).
            cut: how the tensor is to be cut.
            expert: of a stack of experts, which (counted over all ranks); the range is then that of its own shard.
        """
        name, written = state_name(info.name, expert), self.cut
        if info.experts:
            # Where an expert lay says nothing of its own matrix, which is cut as tensor parallelism cuts a dense one.
            info = dataclasses.replace(info, shape=info.shape[1:], experts=0)
            part, cut, written = part % cut.etp, Cut(cut.etp), Cut(written.etp)
        if cut.tp == written.tp:
            return self._range(name, part, kind, start, end)
        shape = info.shard_shape(written)
        count = torch.Size(shape).numel()
        shards = []
        for rank in range(written.tp if info.split != "replicated" else 1):
            piece = self._range(name, rank, kind, 0, count)
            if piece is None:
                return None
            shards.append(piece.view(shape))
        full = unshard(shards, info, written) if info.split != "replicated" else shards[0]
        return shard(full, info, part, cut).reshape(-1)[start:end].clone()

    def step(self, name: str) -> int:
        """Adam's step count of a parameter."""
        ranks = range(max(self.cut.tp, self.cut.etp))
        pieces = next((self._pieces[name, rank] for rank in ranks if (name, rank) in self._pieces), [])
        if not pieces:
            return 0
        piece = pieces[0]
        return int(self._file(piece.file).get_tensor(f"{name}[{piece.start}:{piece.end}]/step"))

    def rng(self, file: str) -> dict[str, Tensor]:
        """The random number generators that a rank saved in its file; empty when there is no such file."""
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
    grid: Grid,
) -> None:
    """Fills this rank's master weights and moments from a checkpoint of any layout."""
    fused = any(type(getattr(part, "optimizer", None)).__name__ == "FusedAdam" for part in optimizer.chained_optimizers)
    for piece in optimizer_slices(optimizer, parameters):
        info, expert = table[piece.tensor.name], piece.tensor.expert
        main = reader.get(info, "main", grid.part(info), grid.cut, piece.start, piece.end, expert)
        assert main is not None
        piece.main.copy_(main.view_as(piece.main))
        for kind in KINDS[1:]:
            moment = reader.get(info, kind, grid.part(info), grid.cut, piece.start, piece.end, expert)
            if moment is not None:
                piece.state[kind] = moment.view_as(piece.main).to(piece.main.device)
        step = reader.step(piece.name)
        if fused:
            piece.group["step"] = step
        elif step:
            # One tensor a parameter: torch's Adam counts in place, and a shared one would count once per parameter.
            piece.state["step"] = torch.tensor(float(step))
