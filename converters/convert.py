"""Converts, splits, merges and exports weights: from any source to any layout or a Hugging Face folder."""

import itertools
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_vl.spec.families import read_spec
from megatron_vl.spec.families.hf_folder import (
    CHAT_TEMPLATE_FILE,
    text_digests,
    write_chat_template,
    write_rope_fields,
)
from megatron_vl.spec.families.rope import serving_config
from megatron_vl.spec.layout import Layout, make_layout
from megatron_vl.spec.lora import trained_table
from megatron_vl.spec.tensors import UNSHARDED, Sharding, TensorInfo
from megatron_vl.system.json_files import manifest_digest, write_json
from megatron_vl.system.processes import available_cores
from megatron_vl.weights.canonical_weights import CanonicalWeights
from megatron_vl.weights.manifest import file_entry, rank_file_name, write_manifest
from megatron_vl.weights.matrix_blocks import blocks_of_shard
from megatron_vl.weights.model_digest import model_digest
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from megatron_vl.weights.tensor_files import (
    WeightsError,
    dtype_name,
    make_safetensors_header,
    read_safetensors_header,
)
from megatron_vl.weights.trained_media import (
    ARGUMENTS_KEY,
    ROPE_KEY,
    TEMPLATE_KEY,
    TEXT_FIELDS,
    exported_facts,
    trained_facts,
)
from megatron_vl.weights.weight_reader import WeightReader

from .fp8 import FP8, Fp8Folder
from .hf_checkpoint import HfCheckpoint
from .hf_output import describe_form, gather_from, headers_of, output_tensors
from .lora import MergedWeights, PeftAdapters, open_lora, peft_config, peft_tensors
from .output_folder import ConversionOutput, OutputTensor, open_output, write_tensors
from .peft_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from .rules import ConversionRule

MAX_FILE_BYTES = 5_000_000_000
"""Largest size of a file of unsplit weights, unless a single tensor is larger."""
_PlannedFile = tuple[dict[str, int], dict[str, tuple[torch.dtype, tuple[int, ...]]]]
"""A file to write: its ranks (``tp`` and ``pp``, or ``ep``, ``etp`` and ``pp``), and each tensor's type and
shape in it. They are known in advance, so that threads fill the file in any order."""


@dataclass
class WeightsReport:
    """The result of a conversion."""

    out: Path
    tensors: int
    files: int
    bytes: int
    seconds: float
    layout: Layout | None = None
    cast: dict[tuple[str, str], int] = field(default_factory=dict)
    """Number of tensors whose type was changed, by (from, to)."""
    skipped: list[str] = field(default_factory=list)
    """Files with weights in other formats, which were not copied from the original folder."""
    carried: int = 0
    """Number of tensors that are not part of the model. An export copies them from the original folder; a
    conversion leaves them out."""
    notes: list[str] = field(default_factory=list)


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
    origin = {"hf": Path(hf).resolve().name, **exported_facts(Path(hf))}
    report = _write_weights(source, [Path(hf)], out, layout, "convert", workers, force, origin)
    report.carried = len(source.carried_names)
    report.notes += source.rounding_notes()
    return report


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
    source = WeightReader(checkpoint, takes_lora=True)
    command = "split" if layout else "merge"
    # A run's facts are not stored in its weights but in the step folder.
    origin = {**(source.manifest.get("origin") or {}), **trained_facts(source.path, source.manifest)}
    return _write_weights(source, [source.path], out, layout, command, workers, force, origin)


def _write_weights(
    source: CanonicalWeights,
    input_dirs: list[Path],
    output_dir: str | Path,
    layout_arguments: dict | None,
    command_name: str,
    worker_count: int,
    force_overwrite: bool,
    weights_origin: dict | None,
) -> WeightsReport:
    """Writes Megatron weights of a layout: their files first, then the manifest."""
    output_dir = Path(output_dir)
    layout = make_layout(source.spec, **layout_arguments) if layout_arguments else None
    planned_files = _plan_files(source, layout)
    headers = {
        file: make_safetensors_header(tensors, {"format": "pt"})
        for file, (_, tensors) in planned_files.items()
    }
    worker_count = worker_count or available_cores()

    with open_output(output_dir, input_dirs, headers, force_overwrite=force_overwrite) as output:
        outputs = [*_shard_outputs(source, planned_files, layout.sharding if layout else UNSHARDED)]
        write_seconds = write_tensors(command_name, source, outputs, output, worker_count)
        output.commit_files()
        assert output.digests is not None
        file_entries = [
            file_entry(file, {n: (*types, output.digests[file, n]) for n, types in tensors.items()}, ranks)
            for file, (ranks, tensors) in planned_files.items()
        ]
        write_manifest(output.path, source.spec, layout, file_entries, weights_origin, source.lora)

    return _make_report(output_dir, output, write_seconds, layout)


def _make_report(
    output_dir: Path, conversion_output: ConversionOutput, seconds: float, layout: Layout | None = None
) -> WeightsReport:
    writers = conversion_output.writer_by_file.values()
    # A tensor may be in several files, as shards or replicated.
    tensor_names = {name for writer in writers for name in writer.tensor_names()}
    total_bytes = sum(writer.file_size_bytes for writer in writers)
    return WeightsReport(output_dir, len(tensor_names), len(writers), total_bytes, seconds, layout)


def _shard_outputs(
    source: CanonicalWeights, planned_files: dict[str, _PlannedFile], sharding: Sharding
) -> Iterator[OutputTensor]:
    """The shards of all tensors, file by file."""
    tensor_infos = trained_table(source.spec, source.lora)
    for file, (file_ranks, tensors) in planned_files.items():
        # The pipeline rank selects tensors; the other ranks select the shard of a tensor.
        ranks = {f"{kind}_rank": rank for kind, rank in file_ranks.items() if kind != "pp"}
        for name, (dtype, shape) in tensors.items():
            info = tensor_infos[name]
            blocks = blocks_of_shard(info, sharding.shard_index(info, **ranks), sharding)
            yield OutputTensor(file, name, shape, dtype, name, gather_from(source, blocks, dtype))


def _plan_files(source: CanonicalWeights, layout: Layout | None) -> dict[str, _PlannedFile]:
    """One file for each rank of ``layout``, or files of at most ``MAX_FILE_BYTES`` in model order."""
    tensor_infos = trained_table(source.spec, source.lora)
    if layout is None:
        return _plan_unsplit_files(source, tensor_infos)

    planned_files: dict[str, _PlannedFile] = {}
    for pp in range(layout.pp):
        dense: dict[str, Any] = {}
        experts: dict[str, Any] = {}
        for name, info in tensor_infos.items():
            if layout.owning_pipeline_rank(info) == pp:
                stored_type = (source.dtype(name), info.shard_shape(layout.sharding))
                (experts if info.num_experts else dense)[name] = stored_type
        for tp in range(layout.tp):
            planned_files[rank_file_name(tp=tp, pp=pp)] = ({"tp": tp, "pp": pp}, dense)
        # A rank without experts has no file for them.
        for ep, etp in itertools.product(range(layout.ep if experts else 0), range(layout.etp)):
            ranks = {"ep": ep, "etp": etp, "pp": pp}
            planned_files[rank_file_name(**ranks)] = (ranks, experts)
    return planned_files


def _plan_unsplit_files(
    source: CanonicalWeights, tensor_infos: dict[str, TensorInfo]
) -> dict[str, _PlannedFile]:
    groups: list[dict[str, Any]] = [{}]
    group_bytes = 0
    for name, info in tensor_infos.items():
        tensor_bytes = math.prod(info.shape) * source.dtype(name).itemsize
        group_bytes += tensor_bytes
        if groups[-1] and group_bytes > MAX_FILE_BYTES:
            groups.append({})
            group_bytes = tensor_bytes
        groups[-1][name] = (source.dtype(name), info.shape)
    return {
        f"weights-{i:05d}-of-{len(groups):05d}.safetensors": ({"tp": 0, "pp": 0}, tensors)
        for i, tensors in enumerate(groups, 1)
    }


# --- To Hugging Face ----------------------------------------------------------------------------------------


def export_weights(
    checkpoint: str | Path,
    hf: str | Path,
    output_dir: str | Path,
    *,
    merges_adapter: bool = False,
    as_fp8: bool = False,
    workers: int = 0,
    force: bool = False,
    export_facts: Mapping[str, Any] | None = None,
) -> WeightsReport:
    """Exports Megatron weights to a folder like the original Hugging Face folder.

    Files, names, order and types of tensors are those of the original, so the export of untrained weights
    equals the original byte for byte. Tensors that are not part of the model (``mtp.*`` of Qwen3.5) are
    copied from the original. Values of another type, such as the weights of a float32 run, are rounded to the
    original's type and counted in the report. All other files are copied unchanged, apart from the chat
    template of a run with ``data.chat_template``, which takes the place of the original's.

    ``megatron_vl.json`` next to the weights names the limits of pixels and frames under which they were
    trained, if they are known: those of the weights, otherwise those of ``hf``.

    Args:
        checkpoint: weights of any layout, or a run, whose latest checkpoint is exported.
        hf: the original Hugging Face folder.
        merges_adapter: ``checkpoint`` holds adapters, or is a PEFT folder. They are added to the weights of
            ``hf`` in float32, and the sums are rounded once. Matrices without an adapter stay as they are.
        as_fp8: whether the decoder's matrices are written in FP8 (:mod:`.fp8`). Otherwise, they are not, even
            if ``hf`` has FP8 weights.
        workers, force: as in :func:`convert_weights`.
        export_facts: further entries of ``megatron_vl.json``.

    Raises:
        WeightsError: the checkpoint belongs to another model than ``hf``, or its padding holds values that
            HF cannot store.
        FileExistsError: ``output_dir`` holds something that is not to be replaced.
    """
    source: WeightReader | MergedWeights
    if merges_adapter:
        hf_checkpoint = HfCheckpoint(hf)
        lora = open_lora(checkpoint, hf_checkpoint.spec)
        _check_same_model(lora, hf_checkpoint)
        _check_base(lora, hf_checkpoint)
        if lora.spec.language.has_mtp:
            hf_checkpoint = HfCheckpoint(hf, has_mtp=True)
        source = MergedWeights(hf_checkpoint, lora)
    else:
        source = WeightReader(checkpoint)
        hf_checkpoint = HfCheckpoint(hf, has_mtp=source.spec.language.has_mtp)
        _check_same_model(source, hf_checkpoint)
    workers = workers or available_cores()

    # Everything that can be refused is refused before the first byte is written.
    _check_padding(source, hf_checkpoint, workers)
    training_facts = {**(export_facts or {}), **_known_training_facts(source, hf_checkpoint)}
    outputs = output_tensors(source, hf_checkpoint, as_fp8=as_fp8)
    folder, headers = hf_checkpoint.tensor_folder, headers_of(outputs)
    if keeps_form := as_fp8 == isinstance(folder, Fp8Folder):
        # With the original headers, unchanged tensors give the original files byte for byte.
        headers = {file: read_safetensors_header(folder.path / file) for file in folder.reader_by_file}

    def describe(output_path: Path) -> None:
        if not keeps_form:
            describe_form(output_path, outputs, as_fp8=as_fp8)
        if (rope := training_facts.get(ROPE_KEY)) is not None:
            write_rope_fields(output_path, rope)

    arguments = (source, hf_checkpoint, outputs, headers, Path(output_dir), describe, training_facts)
    report = write_hf_folder("export", *arguments, workers, force=force)
    if isinstance(source, WeightReader):  # merging changes no type
        report.cast = Counter(
            (dtype_name(source.dtype(rule.name)), dtype_name(hf_checkpoint.hf_dtype(hf_name)))
            for rule in hf_checkpoint.rule_by_name.values()
            if source.dtype(rule.name) != hf_checkpoint.dtype(rule.name)
            for hf_name in rule.hf_shapes
        )
    report.carried = len(hf_checkpoint.carried_names)
    if fp8_count := sum(o.dtype == FP8 for o in outputs):
        report.notes.append(f"{fp8_count} matrices are in FP8 (E4M3), with a scale for each block")
    if merges_adapter and not lora.lora_base.digest:
        report.notes.append(
            f"{checkpoint} does not record which weights its adapters were trained on; the result is right"
            f" only if they are those in {hf}"
        )
    return report


def write_hf_folder(
    command_name: str,
    source: CanonicalWeights,
    original: HfCheckpoint,
    outputs: Sequence[OutputTensor],
    header_by_file: dict[str, bytes],
    output_dir: Path,
    describe: Callable[[Path], None],
    training_facts: dict[str, Any],
    workers: int = 0,
    *,
    force: bool,
) -> WeightsReport:
    """Writes a Hugging Face folder: its weights, and copies of the other files of ``original``.

    Args:
        describe: called at the end with the folder, to complete the copies.
        training_facts: the entries of ``megatron_vl.json``.
    """
    companion_files, skipped_files = original.tensor_folder.companion_files()
    with open_output(
        output_dir, [source.path, original.path], header_by_file, force_overwrite=force, is_hf_export=True
    ) as output:
        write_seconds = write_tensors(command_name, source, outputs, output, workers or available_cores())
        output.commit_files()
        for relative_path in companion_files:
            copied_path = output.path / relative_path
            copied_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(original.path / relative_path, copied_path)
        describe(output.path)
        _write_training_facts(output.path, training_facts)

    report = _make_report(output_dir, output, write_seconds)
    report.skipped = list(map(str, skipped_files))
    return report


def _known_training_facts(source: CanonicalWeights, hf_checkpoint: HfCheckpoint) -> dict[str, Any]:
    """Limits of media, given chat template and rotary positions: those of the weights, else the folder's."""
    trained_source = source.source if isinstance(source, MergedWeights) else source
    facts: dict[str, Any] = {}
    if isinstance(trained_source, WeightReader):
        facts = trained_facts(trained_source.path, trained_source.manifest)
        _check_same_text(trained_source.path, facts, hf_checkpoint.path)
        facts = {key: value for key, value in facts.items() if key not in TEXT_FIELDS}
        if facts or trained_source.spec.language.yarn:
            facts = {ROPE_KEY: trained_source.spec.language.rope_fields} | facts
    elif isinstance(trained_source, PeftAdapters):
        facts = exported_facts(trained_source.path)
    return exported_facts(hf_checkpoint.path) | facts


def _check_same_text(weights_dir: Path, facts: Mapping[str, Any], hf_path: Path) -> None:
    """Raises :class:`WeightsError` if a run had another tokenizer or chat template than ``hf_path`` has."""
    recorded = {name: facts[name] for name in TEXT_FIELDS if name in facts}
    if TEMPLATE_KEY in facts:  # it replaces that of the folder
        recorded.pop("chat template", None)
    for name, digest in text_digests(hf_path).items() if recorded else ():
        if recorded.get(name, digest) != digest:
            raise WeightsError(
                f"{weights_dir} was trained with another {name} than that in {hf_path}, although the shapes"
                " are the same; give the folder that the run had as model.hf"
            )


def _write_training_facts(output_dir: Path, training_facts: dict[str, Any]) -> None:
    """Writes ``megatron_vl.json``, and a given chat template into the file that its entry names."""
    if chat_template := training_facts.get(TEMPLATE_KEY):
        write_chat_template(output_dir, chat_template)
        training_facts = training_facts | {TEMPLATE_KEY: CHAT_TEMPLATE_FILE}
    if not training_facts.get(ARGUMENTS_KEY):
        training_facts = {key: value for key, value in training_facts.items() if key != ARGUMENTS_KEY}
    if training_facts:
        facts = training_facts | {"digest": manifest_digest(training_facts)}
        write_json(output_dir / EXPORT_FACTS_FILE, facts)


def _check_same_model(source: CanonicalWeights, hf_checkpoint: HfCheckpoint) -> None:
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


def _check_padding(
    source: WeightReader | MergedWeights, hf_checkpoint: HfCheckpoint, worker_count: int
) -> None:
    """Raises WeightsError if padding is not zero: it would be lost, and the export be another model."""

    def check(rule: ConversionRule) -> None:
        for padding_region in rule.padding:
            if source.read_region(rule.name, padding_region).count_nonzero():
                raise WeightsError(
                    f"{source.path}: the padding of tensor {rule.name!r} holds values other than zero; "
                    "they cannot be exported"
                )

    with ThreadPoolExecutor(worker_count) as pool:
        list(pool.map(check, (rule for rule in hf_checkpoint.rule_by_name.values() if rule.padding)))


# --- LoRA ---------------------------------------------------------------------------------------------------


def _check_base(lora: WeightReader | PeftAdapters, base: HfCheckpoint) -> None:
    """Raises :class:`WeightsError` if LoRA's weights record that they were trained on others than ``base``.

    PEFT folders from elsewhere, and weights saved before this was recorded, are accepted.
    """
    recorded = lora.lora_base
    if recorded.digest and (difference := recorded.difference_text(model_digest(base), base.path)):
        raise WeightsError(f"the adapters in {lora.path} {difference}")


def export_adapter(
    checkpoint: str | Path,
    hf: str | Path,
    output_dir: str | Path,
    *,
    force: bool = False,
    may_have_other_base: bool = False,
    export_facts: Mapping[str, Any] | None = None,
) -> WeightsReport:
    """Exports the LoRA weights of a run to an adapter that PEFT loads.

    Args:
        checkpoint: a run with LoRA, one of its steps, or LoRA weights in any layout.
        hf: the Hugging Face folder of the model.
        force: whether to replace an adapter that is already in ``output_dir``.
        may_have_other_base: whether they may have been trained on other weights than those in ``hf``. PEFT's
            files then name the folder of these weights as the base, not ``hf``.
        export_facts: as in :func:`export_weights`.

    Raises:
        WeightsError: they belong to another model than ``hf``.
        FileExistsError: ``output_dir`` holds something that is not to be replaced.
    """
    hf_checkpoint = HfCheckpoint(hf)
    source = open_lora(checkpoint, hf_checkpoint.spec)
    _check_same_model(source, hf_checkpoint)
    base_name = str(hf)
    if not may_have_other_base:
        _check_base(source, hf_checkpoint)
    elif source.lora_base.digest and source.lora_base.differs_from(model_digest(hf_checkpoint)):
        base_name = source.lora_base.path
    output_dir = Path(output_dir)
    stored_tensors = peft_tensors(source)
    tensor_types = {key: (tensor.dtype, tensor.shape) for key, tensor in stored_tensors.items()}
    header = make_safetensors_header(tensor_types, {"format": "pt"})
    training_facts = {
        **(export_facts or {}),
        **_known_training_facts(source, hf_checkpoint),
        **source.lora_base.entry(),
    }
    start_time = time.monotonic()
    input_dirs, headers = [source.path, hf_checkpoint.path], {ADAPTER_FILE: header}
    with open_output(output_dir, input_dirs, headers, force_overwrite=force, is_hf_export=True) as output:
        for key, tensor in stored_tensors.items():
            output.writer_by_file[ADAPTER_FILE].write_tensor(key, [tensor])
        output.commit_files()
        write_json(output.path / ADAPTER_CONFIG_FILE, peft_config(source, base_name))
        _write_training_facts(output.path, training_facts)

    report = _make_report(output_dir, output, time.monotonic() - start_time)
    rope, config = training_facts.get(ROPE_KEY), hf_checkpoint.spec.hf_config
    if rope is not None and serving_config(config, rope) != config:
        report.notes.append(
            f"the adapters were trained with other rotary positions than those in {hf}; write them into the"
            f" config.json that is served: {json.dumps(rope)}"
        )
    if source.spec.language.has_mtp:
        report.notes.append(
            "PEFT has no place for the multi-token prediction (mtp.*) that was trained beside the adapters;"
            " an export with --merge writes it"
        )
    return report


def convert_adapter(
    adapter: str | Path, hf: str | Path, out: str | Path, layout: dict | None = None
) -> WeightsReport:
    """Converts a PEFT folder to Megatron weights that hold LoRA's factors only.

    Args:
        adapter: the PEFT folder.
        hf: the Hugging Face folder of the model that it belongs to, or its config.json.
        layout: as in :func:`convert_weights`.

    Raises:
        The errors of :class:`PeftAdapters` and :func:`convert_weights`.
    """
    source = PeftAdapters(adapter, read_spec(hf))
    facts = exported_facts(Path(hf)) | exported_facts(source.path)
    origin = {"hf": Path(hf).resolve().name, **facts, **source.lora_base.entry()}
    return _write_weights(source, [Path(adapter), Path(hf)], out, layout, "convert", 0, False, origin)
