"""Optimizer state on disk: live tensors under canonical names, loadable in any layout.

Each rank writes what its optimizer holds. For each parameter, this is the range ``start:end`` of the
flattened tensor-parallel shard that this data-parallel rank owns, with master weights in fp32 and Adam's
moments in their dtype. State is read as fp32, whatever was written.
Megatron-core's ``dist_checkpointing`` is not used for two reasons: core 0.19.2 packs buckets without their
padding but slices them with it, so that moments silently get wrong offsets, and its files are pickled.

The key of a tensor is ``NAME[START:END]/KIND``, where KIND is ``main``, ``exp_avg``, ``exp_avg_sq`` or
``step``. For expert 17 of a stack, NAME ends in ``#17``, and the range is that of the expert's own flattened
shard.

``index.json`` says which file holds which ranges, so that a resuming rank opens only the files that it needs:
``{"files": [FILE, ...], "slices": {NAME: [[SHARD, START, END, FILE, KINDS, STEP], ...]}}``.
SHARD is the rank in tensor (or expert tensor) parallelism, FILE an index into ``files``, KINDS has a bit for
each of :data:`STATE_KINDS`, and STEP is Adam's step count.
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_vl.models.parameter_names import LiveTensor
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.spec.tensors import Sharding, TensorInfo, model_part
from megatron_vl.system import durable_files, host_memory, progress
from megatron_vl.system.json_files import file_sha256, write_json
from megatron_vl.training.offload.build import chunked_state
from megatron_vl.training.offload.chunked_step import counts_steps_by_group
from megatron_vl.training.offload.state_chunks import ChunkedParameter
from megatron_vl.training.state.host_copies import HostCopies
from megatron_vl.weights.matrix_blocks import blocks_of_shard, gather_region, shard_blocks
from megatron_vl.weights.run_folder import CheckpointError
from megatron_vl.weights.tensor_files import MatrixRegion, make_safetensors_header, matrix_shape

INDEX_FILE = "index.json"
STATE_KINDS = ("main", "exp_avg", "exp_avg_sq")
_CHUNK_BYTES = 16 << 20
_SLICE_ELEMENTS = 1 << 25
_FILE_BYTES = 1 << 30
_MAX_FILE_THREADS = 8
_PARALLEL_READS = 4


@dataclass(frozen=True)
class OptimizerSlice:
    """A contiguous range of one parameter's flattened shard, with this rank's optimizer tensors for it."""

    live_tensor: LiveTensor
    start: int
    end: int
    main_param: Tensor
    adam_state: dict[str, Any]
    param_group: dict[str, Any]
    chunked_parameter: ChunkedParameter | None = None
    """The state, if it is in chunks. Then ``adam_state`` is empty, and ``main_param`` may have no storage."""

    @property
    def state_name(self) -> str:
        """The canonical name; for one expert of a stack, followed by its number."""
        return optimizer_state_name(self.live_tensor.tensor_name, self.live_tensor.expert_index)

    def saved_state(
        self, copies: HostCopies
    ) -> Iterator[tuple[str, torch.dtype, Callable[[int, int], Tensor]]]:
        """Those of :data:`STATE_KINDS` that exist, as (kind, dtype, function that reads a flat range of it).

        Moments do not exist before step 1. What the functions read is added to ``copies``.
        """

        def read_range(tensor: Tensor, start: int, end: int) -> Tensor:
            return copies(tensor)[start:end]

        chunked = self.chunked_parameter
        state_tensors: dict[str, Any] = {"main": self.main_param, **self.adam_state}
        if chunked is not None:
            for held in chunked.state_tensors():
                copies.add(held)
        for kind in STATE_KINDS:
            if chunked is not None:
                if kind == "main" or chunked.step_count:
                    yield kind, chunked.state_dtype(kind), partial(chunked.read_state, kind, copies)
            elif (tensor := state_tensors.get(kind)) is not None:
                copies.add(tensor)
                yield kind, tensor.dtype, partial(read_range, tensor)

    def write_state(self, state_kind: str, new_value: Tensor | None) -> None:
        """Replaces one of :data:`STATE_KINDS`.

        Args:
            new_value: fp32 [end - start]; None for moments that do not exist yet.
        """
        if self.chunked_parameter is not None:
            self.chunked_parameter.write_state(
                state_kind, torch.zeros(self.end - self.start) if new_value is None else new_value
            )
        elif state_kind == "main":
            assert new_value is not None
            self.main_param.copy_(new_value.view_as(self.main_param))
        elif new_value is not None:
            self.adam_state[state_kind] = new_value.view_as(self.main_param).to(self.main_param.device)

    @property
    def step_count(self) -> int:
        """Adam's step count: torch keeps it per parameter, Transformer Engine's FusedAdam per group."""
        if self.chunked_parameter is not None:
            return self.chunked_parameter.step_count
        steps = self.adam_state.get("step", self.param_group.get("step", 0))
        # Torch keeps its count on the host; a sync for FusedAdam's happens only in a save.
        return int(steps.item() if isinstance(steps, Tensor) else steps)


def optimizer_state_name(tensor_name: str, expert_index: int | None) -> str:
    """The name under which the state of a tensor, or of one expert of a stack, is stored."""
    return tensor_name if expert_index is None else f"{tensor_name}#{expert_index}"


def optimizer_slices(optimizer: ChainedOptimizer, live_tensors: list[LiveTensor]) -> Iterator[OptimizerSlice]:
    """The state that this rank's optimizer holds, parameter by parameter."""
    # Optimizers know parameters as tensors without names. The model's tensors give them their names.
    tensors_by_id = {id(live_tensor.parameter): live_tensor for live_tensor in live_tensors}
    state_chunks = chunked_state(optimizer)
    chunked_parameters = state_chunks.parameters_by_id if state_chunks is not None else {}

    for sub_optimizer in optimizer.chained_optimizers:
        # A stub stands for a rank without parameters of this kind.
        if getattr(sub_optimizer, "is_stub_optimizer", False):
            continue

        # The distributed optimizer owns a range of each parameter, which may begin and end inside of it.
        parameter_ranges = (
            _owned_ranges(sub_optimizer, tensors_by_id)
            if isinstance(sub_optimizer, DistributedOptimizer)
            else _whole_parameters(sub_optimizer, live_tensors)
        )
        for live_tensor, start, end, main_param, param_group in parameter_ranges:
            chunked = chunked_parameters.get(id(main_param))
            adam_state = {} if chunked is not None else sub_optimizer.optimizer.state[main_param]
            yield OptimizerSlice(live_tensor, start, end, main_param, adam_state, param_group, chunked)


_ParameterRange = tuple[LiveTensor, int, int, Tensor, dict[str, Any]]
"""A parameter, the bounds of a range of its elements, and the range's main weights with their group."""


def _owned_ranges(
    sub_optimizer: DistributedOptimizer, tensors_by_id: dict[int, LiveTensor]
) -> Iterator[_ParameterRange]:
    for model_param in sub_optimizer.model_param_gbuf_map:
        if model_param not in sub_optimizer.model_param_group_index_map:
            continue  # its range on this data-parallel rank is empty
        group_index, param_index = sub_optimizer.model_param_group_index_map[model_param]
        param_group = sub_optimizer.optimizer.param_groups[group_index]
        param_range = sub_optimizer._get_model_param_range_map(model_param)["param"]
        live_tensor = tensors_by_id[id(model_param)]
        yield live_tensor, param_range.start, param_range.end, param_group["params"][param_index], param_group


def _whole_parameters(sub_optimizer: Any, live_tensors: list[LiveTensor]) -> Iterator[_ParameterRange]:
    # Experts have their own optimizer, so each part of the chain holds only some of the parameters.
    groups_by_id = {
        id(main_param): param_group
        for param_group in sub_optimizer.optimizer.param_groups
        for main_param in param_group["params"]
    }
    for live_tensor in live_tensors:
        main_param = getattr(live_tensor.parameter, "main_param", live_tensor.parameter)
        if id(main_param) in groups_by_id:
            yield live_tensor, 0, main_param.numel(), main_param, groups_by_id[id(main_param)]


class SavedTensor(NamedTuple):
    """A flat tensor of a checkpoint, which is joined from its parts, in host memory, when it is read."""

    dtype: torch.dtype
    length: int
    read: Callable[[], Tensor]


def snapshot_optimizer(
    optimizer: ChainedOptimizer, live_tensors: list[LiveTensor], copies: HostCopies
) -> dict[str, SavedTensor]:
    """This rank's optimizer state by key, which can be read once ``copies`` are made."""
    tensors: dict[str, SavedTensor] = {}
    if (state_chunks := chunked_state(optimizer)) is not None:
        state_chunks.chunk_streamer.wait_for_host_state()
    for piece in optimizer_slices(optimizer, live_tensors):
        step_count, saved_state = torch.tensor([piece.step_count]), list(piece.saved_state(copies))
        # Large tensors in several slices, which several threads join, hash and write.
        for start in range(0, piece.end - piece.start, _SLICE_ELEMENTS):
            end = min(start + _SLICE_ELEMENTS, piece.end - piece.start)
            key = f"{piece.state_name}[{piece.start + start}:{piece.start + end}]"
            tensors[f"{key}/step"] = SavedTensor(torch.int64, 1, step_count.clone)
            for kind, dtype, read in saved_state:
                tensors[f"{key}/{kind}"] = SavedTensor(dtype, end - start, partial(read, start, end))
    return tensors


def split_state(tensors: Mapping[str, SavedTensor]) -> list[dict[str, SavedTensor]]:
    """The tensors in the files of a rank, each of about :data:`_FILE_BYTES`, several of which are written at
    a time. Those of a slice stay together."""
    parts: list[dict[str, SavedTensor]] = [{}]
    num_bytes = 0
    for key, tensor in tensors.items():
        if key.endswith("/step") and num_bytes > _FILE_BYTES:
            parts.append({})
            num_bytes = 0
        parts[-1][key] = tensor
        num_bytes += tensor.length * tensor.dtype.itemsize
    return parts


def write_hashed_safetensors(
    file_path: Path, tensors: Mapping[str, SavedTensor], metadata: Mapping[str, str]
) -> dict[str, Any]:
    """Writes a safetensors file atomically and flushes it to the disk.

    Returns its size in bytes and the SHA-256 of its content.
    """
    sha256, num_bytes = hashlib.sha256(), 0
    header = make_safetensors_header(
        {name: (tensor.dtype, (tensor.length,)) for name, tensor in tensors.items()}, metadata
    )
    # The header puts wide types first, so that all tensors are aligned. The data follow in its order.
    wide_first = sorted(tensors.values(), key=lambda tensor: -tensor.dtype.itemsize)
    views = (memoryview(tensor.read().view(torch.uint8).numpy()) for tensor in wide_first)
    with durable_files.open_new_file(file_path) as file:
        for view in itertools.chain([memoryview(header)], views):
            for start in range(0, len(view), _CHUNK_BYTES):
                piece = view[start : start + _CHUNK_BYTES]
                file.write(piece)
                durable_files.begin_flush(file.fileno(), num_bytes, len(piece))
                sha256.update(piece)
                progress.note_progress()
                num_bytes += len(piece)
    return {"bytes": num_bytes, "sha256": sha256.hexdigest()}


def num_file_threads() -> int:
    """Number of files that a rank hashes at a time, on its share of the node's cores."""
    return max(2, min(_MAX_FILE_THREADS, len(os.sched_getaffinity(0)) // host_memory.num_ranks_on_node()))


def check_file_hash(file_path: Path, file_record: Mapping[str, Any]) -> None:
    """Raises :class:`CheckpointError` unless the file exists with the size and content that were written."""
    if not file_path.is_file():
        raise CheckpointError(f"{file_path} is missing; the checkpoint is not whole")
    if (size := file_path.stat().st_size) != file_record["bytes"]:
        raise CheckpointError(f"{file_path} has {size} bytes; {file_record['bytes']} were written")
    if file_sha256(file_path) != file_record["sha256"]:
        raise CheckpointError(
            f"{file_path} is damaged: its content is not what was written (SHA-256 differs)"
        )


# --- The index of the slices in each file


def list_index_entries(
    state_tensors: Mapping[str, SavedTensor], tp_rank: int, etp_rank: int, whole_vision: bool = False
) -> list[list[Any]]:
    """One rank's entries of the index: ``[NAME, SHARD, START, END, KINDS, STEP]`` of each slice."""
    kind_bits: dict[str, int] = {}
    for tensor_key in state_tensors:
        slice_key, _, state_kind = tensor_key.rpartition("/")
        if state_kind in STATE_KINDS:
            kind_bits[slice_key] = kind_bits.get(slice_key, 0) | 1 << STATE_KINDS.index(state_kind)

    index_entries = []
    for slice_key, slice_bits in kind_bits.items():
        state_name, _, slice_bounds = slice_key.removesuffix("]").rpartition("[")
        start, end = map(int, slice_bounds.split(":"))

        # Experts are cut by expert tensor parallelism, and a replicated tower is not cut at all.
        is_cut = not whole_vision or model_part(state_name) == "language"
        shard_index = (etp_rank if "#" in state_name else tp_rank) if is_cut else 0
        index_entries.append(
            [state_name, shard_index, start, end, slice_bits, int(state_tensors[f"{slice_key}/step"].read())]
        )
    return index_entries


def write_slice_index(
    optimizer_dir: Path, entries_by_file: Mapping[str, Iterable[Iterable[Any]]]
) -> dict[str, Any]:
    """Writes ``index.json`` beside the files. Returns its size in bytes and hash."""
    files = sorted(entries_by_file)
    slices: dict[str, list[list[Any]]] = {}
    for number, file_name in enumerate(files):
        for name, shard, start, end, *facts in entries_by_file[file_name]:
            slices.setdefault(name, []).append([shard, start, end, number, *facts])
    return write_json(optimizer_dir / INDEX_FILE, {"files": files, "slices": slices})


class MissingOptimizerStateError(CheckpointError):
    """A complete checkpoint has no optimizer state for a tensor."""


class _SavedSlice(NamedTuple):
    start: int
    end: int
    file_name: str
    kind_bits: int
    step_count: int


class _StateNotSaved(Exception):
    """There is no state of this kind, because the optimizer had made no step."""


class OptimizerStateReader:
    """The optimizer state of a checkpoint, whatever layout wrote it.

    A file is opened and verified against its hash when one of its ranges is first needed. With the first one
    that this rank wrote, the verification of all that it wrote begins, several at a time.

    Args:
        file_records: name -> size and hash, as in the checkpoint's ``run.json``.
        saved_sharding: how the tensors were cut in the layout that wrote the checkpoint.
        own_file: the first file that this rank wrote, if it did. If several files hold the same state, those
            of the rank are preferred, so that ranks share the reading.
    """

    def __init__(
        self,
        optimizer_dir: Path,
        file_records: Mapping[str, Mapping[str, Any]],
        saved_sharding: Sharding,
        own_file: str = "",
    ) -> None:
        self.optimizer_dir, self.file_records = optimizer_dir, file_records
        self.saved_sharding = saved_sharding
        own_prefix = own_file.removesuffix(".safetensors")
        self._own_files = [name for name in file_records if own_prefix and name.startswith(own_prefix)]
        self._pool = ThreadPoolExecutor(num_file_threads())
        self._checks: dict[str, Future[None]] = {}
        self._open_files: dict[str, Any] = {}
        self._saved_slices: dict[tuple[str, int], list[_SavedSlice]] = {}
        if INDEX_FILE not in file_records:
            raise CheckpointError(
                f"{optimizer_dir}: run.json names no {INDEX_FILE}; the checkpoint is not whole"
            )
        check_file_hash(optimizer_dir / INDEX_FILE, file_records[INDEX_FILE])
        self._parse_index(optimizer_dir / INDEX_FILE)

    def _parse_index(self, path: Path) -> None:
        try:
            index = json.loads(path.read_text())
            files = index["files"]
            for name, entries in index["slices"].items():
                for entry in entries:
                    if any(type(value) is not int for value in entry):
                        raise TypeError(f"a slice of {name} has an entry that is not a number")
                    shard, start, end, number, *facts = entry
                    piece = _SavedSlice(start, end, files[number], *facts)
                    self._saved_slices.setdefault((name, shard), []).append(piece)
            unknown_files = set(files) - self.file_records.keys()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if unknown_files:
            raise CheckpointError(
                f"{path} names {min(unknown_files)!r}, which is not a file of this checkpoint"
            )

    def _open_verified(self, file_name: str) -> Any:
        if file_name not in self._open_files:
            for name in self._own_files if file_name in self._own_files else [file_name]:
                if name not in self._checks:
                    path, record = self.optimizer_dir / name, self.file_records[name]
                    self._checks[name] = self._pool.submit(check_file_hash, path, record)
            self._checks[file_name].result()
            self._open_files[file_name] = safe_open(self.optimizer_dir / file_name, framework="pt")
        return self._open_files[file_name]

    def close(self) -> None:
        self._open_files.clear()
        self._pool.shutdown(cancel_futures=True)

    def _read_saved_range(
        self, state_name: str, shard_index: int, state_kind: str, start: int, end: int
    ) -> Tensor:
        """Elements ``start:end`` of the shard that a tensor-parallel (or expert-tensor-parallel) rank wrote.

        Raises:
            _StateNotSaved: the shard has no state of this kind.
            MissingOptimizerStateError: no file has these elements.
        """
        output = torch.empty(end - start, dtype=torch.float32)
        saved = self._saved_slices.get((state_name, shard_index), [])
        position = start
        while position < end:
            # A tied weight has state on two stages, and state that is not spread is on every replica. The
            # copies are equal, so any of them will do.
            if not (covering := [piece for piece in saved if piece.start <= position < piece.end]):
                raise MissingOptimizerStateError(
                    f"{self.optimizer_dir} has no optimizer state for {state_name}, elements {position}"
                    f" to {end} of tensor rank {shard_index}; were other parts frozen when it was saved?"
                    " Start a new run from its weights instead (model.checkpoint)"
                )
            piece = min(
                covering,
                key=lambda piece: (
                    piece.file_name not in self._open_files,
                    piece.file_name not in self._own_files,
                ),
            )
            if not piece.kind_bits & 1 << STATE_KINDS.index(state_kind):
                raise _StateNotSaved

            piece_end = min(end, piece.end)
            key = f"{state_name}[{piece.start}:{piece.end}]/{state_kind}"
            try:
                stored = self._open_verified(piece.file_name).get_slice(key)  # read when it is indexed
            except SafetensorError as error:
                raise CheckpointError(
                    f"{self.optimizer_dir / piece.file_name} lacks {key}, which {INDEX_FILE} says it has:"
                    f" {error}"
                ) from error
            output[position - start : piece_end - start] = stored[
                position - piece.start : piece_end - piece.start
            ]
            position = piece_end
        return output

    def read_range(
        self,
        tensor_info: TensorInfo,
        state_kind: str,
        shard_index: int,
        sharding: Sharding,
        start: int,
        end: int,
        expert_index: int | None = None,
    ) -> Tensor | None:
        """Elements ``start:end`` of a flattened shard of a tensor, whatever layout is on disk.

        Args:
            state_kind: one of :data:`STATE_KINDS`.
            shard_index: number of the shard (see :meth:`ProcessGrid.shard_index`).
            sharding: how the tensor is cut in the current run.
            expert_index: for a stack of experts, the expert's number over all ranks. The range is then that
                of its own shard.

        Returns:
            fp32 [end - start]; None if there is no state of this kind (before step 1).
        """
        state_name, saved_sharding = optimizer_state_name(tensor_info.name, expert_index), self.saved_sharding
        if tensor_info.num_experts:
            # The matrix of one expert is cut as a dense one, whichever rank held the expert.
            tensor_info = tensor_info.single_expert
            shard_index %= sharding.etp
            sharding, saved_sharding = Sharding(sharding.etp), Sharding(saved_sharding.etp)
        try:
            if sharding.tensor_parallel_ways(tensor_info) == saved_sharding.tensor_parallel_ways(tensor_info):
                return self._read_saved_range(state_name, shard_index, state_kind, start, end)
            return self._read_resharded(
                state_name, tensor_info, state_kind, shard_index, sharding, saved_sharding, start, end
            )
        except _StateNotSaved:
            return None

    def _read_resharded(
        self,
        state_name: str,
        tensor_info: TensorInfo,
        state_kind: str,
        shard_index: int,
        sharding: Sharding,
        saved_sharding: Sharding,
        start: int,
        end: int,
    ) -> Tensor:
        """:meth:`read_range` for shards that were cut differently. Only the rows of the range are read."""
        num_columns = matrix_shape(tensor_info.shard_shape(sharding))[1]
        saved_columns = matrix_shape(tensor_info.shard_shape(saved_sharding))[1]
        first_row = start // num_columns

        def read_stored_block(saved_shard: str | int, block_region: MatrixRegion) -> Tensor:
            flat_rows = self._read_saved_range(
                state_name,
                int(saved_shard),
                state_kind,
                block_region.row * saved_columns,
                block_region.row_end * saved_columns,
            )
            return flat_rows.view(-1, saved_columns)[:, block_region.col : block_region.col_end]

        def read_whole_block(_: str | int, block_region: MatrixRegion) -> Tensor:
            return gather_region(
                shard_blocks(tensor_info, saved_sharding), block_region, read_stored_block, torch.float32
            )

        shard_region = MatrixRegion(first_row, math.ceil(end / num_columns), 0, num_columns)
        shard_rows = gather_region(
            blocks_of_shard(tensor_info, shard_index, sharding), shard_region, read_whole_block, torch.float32
        )
        return shard_rows.reshape(-1)[start - first_row * num_columns : end - first_row * num_columns].clone()

    def adam_step_count(self, state_name: str) -> int:
        """Adam's step count of a parameter; 0 if the checkpoint has no state for it."""
        shards = range(max(self.saved_sharding.tp, self.saved_sharding.etp))
        slices = (piece for shard in shards for piece in self._saved_slices.get((state_name, shard), []))
        return next((piece.step_count for piece in slices), 0)


def restore_optimizer(
    state_reader: OptimizerStateReader,
    optimizer: ChainedOptimizer,
    live_tensors: list[LiveTensor],
    tensor_infos: Mapping[str, TensorInfo],
    grid: ProcessGrid,
) -> None:
    """Restores this rank's master weights and moments from a checkpoint of any layout."""
    uses_group_counts = any(
        counts_steps_by_group(getattr(part, "optimizer", None)) for part in optimizer.chained_optimizers
    )
    # Others are those that the run begins to train now.
    pieces = [
        piece
        for piece in optimizer_slices(optimizer, live_tensors)
        if piece.live_tensor.tensor_name in tensor_infos
    ]

    def restore(piece: OptimizerSlice) -> None:
        info = tensor_infos[piece.live_tensor.tensor_name]
        place = grid.shard_index(info), grid.sharding, piece.start, piece.end
        for kind in STATE_KINDS:
            state = state_reader.read_range(info, kind, *place, piece.live_tensor.expert_index)
            assert kind != "main" or state is not None
            piece.write_state(kind, state)

    if (state_chunks := chunked_state(optimizer)) is not None:
        state_chunks.chunk_streamer.wait_for_host_state()  # the threads find nothing to wait for
    in_threads(restore, pieces)
    for piece in pieces:
        step_count = state_reader.adam_step_count(piece.state_name)
        if piece.chunked_parameter is not None:
            piece.chunked_parameter.step_count = step_count
        if uses_group_counts:
            piece.param_group["step"] = step_count
        elif step_count and piece.chunked_parameter is None:
            # Each parameter needs its own tensor: torch's Adam counts in place, so that a shared tensor would
            # be counted up once per parameter.
            piece.adam_state["step"] = torch.tensor(float(step_count))


def in_threads(restore: Callable[[Any], object], parts: Iterable[Any]) -> None:
    """Calls ``restore`` for each part of this rank's state, several at a time, without autograd."""
    device = torch.cuda.current_device()

    @torch.no_grad()
    def run(part: Any) -> None:
        torch.cuda.set_device(device)  # a thread begins on the first GPU
        restore(part)

    with ThreadPoolExecutor(_PARALLEL_READS) as pool:
        for _ in pool.map(run, parts):
            progress.note_progress()
