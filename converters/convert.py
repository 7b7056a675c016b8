"""Converts, splits, merges and exports weights: from any source to any layout or a Hugging Face folder."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_vl import __version__, durable
from megatron_vl.json_files import write_json
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, make_layout
from megatron_vl.spec.tensors import WHOLE, Cut, TensorInfo, tensor_table
from megatron_vl.weights.blocks import gather, part_blocks
from megatron_vl.weights.manifest import expert_file_name, file_entry, rank_file_name, write_manifest
from megatron_vl.weights.reader import WeightReader
from megatron_vl.weights.run_folder import EXPORTED
from megatron_vl.weights.tensor_files import (
    Region,
    TensorWriter,
    WeightsError,
    dtype_name,
    make_header,
    matrix_shape,
    read_header,
)
from megatron_vl.weights.video_rule import exported_video_rule, rule_facts, weights_video_rule

from .hf import HfCheckpoint
from .restart import Output, writing
from .rules import Rule
from .stream import CopyJob, Progress, default_workers, run_jobs, verified_ahead

FILE_BYTES = 5_000_000_000
"""Largest size of a file of unsplit weights, unless a single tensor is larger."""


class Source(Protocol):
    """Full canonical tensors, read region by region: a :class:`WeightReader` or a :class:`HfCheckpoint`."""

    spec: ModelSpec

    def dtype(self, name: str) -> torch.dtype: ...

    def region(self, name: str, region: Region) -> Tensor: ...

    def verify(self, name: str) -> None:
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


def convert(
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
    source.check_tied_output()
    origin = {"hf": Path(hf).resolve().name, **rule_facts(exported_video_rule(Path(hf), source.spec))}
    report = _write(source, [Path(hf)], out, layout, "convert", workers, force, origin)
    report.carried = len(source.carried)
    report.notes += [note for note in (source.rounded_decays(),) if note]
    return report


def reshard(
    checkpoint: str | Path,
    out: str | Path,
    layout: dict | None = None,
    *,
    workers: int = 0,
    force: bool = False,
) -> WeightsReport:
    """Converts Megatron weights of any layout to another layout, or merges them if ``layout`` is None.

    Arguments and errors are those of :func:`convert`.
    """
    source = WeightReader(checkpoint)
    what = "split" if layout else "merge"
    # A run's rule for videos is not stored in its weights but in the step folder.
    rule = weights_video_rule(source.path, source.manifest, source.spec)
    origin = {**(source.manifest.get("origin") or {}), **rule_facts(rule)}
    return _write(source, [source.path], out, layout, what, workers, force, origin)


def _write(
    source: Source,
    inputs: list[Path],
    out: str | Path,
    arguments: dict | None,
    what: str,
    workers: int,
    force: bool,
    origin: dict | None,
) -> WeightsReport:
    out = Path(out)
    layout = make_layout(source.spec, **arguments) if arguments else None
    table = tensor_table(source.spec)
    plan = _plan(source, table, layout)
    headers = {
        file: make_header({name: plan.stored[name] for name in names}, {"format": "pt"})
        for file, names in plan.files.items()
    }
    work = _work(what, source, headers, layout.as_dict() if layout else None, origin)
    workers = workers or default_workers()

    with writing(out, inputs, headers, work, force=force, workers=workers, say=_say) as output:
        seconds = _run(what, source, _jobs(source, table, plan, output), output, workers)
        entries = [
            file_entry(
                file,
                {name: (*plan.stored[name], output.digests[file, name]) for name in names},
                plan.ranks[file],
            )
            for file, names in plan.files.items()
        ]

        output.commit()
        write_manifest(out, source.spec, layout, entries, origin)

    size = sum(CopyJob.size(*plan.stored[name]) for names in plan.files.values() for name in names)
    return WeightsReport(
        out,
        len(plan.stored),
        len(plan.files),
        size,
        seconds,
        layout,
        kept_files=output.kept_files(),
        kept_tensors=len(output.kept),
    )


def _jobs(
    source: Source, table: dict[str, TensorInfo], plan: _Plan, output: Output
) -> dict[str, list[CopyJob]]:
    """Tensor -> the jobs that write its shards, except for those that are kept."""
    jobs: dict[str, list[CopyJob]] = {}
    for name, file in plan.order():
        if (file, name) in output.kept:
            continue
        ranks = {f"{kind}_rank": rank for kind, rank in plan.ranks[file].items() if kind != "pp"}
        part = plan.cut.part(table[name], **ranks)
        jobs.setdefault(name, []).append(_job(source, table[name], part, plan.cut, output.writers[file]))
    return jobs


def _work(
    what: str, source: Source, headers: dict[str, bytes], layout: dict | None, rest: Any
) -> dict[str, Any]:
    """Describes a conversion. An interrupted conversion continues only if its description is unchanged."""
    files = {file: hashlib.sha256(header).hexdigest() for file, header in headers.items()}
    return {
        "command": what,
        "layout": layout,
        "source": source.fingerprint(),
        "origin": rest,
        "files": files,
        "version": __version__,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(what: str, source: Source, jobs: dict[str, list[CopyJob]], output: Output, workers: int) -> float:
    """Runs the jobs, ordered by the tensor that they read. Returns the seconds that this took.

    Raises:
        WeightsError: a stored tensor is damaged, or the source changed meanwhile.
    """
    before = source.fingerprint()
    table = tensor_table(source.spec)

    def check(name: str) -> None:
        if name in table:  # other tensors are copied from a folder without hashes
            source.verify(name)

    progress = Progress(what, sum(job.bytes for some in jobs.values() for job in some))
    try:
        run_jobs(verified_ahead(jobs, check, workers), workers, progress, output.record)
    finally:
        progress.close()

    for name, now in source.fingerprint().items():
        if before[name] != now:
            raise WeightsError(f"{name} changed while it was read. The output was removed; start again")
    return progress.seconds


@dataclass
class _Plan:
    """Which tensors go into which file."""

    stored: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Tensor -> type and shape in a file (of one shard)."""
    files: dict[str, list[str]]
    """File -> its tensors."""
    ranks: dict[str, dict[str, int]]
    """File -> the ranks that it belongs to: ``tp`` and ``pp``, or ``ep``, ``etp`` and ``pp``."""
    cut: Cut = WHOLE

    def order(self) -> list[tuple[str, str]]:
        """(tensor, file) in model order. A tensor's shards are adjacent, so that it is read only once."""
        holders: dict[str, list[str]] = {}
        for file, names in self.files.items():
            for name in names:
                holders.setdefault(name, []).append(file)
        return [(name, file) for name in self.stored for file in holders[name]]


def _plan(source: Source, table: dict[str, TensorInfo], layout: Layout | None) -> _Plan:
    cut = layout.cut if layout else WHOLE
    stored = {name: (source.dtype(name), info.shard_shape(cut)) for name, info in table.items()}
    if layout:
        return _Plan(stored, *_shard_files(table, layout), cut)

    groups: list[list[str]] = [[]]
    size = 0
    for name, (dtype, shape) in stored.items():
        rows, cols = matrix_shape(shape)
        size += rows * cols * dtype.itemsize
        if groups[-1] and size > FILE_BYTES:
            groups.append([])
            size = rows * cols * dtype.itemsize
        groups[-1].append(name)

    files = {f"weights-{i + 1:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups)}
    return _Plan(stored, files, {file: {"tp": 0, "pp": 0} for file in files})


def _shard_files(
    table: dict[str, TensorInfo], layout: Layout
) -> tuple[dict[str, list[str]], dict[str, dict[str, int]]]:
    """File -> tensors, and file -> ranks, for all ranks of a layout. A rank without experts has no file for
    them."""
    files: dict[str, list[str]] = {}
    ranks: dict[str, dict[str, int]] = {}
    for p in range(layout.pp):
        here = [info for info in table.values() if layout.stage_of(info) == p]
        dense, experts = (
            [info.name for info in here if bool(info.experts) is which] for which in (False, True)
        )
        for t in range(layout.tp):
            files[rank_file_name(t, p)] = dense
            ranks[rank_file_name(t, p)] = {"tp": t, "pp": p}
        for e in range(layout.ep if experts else 0):
            for t in range(layout.etp):
                file = expert_file_name(e, t, p)
                files[file] = experts
                ranks[file] = {"ep": e, "etp": t, "pp": p}

    return files, ranks


def _job(source: Source, info: TensorInfo, part: int, cut: Cut, writer: TensorWriter) -> CopyJob:
    """The job that writes one part of a canonical tensor."""
    dtype = source.dtype(info.name)
    blocks = part_blocks(info, part, cut)

    def read(region: Region) -> Tensor:
        return gather(blocks, region, lambda name, full: source.region(str(name), full), dtype)

    return CopyJob(writer, info.name, info.shard_shape(cut), dtype, read)


# --- To Hugging Face ----------------------------------------------------------------------------------------


def export(
    checkpoint: str | Path, hf: str | Path, out: str | Path, *, workers: int = 0, force: bool = False
) -> WeightsReport:
    """Exports Megatron weights to a folder like the original Hugging Face folder.

    Files, names, order and types of tensors are those of the original, so the export of untrained weights
    equals the original byte for byte. Tensors that are not part of the model (``mtp.*`` of Qwen3.5) are
    copied from the original. Values of another type, such as the weights of a float32 run, are rounded to the
    original's type and counted in the report. All other files are copied unchanged.

    ``megatron_vl.json`` next to the weights names the rule for videos under which they were trained, if it is
    known: that of the run or of the weights, otherwise that of ``hf``.

    Args:
        checkpoint: weights of any layout, or a run, whose latest checkpoint is exported.
        hf: the original Hugging Face folder.
        workers, force: as in :func:`convert`.

    Raises:
        WeightsError: the checkpoint belongs to another model than ``hf``, or its padding holds values that
            HF cannot store.
        FileExistsError: ``out`` holds something that is not to be replaced.
    """
    source = WeightReader(checkpoint)
    origin = HfCheckpoint(hf)
    out = Path(out)
    workers = workers or default_workers()
    _check_same_model(source, origin)
    _check_padding(source, origin, workers)
    rule = _video_rule(source, origin)
    companions, skipped = origin.folder.companions()
    headers = {file: read_header(origin.path / file) for file in origin.folder.files}
    inputs = [source.path, origin.path]
    work = _work("export", source, headers, None, origin.fingerprint())

    with writing(out, inputs, headers, work, force=force, workers=workers, hf=True, say=_say) as output:
        seconds = _run("export", source, _export_jobs(source, origin, output), output, workers)
        output.commit()
        for path in companions:
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin.path / path, out / path)

        _write_video_rule(rule, out)
        for path in {out / path for path in companions} | {out / path.parent for path in companions} | {out}:
            durable.sync(path)

    names = [str(path) for path in skipped]
    written = [*(origin.stored[hf] for hf in origin.in_order()), *origin.carried]
    size = sum(CopyJob.size(origin.folder.dtype(name), origin.folder.shape(name)) for name in written)
    return WeightsReport(
        out,
        len(written),
        len(headers),
        size,
        seconds,
        None,
        _casts(source, origin),
        names,
        carried=len(origin.carried),
        kept_files=output.kept_files(),
        kept_tensors=len(output.kept),
    )


def _export_jobs(source: WeightReader, origin: HfCheckpoint, output: Output) -> dict[str, list[CopyJob]]:
    """Canonical or carried tensor -> the jobs that write its HF tensors, except for those that are kept.

    They are in model order, so that the HF tensors of one canonical tensor (q, k, v) find its bytes in the
    page cache.
    """
    jobs: dict[str, list[CopyJob]] = {}
    for hf in origin.in_order():
        stored = origin.stored[hf]
        file = origin.folder.where[stored]
        if (file, stored) not in output.kept:
            tensor = str(origin.hf_blocks(hf)[0].part)
            jobs.setdefault(tensor, []).append(_hf_job(source, origin, output.writers[file], hf))

    for name in origin.carried:
        file = origin.folder.where[name]
        if (file, name) not in output.kept:
            jobs[name] = [_carried_job(origin, output.writers[file], name)]
    return jobs


def _casts(source: WeightReader, origin: HfCheckpoint) -> dict[tuple[str, str], int]:
    """The number of HF tensors whose type an export changes, by (from, to)."""
    casts: Counter[tuple[str, str]] = Counter()
    for rule in origin.rules.values():
        dtype = source.dtype(rule.name)
        if dtype != origin.dtype(rule.name):
            casts.update((dtype_name(dtype), dtype_name(origin.hf_dtype(hf))) for hf in rule.hf)
    return dict(casts)


def _video_rule(source: WeightReader, origin: HfCheckpoint) -> dict[str, str]:
    """The rule for videos under which the weights were trained: their own, else that of the HF folder."""
    own = weights_video_rule(source.path, source.manifest, source.spec)
    return own or exported_video_rule(origin.path, origin.spec)


def _write_video_rule(rule: dict[str, str], out: Path) -> None:
    """Writes the rule for videos to ``out``. If no rule is known, removes the file of an earlier export."""
    if rule:
        write_json(out / EXPORTED, rule_facts(rule))
    else:
        (out / EXPORTED).unlink(missing_ok=True)


def _hf_job(source: WeightReader, origin: HfCheckpoint, writer: TensorWriter, hf: str) -> CopyJob:
    """The job that writes one HF tensor from canonical tensors."""
    blocks = origin.hf_blocks(hf)
    dtype = origin.hf_dtype(hf)
    stored = origin.stored[hf]

    def read(region: Region) -> Tensor:
        return gather(blocks, region, lambda name, full: source.region(str(name), full), dtype)

    return CopyJob(writer, stored, origin.folder.shape(stored), dtype, read)


def _carried_job(origin: HfCheckpoint, writer: TensorWriter, name: str) -> CopyJob:
    """The job that copies a tensor which is not part of the model from the original folder."""

    def read(region: Region) -> Tensor:
        return origin.folder.region(name, region)

    return CopyJob(writer, name, origin.folder.shape(name), origin.folder.dtype(name), read)


def _check_same_model(source: WeightReader, origin: HfCheckpoint) -> None:
    if source.spec.family != origin.spec.family:
        raise WeightsError(
            f"{source.path} holds a {source.spec.family} model, but {origin.path} holds a"
            f" {origin.spec.family} model"
        )
    for name, value, other in source.spec.differences(origin.spec):
        raise WeightsError(
            f"{name} is {value} in {source.path} but {other} in {origin.path}: they are different models"
        )


def _check_padding(source: WeightReader, origin: HfCheckpoint, workers: int) -> None:
    """Checks that padding is zero. Otherwise, it would be lost, and the exported model would be another one.

    Raises:
        WeightsError: the padding of a tensor is not zero.
    """

    def check(rule: Rule) -> None:
        for region in rule.padding:
            if source.region(rule.name, region).count_nonzero():
                raise WeightsError(
                    f"{source.path}: the padding of tensor {rule.name!r} holds values other than zero; "
                    "they cannot be exported"
                )

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(check, (rule for rule in origin.rules.values() if rule.padding)))
