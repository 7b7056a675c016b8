"""Converts, splits, merges and exports weights: from any source to any layout or a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_vl import durable_files
from megatron_vl.json_files import write_json
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, make_layout
from megatron_vl.spec.tensors import UNSHARDED, Sharding, TensorInfo, tensor_table
from megatron_vl.weights.manifest import expert_file_name, file_entry, rank_file_name, write_manifest
from megatron_vl.weights.matrix_blocks import MatrixBlock, blocks_of_shard, gather_region
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from megatron_vl.weights.tensor_files import (
    MatrixRegion,
    WeightsError,
    dtype_name,
    make_safetensors_header,
    matrix_shape,
    read_safetensors_header,
)
from megatron_vl.weights.video_rule import exported_video_rule, video_rule_entry, weights_video_rule
from megatron_vl.weights.weight_reader import WeightReader

from .copy_jobs import CopyJob, ProgressBar, default_worker_count, order_with_checks, run_copy_tasks
from .hf_checkpoint import HfCheckpoint
from .output_folder import ConversionOutput, ConversionRequest, open_output
from .rules import ConversionRule

MAX_FILE_BYTES = 5_000_000_000
"""Largest size of a file of unsplit weights, unless a single tensor is larger."""


class WeightSource(Protocol):
    """Full canonical tensors, read region by region: a :class:`WeightReader` or a :class:`HfCheckpoint`."""

    spec: ModelSpec
    path: Path

    def dtype(self, tensor_name: str) -> torch.dtype: ...

    def read_region(self, tensor_name: str, region: MatrixRegion) -> Tensor: ...

    def verify_tensor(self, tensor_name: str) -> None:
        """Raises :class:`WeightsError` if a tensor is known to differ from what was written."""

    def fingerprint(self) -> dict[str, str]:
        """Facts that change when the source changes."""


@dataclass
class WeightsReport:
    """The result of a conversion."""

    out: Path
    tensors: int
    files: int
    bytes: int
    """Size of all files, including those that an earlier attempt wrote."""
    seconds: float
    """Time for writing the files that no earlier attempt wrote."""
    layout: Layout | None = None
    cast: dict[tuple[str, str], int] = field(default_factory=dict)
    """Number of tensors whose type was changed, by (from, to)."""
    skipped: list[str] = field(default_factory=list)
    """Files with weights in other formats, which were not copied from the original folder."""
    carried: int = 0
    """Number of tensors that are not part of the model. An export copies them from the original folder; a
    conversion leaves them out."""
    notes: list[str] = field(default_factory=list)
    """Further information about the source for the user."""
    kept_files: int = 0
    """Files that an earlier, interrupted attempt had completed."""
    kept_tensors: int = 0
    """Tensors that the earlier attempt had written, including those in incomplete files."""


# --- To Megatron --------------------------------------------------------------------------------------------


def convert_weights(
    hf: str | Path, out: str | Path, layout: dict | None = None, *, workers: int = 0, force: bool = False
) -> WeightsReport:
    """Converts a Hugging Face folder to Megatron weights.

    Args:
        layout: arguments of :func:`make_layout` for shards; None: unsplit weights.
        workers: number of threads; 0: as many as the machine can use.
        force: whether to replace weights that are already in ``out``.

    Raises:
        WeightsError, ConfigError, LayoutError: the folder cannot be converted, or not to this layout.
        FileExistsError: ``out`` holds something that is not to be replaced.
    """
    source = HfCheckpoint(hf)
    # A tied output layer is not stored in Megatron weights, so a different one would be lost.
    source.check_tied_output()
    weights_origin = {
        "hf": Path(hf).resolve().name,
        **video_rule_entry(exported_video_rule(Path(hf), source.spec)),
    }

    weights_report = _write_weights(source, out, layout, "convert", workers, force, weights_origin)
    weights_report.carried = len(source.carried_names)
    if rounding_note := source.rounded_decays():
        weights_report.notes.append(rounding_note)
    return weights_report


def reshard_weights(
    checkpoint: str | Path,
    out: str | Path,
    layout: dict | None = None,
    *,
    workers: int = 0,
    force: bool = False,
) -> WeightsReport:
    """Converts Megatron weights of any layout to another layout, or merges them if ``layout`` is None.

    The arguments and errors are those of :func:`convert_weights`.
    """
    source = WeightReader(checkpoint)
    command_name = "split" if layout else "merge"

    # A run's rule for videos is not stored in its weights but in the step folder.
    trained_rule = weights_video_rule(source.path, source.manifest, source.spec)
    weights_origin = {**(source.manifest.get("origin") or {}), **video_rule_entry(trained_rule)}
    return _write_weights(source, out, layout, command_name, workers, force, weights_origin)


def _write_weights(
    source: WeightSource,
    output_dir: str | Path,
    layout_arguments: dict | None,
    command_name: str,
    worker_count: int,
    force_overwrite: bool,
    weights_origin: dict,
) -> WeightsReport:
    """Writes Megatron weights of a layout: their files first, then the manifest."""
    layout = make_layout(source.spec, **layout_arguments) if layout_arguments else None
    file_plan = _plan_files(source, layout)

    # Names, types and shapes are known in advance, so each file gets its final size and header before any
    # tensor is read, and threads fill it in any order.
    header_by_file = {}
    for file, names in file_plan.tensors_by_file.items():
        file_types = {name: file_plan.stored_types[name] for name in names}
        header_by_file[file] = make_safetensors_header(file_types, {"format": "pt"})
    request = ConversionRequest(
        command_name,
        Path(output_dir),
        [source.path],
        header_by_file,
        source.fingerprint(),
        weights_origin,
        layout,
        worker_count or default_worker_count(),
        force_overwrite,
    )

    # The manifest comes last: a folder without one does not count as weights.
    complete_output = partial(_write_manifest, request, source.spec, file_plan)
    return _write_files(request, source, partial(_shard_jobs, source, file_plan), complete_output)


def _write_files(
    request: ConversionRequest,
    source: WeightSource,
    make_jobs: Callable[[ConversionOutput], dict[str, list[CopyJob]]],
    complete_output: Callable[[ConversionOutput], None],
) -> WeightsReport:
    """Writes all tensors of a conversion or an export.

    Args:
        make_jobs: returns for each tensor that is read the jobs that need it.
        complete_output: writes what makes the folder complete, after the files have their final names.

    Raises:
        WeightsError: a stored tensor is damaged, or the source changed meanwhile.
    """
    with open_output(request) as conversion_output:
        write_seconds = _run_copy_jobs(request, source, make_jobs(conversion_output), conversion_output)
        conversion_output.commit_files()
        complete_output(conversion_output)

    # A replicated tensor counts once as a tensor, and its bytes once for each file that holds it.
    tensor_names = set()
    tensor_bytes = -sum(map(len, request.header_by_file.values()))
    for writer in conversion_output.writer_by_file.values():
        tensor_names.update(writer.tensor_names())
        tensor_bytes += writer.file_size_bytes
    return WeightsReport(
        request.output_dir,
        len(tensor_names),
        len(request.header_by_file),
        tensor_bytes,
        write_seconds,
        request.layout,
        kept_files=conversion_output.count_kept_files(),
        kept_tensors=len(conversion_output.kept_tensors),
    )


def _write_manifest(
    request: ConversionRequest, spec: ModelSpec, file_plan: _FilePlan, conversion_output: ConversionOutput
) -> None:
    file_entries = []
    for file, names in file_plan.tensors_by_file.items():
        stored_tensors = {}
        for name in names:
            tensor_sha256 = conversion_output.sha256_by_tensor[file, name]
            stored_tensors[name] = (*file_plan.stored_types[name], tensor_sha256)
        file_entries.append(file_entry(file, stored_tensors, file_plan.ranks_by_file[file]))
    write_manifest(request.output_dir, spec, request.layout, file_entries, request.weights_origin)


def _shard_jobs(
    source: WeightSource, file_plan: _FilePlan, conversion_output: ConversionOutput
) -> dict[str, list[CopyJob]]:
    """Tensor -> the jobs that write its shards, except for those that are kept."""
    tensor_infos = tensor_table(source.spec)
    jobs_by_tensor: dict[str, list[CopyJob]] = {}
    for name, file in file_plan.model_order():
        if (file, name) in conversion_output.kept_tensors:
            continue

        # The pipeline rank selects tensors; the other ranks select the shard of a tensor.
        shard_ranks = {}
        for kind, rank in file_plan.ranks_by_file[file].items():
            if kind != "pp":
                shard_ranks[f"{kind}_rank"] = rank

        shard_index = file_plan.sharding.shard_index(tensor_infos[name], **shard_ranks)
        dtype, shape = file_plan.stored_types[name]
        source_blocks = blocks_of_shard(tensor_infos[name], shard_index, file_plan.sharding)
        writer = conversion_output.writer_by_file[file]
        jobs_by_tensor.setdefault(name, []).append(
            CopyJob(writer, name, shape, dtype, _block_reader(source, source_blocks, dtype))
        )
    return jobs_by_tensor


def _block_reader(
    source: WeightSource, source_blocks: Sequence[MatrixBlock], dtype: torch.dtype
) -> Callable[[MatrixRegion], Tensor]:
    """A function that reads regions of a matrix that consists of rectangles of canonical tensors."""

    def read_source(tensor_name: object, full_region: MatrixRegion) -> Tensor:
        return source.read_region(str(tensor_name), full_region)

    return lambda region: gather_region(source_blocks, region, read_source, dtype)


def _run_copy_jobs(
    request: ConversionRequest,
    source: WeightSource,
    jobs_by_tensor: dict[str, list[CopyJob]],
    conversion_output: ConversionOutput,
) -> float:
    """Runs the jobs, ordered by the tensor that they read. Returns the seconds that this took."""
    tensor_infos = tensor_table(source.spec)

    def check(tensor_name: str) -> None:
        if tensor_name in tensor_infos:  # other tensors are copied from a folder without hashes
            source.verify_tensor(tensor_name)

    total_bytes = sum(job.byte_count for copy_jobs in jobs_by_tensor.values() for job in copy_jobs)
    progress_bar = ProgressBar(request.command_name, total_bytes)
    try:
        run_copy_tasks(
            order_with_checks(jobs_by_tensor, check, request.worker_count),
            request.worker_count,
            progress_bar,
            conversion_output.record_tensor,
        )
    finally:
        progress_bar.clear_line()

    # A source that was replaced while it was read would give a mixture of two models.
    for source_file, current_fact in source.fingerprint().items():
        if request.source_facts[source_file] != current_fact:
            raise WeightsError(
                f"{source_file} changed while it was read. The output was removed; start again"
            )
    return progress_bar.elapsed_seconds


@dataclass
class _FilePlan:
    """Which tensors go into which file."""

    stored_types: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Tensor -> type and shape in a file (of one shard)."""
    tensors_by_file: dict[str, list[str]]
    """File -> its tensors."""
    ranks_by_file: dict[str, dict[str, int]]
    """File -> the ranks that it belongs to: ``tp`` and ``pp``, or ``ep``, ``etp`` and ``pp``."""
    sharding: Sharding = UNSHARDED

    def model_order(self) -> list[tuple[str, str]]:
        """(tensor, file) in model order. A tensor's shards are adjacent, so that it is read only once."""
        files_by_tensor: dict[str, list[str]] = {}
        for file, names in self.tensors_by_file.items():
            for name in names:
                files_by_tensor.setdefault(name, []).append(file)
        return [(name, file) for name in self.stored_types for file in files_by_tensor[name]]


def _plan_files(source: WeightSource, layout: Layout | None) -> _FilePlan:
    """Decides which tensors go into which file: one file for each rank of ``layout``, or files of at most
    ``MAX_FILE_BYTES`` in model order."""
    sharding = layout.sharding if layout else UNSHARDED
    tensor_infos = tensor_table(source.spec)

    stored_types = {}
    for tensor_name, info in tensor_infos.items():
        stored_types[tensor_name] = (source.dtype(tensor_name), info.shard_shape(sharding))

    if layout:
        return _FilePlan(stored_types, *_shard_files(tensor_infos, layout), sharding)

    file_groups: list[list[str]] = [[]]
    group_bytes = 0
    for tensor_name, (dtype, shape) in stored_types.items():
        row_count, col_count = matrix_shape(shape)
        group_bytes += row_count * col_count * dtype.itemsize
        if file_groups[-1] and group_bytes > MAX_FILE_BYTES:
            file_groups.append([])
            group_bytes = row_count * col_count * dtype.itemsize
        file_groups[-1].append(tensor_name)

    tensors_by_file = {}
    for i, names in enumerate(file_groups):
        tensors_by_file[f"weights-{i + 1:05d}-of-{len(file_groups):05d}.safetensors"] = names

    return _FilePlan(stored_types, tensors_by_file, {file: {"tp": 0, "pp": 0} for file in tensors_by_file})


def _shard_files(
    tensor_infos: dict[str, TensorInfo], layout: Layout
) -> tuple[dict[str, list[str]], dict[str, dict[str, int]]]:
    """File -> tensors, and file -> ranks, for all ranks of a layout. A rank without experts has no file for
    them."""
    tensors_by_file: dict[str, list[str]] = {}
    ranks_by_file: dict[str, dict[str, int]] = {}
    for pipeline_rank in range(layout.pp):
        dense_tensors: list[str] = []
        expert_tensors: list[str] = []
        for info in tensor_infos.values():
            if layout.owning_pipeline_rank(info) == pipeline_rank:
                (expert_tensors if info.num_experts else dense_tensors).append(info.name)

        for tensor_rank in range(layout.tp):
            tensors_by_file[rank_file_name(tensor_rank, pipeline_rank)] = dense_tensors
            ranks_by_file[rank_file_name(tensor_rank, pipeline_rank)] = {
                "tp": tensor_rank,
                "pp": pipeline_rank,
            }

        for expert_rank in range(layout.ep if expert_tensors else 0):
            for tensor_rank in range(layout.etp):
                file_name = expert_file_name(expert_rank, tensor_rank, pipeline_rank)
                tensors_by_file[file_name] = expert_tensors
                ranks_by_file[file_name] = {"ep": expert_rank, "etp": tensor_rank, "pp": pipeline_rank}

    return tensors_by_file, ranks_by_file


# --- To Hugging Face ----------------------------------------------------------------------------------------


def export_weights(
    checkpoint: str | Path, hf: str | Path, output_dir: str | Path, *, workers: int = 0, force: bool = False
) -> WeightsReport:
    """Exports Megatron weights to a folder like the original Hugging Face folder.

    Files, names, order and types of tensors are those of the original, so the export of untrained weights
    equals the original byte for byte. Tensors that are not part of the model (``mtp.*`` of Qwen3.5) and all
    other files are copied from it. Values of another type, such as the weights of a float32 run, are rounded
    and counted in the report. ``megatron_vl.json`` names the rule for videos under which the weights were
    trained, if it is known: their own, otherwise that of ``hf``.

    Args:
        checkpoint: weights of any layout, or a run, whose latest checkpoint is exported.

    Raises:
        WeightsError: the checkpoint belongs to another model, or its padding holds values.
        FileExistsError: ``output_dir`` holds something that is not to be replaced.
    """
    source = WeightReader(checkpoint)
    hf_checkpoint = HfCheckpoint(hf)
    request = _export_request(source, hf_checkpoint, Path(output_dir), workers, force)

    # Everything that can be refused is refused before the first byte is written.
    _check_same_model(source, hf_checkpoint)
    _check_padding(source, hf_checkpoint, request.worker_count)
    companion_files, skipped_files = hf_checkpoint.tensor_folder.companion_files()
    video_rule = weights_video_rule(source.path, source.manifest, source.spec)
    video_rule = video_rule or exported_video_rule(hf_checkpoint.path, hf_checkpoint.spec)

    make_jobs = partial(_export_jobs, source, hf_checkpoint)
    complete_output = partial(_complete_export, request, hf_checkpoint.path, companion_files, video_rule)
    weights_report = _write_files(request, source, make_jobs, complete_output)
    weights_report.cast = _count_casts(source, hf_checkpoint)
    weights_report.skipped = list(map(str, skipped_files))
    weights_report.carried = len(hf_checkpoint.carried_names)
    return weights_report


def _export_request(
    source: WeightReader, hf_checkpoint: HfCheckpoint, output_dir: Path, worker_count: int, force: bool
) -> ConversionRequest:
    # With the original headers, unchanged tensors give the original files byte for byte.
    header_by_file = {}
    for file in hf_checkpoint.tensor_folder.reader_by_file:
        header_by_file[file] = read_safetensors_header(hf_checkpoint.path / file)

    return ConversionRequest(
        "export",
        output_dir,
        [source.path, hf_checkpoint.path],
        header_by_file,
        source.fingerprint(),
        hf_checkpoint.fingerprint(),
        None,
        worker_count or default_worker_count(),
        force,
    )


def _complete_export(
    request: ConversionRequest,
    hf_dir: Path,
    companion_files: list[Path],
    video_rule: dict[str, str],
    conversion_output: ConversionOutput,
) -> None:
    """Copies the small files, and writes the rule for videos under which the weights were trained."""
    synced_paths = {request.output_dir}
    for relative_path in companion_files:
        copied_path = request.output_dir / relative_path
        copied_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(hf_dir / relative_path, copied_path)
        synced_paths |= {copied_path, copied_path.parent}

    if video_rule:
        write_json(request.output_dir / EXPORT_FACTS_FILE, video_rule_entry(video_rule))
    else:  # an earlier export may have left one
        (request.output_dir / EXPORT_FACTS_FILE).unlink(missing_ok=True)

    # The journal is deleted after this, and a folder without a journal counts as finished. So everything must
    # be on the disk now.
    for synced_path in synced_paths:
        durable_files.fsync_path(synced_path)


def _export_jobs(
    source: WeightReader, hf_checkpoint: HfCheckpoint, conversion_output: ConversionOutput
) -> dict[str, list[CopyJob]]:
    """Canonical or carried tensor -> the jobs that write its HF tensors, except for those that are kept.

    They are in model order, so that the HF tensors of one canonical tensor (q, k, v) find its bytes in the
    page cache.
    """
    tensor_folder = hf_checkpoint.tensor_folder
    released_names = {}
    for hf_name in hf_checkpoint.names_in_order():
        released_names[hf_checkpoint.stored_name_by_released[hf_name]] = hf_name

    jobs_by_tensor: dict[str, list[CopyJob]] = {}
    for stored_name in (*released_names, *hf_checkpoint.carried_names):
        file_name = tensor_folder.file_by_tensor[stored_name]
        if (file_name, stored_name) in conversion_output.kept_tensors:
            continue

        canonical_name = stored_name
        dtype = tensor_folder.dtype(stored_name)
        read_region: Callable[[MatrixRegion], Tensor] = partial(tensor_folder.read_region, stored_name)
        if stored_name in released_names:  # a carried tensor is copied
            hf_blocks = hf_checkpoint.hf_blocks(released_names[stored_name])
            canonical_name = str(hf_blocks[0].part_id)
            read_region = _block_reader(source, hf_blocks, dtype)
        writer = conversion_output.writer_by_file[file_name]
        jobs_by_tensor.setdefault(canonical_name, []).append(
            CopyJob(writer, stored_name, tensor_folder.shape(stored_name), dtype, read_region)
        )
    return jobs_by_tensor


def _count_casts(source: WeightReader, hf_checkpoint: HfCheckpoint) -> dict[tuple[str, str], int]:
    """The number of HF tensors whose type an export changes, by (from, to)."""
    cast_counts: Counter[tuple[str, str]] = Counter()
    for rule in hf_checkpoint.rule_by_name.values():
        dtype = source.dtype(rule.name)
        if dtype != hf_checkpoint.dtype(rule.name):
            cast_counts.update(
                (dtype_name(dtype), dtype_name(hf_checkpoint.hf_dtype(hf_name))) for hf_name in rule.hf_shapes
            )
    return dict(cast_counts)


def _check_same_model(source: WeightReader, hf_checkpoint: HfCheckpoint) -> None:
    """Raises :class:`WeightsError` unless both are checkpoints of one model."""
    if source.spec.family != hf_checkpoint.spec.family:
        raise WeightsError(
            f"{source.path} holds a {source.spec.family} model, but {hf_checkpoint.path} holds a"
            f" {hf_checkpoint.spec.family} model"
        )
    for name, value, origin_value in source.spec.different_fields(hf_checkpoint.spec):
        raise WeightsError(
            f"{name} is {value} in {source.path} but {origin_value} "
            f"in {hf_checkpoint.path}: they are different models"
        )


def _check_padding(source: WeightReader, hf_checkpoint: HfCheckpoint, worker_count: int) -> None:
    """Checks that padding is zero. Otherwise, it would be lost, and the exported model would be another one.

    Raises:
        WeightsError: the padding of a tensor is not zero.
    """

    def check(rule: ConversionRule) -> None:
        for padding_region in rule.padding:
            if source.read_region(rule.name, padding_region).count_nonzero():
                raise WeightsError(
                    f"{source.path}: the padding of tensor {rule.name!r} holds values other than zero; "
                    "they cannot be exported"
                )

    with ThreadPoolExecutor(worker_count) as pool:
        list(pool.map(check, (rule for rule in hf_checkpoint.rule_by_name.values() if rule.padding)))
