"""Convert, split, merge and export: any source of weights into any layout, and back into a Hugging Face
folder."""

from __future__ import annotations

import dataclasses
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
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, make_layout
from megatron_vl.spec.tensors import WHOLE, Cut, TensorInfo, tensor_table
from megatron_vl.weights.blocks import gather, part_blocks
from megatron_vl.weights.manifest import expert_file_name, file_entry, rank_file_name, write_manifest
from megatron_vl.weights.reader import WeightReader
from megatron_vl.weights.tensor_files import (
    TensorWriter,
    WeightsError,
    Window,
    dtype_name,
    make_header,
    matrix_shape,
    read_header,
)

from .hf import HfCheckpoint
from .restart import Output, writing
from .rules import Rule
from .stream import Job, Progress, checked_ahead, default_workers, run_jobs

FILE_BYTES = 5_000_000_000
"""Largest file of unsplit weights (a single tensor may be larger)."""


class Source(Protocol):
    """Full canonical tensors, window by window: a :class:`WeightReader` or a :class:`HfCheckpoint`."""

    spec: ModelSpec

    def dtype(self, name: str) -> torch.dtype: ...

    def window(self, name: str, window: Window) -> Tensor: ...

    def check(self, name: str) -> None:
        """Raises :class:`WeightsError` when a tensor is not what was written, where that can be known."""

    def fingerprint(self) -> dict[str, str]:
        """What changes when the source does."""


@dataclass
class Report:
    """What was written. ``cast`` counts tensors whose type was changed, by (from, to)."""

    out: Path
    tensors: int
    files: int
    bytes: int
    """Of all files, kept ones included; ``seconds`` are those of writing the others."""
    seconds: float
    layout: Layout | None = None
    cast: dict[tuple[str, str], int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    """Weights of the origin's folder that were not carried over (other formats)."""
    kept_files: int = 0
    """Files that an earlier, interrupted attempt had completed; ``kept_tensors`` counts those in other files
    too."""
    kept_tensors: int = 0


# --- To Megatron --------------------------------------------------------------------------------------------


def convert(
    hf: str | Path, out: str | Path, layout: dict | None = None, *, workers: int = 0, force: bool = False
) -> Report:
    """HF folder -> Megatron weights.

    Args:
        layout: arguments of :func:`make_layout` for shards; None for unsplit weights.
        workers: threads; 0 for as many as the machine has use for.
        force: replace weights that are already in ``out``.
    """
    source = HfCheckpoint(hf)
    source.check_tied_output()
    origin = {"hf": Path(hf).resolve().name}
    return _write(source, [Path(hf)], out, layout, "convert", workers, force, origin)


def reshard(
    checkpoint: str | Path,
    out: str | Path,
    layout: dict | None = None,
    *,
    workers: int = 0,
    force: bool = False,
) -> Report:
    """Megatron weights of any layout -> another layout, or unsplit when ``layout`` is None."""
    source = WeightReader(checkpoint)
    what = "split" if layout else "merge"
    return _write(source, [source.path], out, layout, what, workers, force, source.manifest.get("origin"))


def _write(
    source: Source,
    inputs: list[Path],
    out: str | Path,
    arguments: dict | None,
    what: str,
    workers: int,
    force: bool,
    origin: dict | None,
) -> Report:
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
        jobs: dict[str, list[Job]] = {}
        for name, file in plan.order():
            if (file, name) not in output.kept:
                part = plan.cut.part(
                    table[name],
                    **{f"{kind}_rank": n for kind, n in plan.places[file].items() if kind != "pp"},
                )
                jobs.setdefault(name, []).append(
                    _job(source, table[name], part, plan.cut, output.writers[file])
                )
        seconds = _run(what, source, jobs, output, workers)
        entries = [
            file_entry(
                file,
                {name: (*plan.stored[name], output.digests[file, name]) for name in names},
                plan.places[file],
            )
            for file, names in plan.files.items()
        ]
        output.commit()
        write_manifest(out, source.spec, layout, entries, origin)
    size = sum(Job.size(*plan.stored[name]) for names in plan.files.values() for name in names)
    kept = output.kept_files(), len(output.kept)
    return Report(out, len(plan.stored), len(plan.files), size, seconds, layout, {}, [], *kept)


def _work(
    what: str, source: Source, headers: dict[str, bytes], layout: dict | None, rest: Any
) -> dict[str, Any]:
    """What is being made of what: a conversion that was interrupted goes on when all of it is as it was."""
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


def _run(what: str, source: Source, jobs: dict[str, list[Job]], output: Output, workers: int) -> float:
    """Writes what is to be written, by the tensor that it is read from. Returns the seconds it took."""
    before = source.fingerprint()
    progress = Progress(what, sum(job.bytes for some in jobs.values() for job in some))
    try:
        run_jobs(checked_ahead(jobs, source.check, workers), workers, progress, output.record)
    finally:
        progress.close()
    for name, now in source.fingerprint().items():
        if before[name] != now:
            raise WeightsError(
                f"{name} was changed while it was read; what was written is removed: start again"
            )
    return progress.seconds


@dataclass
class _Plan:
    """Which tensors go into which file."""

    stored: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Tensor -> type and shape as stored (of one shard)."""
    files: dict[str, list[str]]
    places: dict[str, dict[str, int]]
    """File -> the ranks whose it is: ``tp`` and ``pp``, or ``ep``, ``etp`` and ``pp``."""
    cut: Cut = WHOLE

    def order(self) -> list[tuple[str, str]]:
        """(tensor, file) in model order, all shards of a tensor together: its bytes are read once from the
        disk."""
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
    """File -> tensors and file -> ranks, of all ranks of a layout; no file where a rank holds nothing."""
    files: dict[str, list[str]] = {}
    places: dict[str, dict[str, int]] = {}
    for p in range(layout.pp):
        here = [info for info in table.values() if layout.stage_of(info) == p]
        dense, experts = (
            [info.name for info in here if bool(info.experts) is which] for which in (False, True)
        )
        for t in range(layout.tp):
            files[rank_file_name(t, p)], places[rank_file_name(t, p)] = dense, {"tp": t, "pp": p}
        for e in range(layout.ep if experts else 0):
            for t in range(layout.etp):
                file = expert_file_name(e, t, p)
                files[file], places[file] = experts, {"ep": e, "etp": t, "pp": p}
    return files, places


def _job(source: Source, info: TensorInfo, part: int, cut: Cut, writer: TensorWriter) -> Job:
    dtype, blocks = source.dtype(info.name), part_blocks(info, part, cut)

    def read(window: Window) -> Tensor:
        return gather(blocks, window, lambda name, full: source.window(str(name), full), dtype)

    return Job(writer, info.name, info.shard_shape(cut), dtype, read)


# --- To Hugging Face ----------------------------------------------------------------------------------------


def export(
    checkpoint: str | Path, hf: str | Path, out: str | Path, *, workers: int = 0, force: bool = False
) -> Report:
    """Megatron weights of any layout, or a run's latest -> a HF folder like the one of origin.

    Files, names, order and types of tensors are the origin's: weights that were not trained give back its
    files byte for byte. Values of another type (a run that kept float32) are rounded to the origin's type and
    counted in the report. Everything that is not weights is copied verbatim.

    Raises:
        WeightsError: the checkpoint is of another model than ``hf``, or its padding holds values that HF
            cannot.
    """
    source, origin, out, workers = (
        WeightReader(checkpoint),
        HfCheckpoint(hf),
        Path(out),
        workers or default_workers(),
    )
    _check_same_model(source, origin)
    _check_padding(source, origin, workers)
    companions, skipped = origin.folder.companions()
    headers = {file: read_header(origin.path / file) for file in origin.folder.files}
    inputs, work = [source.path, origin.path], _work("export", source, headers, None, origin.fingerprint())
    with writing(out, inputs, headers, work, force=force, workers=workers, hf=True, say=_say) as output:
        # In model order, so that tensors that one canonical tensor gives (q, k, v) find its bytes in the page
        # cache.
        jobs: dict[str, list[Job]] = {}
        for hf in origin.in_order():
            stored = origin.stored[hf]
            file = origin.folder.where[stored]
            if (file, stored) not in output.kept:
                tensor = str(origin.hf_blocks(hf)[0].part)
                jobs.setdefault(tensor, []).append(_hf_job(source, origin, output.writers[file], hf))
        seconds = _run("export", source, jobs, output, workers)
        output.commit()
        for path in companions:
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin.path / path, out / path)
        for path in {out / path for path in companions} | {out / path.parent for path in companions} | {out}:
            durable.sync(path)
    cast = Counter(
        (dtype_name(source.dtype(rule.name)), dtype_name(origin.hf_dtype(hf)))
        for rule in origin.rules.values()
        for hf in rule.hf
        if source.dtype(rule.name) != origin.dtype(rule.name)
    )
    names, kept = [str(path) for path in skipped], (output.kept_files(), len(output.kept))
    size = sum(
        Job.size(origin.hf_dtype(hf), origin.folder.shape(origin.stored[hf])) for hf in origin.in_order()
    )
    return Report(out, len(origin.in_order()), len(headers), size, seconds, None, dict(cast), names, *kept)


def _hf_job(source: WeightReader, origin: HfCheckpoint, writer: TensorWriter, hf: str) -> Job:
    blocks, dtype, stored = origin.hf_blocks(hf), origin.hf_dtype(hf), origin.stored[hf]

    def read(window: Window) -> Tensor:
        return gather(blocks, window, lambda name, full: source.window(str(name), full), dtype)

    return Job(writer, stored, origin.folder.shape(stored), dtype, read)


def _check_same_model(source: WeightReader, origin: HfCheckpoint) -> None:
    if source.spec.family != origin.spec.family:
        raise WeightsError(
            f"{source.path} is a {source.spec.family} model, {origin.path} a {origin.spec.family} model"
        )
    for half in ("vision", "language"):
        ours, theirs = (dataclasses.asdict(getattr(spec, half)) for spec in (source.spec, origin.spec))
        for name, value in ours.items():
            if value != theirs[name]:
                raise WeightsError(
                    f"{half} {name} is {value} in {source.path} and {theirs[name]} in {origin.path}: not the"
                    " same model"
                )


def _check_padding(source: WeightReader, origin: HfCheckpoint, workers: int) -> None:
    """Padding that is not zero would be lost in silence, and the exported model would compute something
    else."""

    def check(rule: Rule) -> None:
        for window in rule.padding:
            if source.window(rule.name, window).count_nonzero():
                raise WeightsError(
                    f"{source.path}: the padding of tensor {rule.name!r} holds values other than zero; they"
                    " cannot be exported"
                )

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(check, (rule for rule in origin.rules.values() if rule.padding)))
