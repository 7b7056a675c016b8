"""Carries out ``megatron-vl parity``: prepares pictures, weights and the reference, and runs the layouts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from converters.convert import convert_adapter, convert_weights, export_adapter
from data_tools.formats import read_conversation
from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.errors import UserError
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import make_layout
from megatron_vl.spec.tensors import LayoutError, tensor_table
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.hf_loading import check_hf_folder
from toolkit.launch import last_output_lines, run_group
from toolkit.layouts import LayoutSpec
from toolkit.sample_encoder import SampleEncoder, write_samples
from toolkit.tiny_checkpoint import TINY_FAMILIES, write_tiny_checkpoint

from .case import ParityCase, write_cases
from .locations import tensor_location
from .options import ParityOptions
from .peft_reference import are_equal_adapters, merge_error
from .reference_job import ReferenceJob
from .tolerances import BF16_GRADIENT_RATIO, GRADIENT_TOLERANCE, MERGE_TOLERANCE

DEMO_CONVERSATIONS = ("astronaut", "two_images", "image_between_texts", "text_only")
"""The demo conversations that are compared if no pictures are given."""
PICTURE_QUESTION = "<image>\nWhat is in this picture?"
PICTURE_ANSWER = "This is what one can see in the picture."


def run_parity(options: ParityOptions, print_line: Callable[[str], None]) -> dict[str, Any]:
    """Compares every layout with ``transformers``.

    Args:
        options: with the platform that ``auto`` stands for here.
        print_line: receives a line of text before each long phase.

    Returns:
        {"ok", "hf", "dtype", "tokens", "inputs", "layouts": {layout: result of the case}}.

    Raises:
        UserError: a process of the comparison failed, or the request is impossible.
        FileNotFoundError: a folder or a picture does not exist.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-vl-parity-") as temporary_dir:
        work_dir = Path(temporary_dir)
        hf_dir = options.hf or write_tiny_checkpoint(
            work_dir / "hf", _known_family(options.family), dtype=torch.float32
        )
        # Everything that can be refused is refused before the models run, which takes minutes.
        check_hf_folder(hf_dir)
        spec = read_spec(hf_dir)
        for layout in options.layout_specs:
            _check_layout(spec, layout)

        weights_dir = _megatron_weights(options, hf_dir, spec, work_dir, print_line)
        samples = prepare_samples(options.image, hf_dir, work_dir, _rows_per_step(options.layout_specs))
        print_line(
            f"transformers on {len(samples)} conversations of {sum(map(len, samples))} tokens, "
            f"{options.dtype}"
        )
        # In a process of its own, so that its memory is free when the layouts run.
        reference_facts = _run_reference(options, hf_dir, work_dir)

        adapter_facts = _prepare_adapter(hf_dir, work_dir) if options.lora else {}
        results_by_layout = run_layouts(options, hf_dir, weights_dir, samples, work_dir, print_line)
        if options.checkpoint:
            for layout_result in results_by_layout.values():
                layout_result["tensors"] = differing_tensors(options, hf_dir, layout_result, work_dir)

    # If the processors disagree, equal losses say nothing about a user's data.
    input_facts = reference_facts["inputs"]
    all_agree = (
        not input_facts["tokens_differ"]
        and input_facts["pixel_error"] <= 1e-5
        and all(case_result["ok"] for case_result in results_by_layout.values())
        and adapter_facts.get("same_file", True)
        and adapter_facts.get("merge_error", 0.0) <= MERGE_TOLERANCE
    )
    return {
        "ok": all_agree,
        "hf": str(options.hf) if options.hf else options.family,
        "dtype": options.dtype,
        "tokens": reference_facts["tokens"],
        "inputs": input_facts,
        "adapter": adapter_facts,
        "layouts": results_by_layout,
    }


def _run_reference(options: ParityOptions, hf_dir: Path, work_dir: Path) -> dict[str, Any]:
    """Runs ``transformers`` in a separate process. Returns the contents of its ``reference.json``."""
    reference_job = ReferenceJob(
        hf=str(hf_dir),
        samples=str(work_dir / "samples.safetensors"),
        conversations=str(work_dir / "conversations.json"),
        out=str(work_dir),
        dtype=options.dtype,
        device=options.reference_device or ("cuda" if options.platform == "cuda" else "cpu"),
        lora_rank=options.lora,
        steps=options.steps,
    )

    (work_dir / "job.json").write_text(json.dumps(dataclasses.asdict(reference_job)))
    completed_process = run_group("toolkit.parity.reference_job", [work_dir / "job.json"], 1)
    if completed_process.returncode:
        raise UserError(f"transformers failed on {hf_dir}:\n{last_output_lines(completed_process)}")
    return json.loads((work_dir / "reference.json").read_text())


def _prepare_adapter(hf_dir: Path, work_dir: Path) -> dict[str, Any]:
    """Converts the reference's adapter to the Megatron weights ``adapter_weights``.

    Returns:
        {"same_file": whether the export of these weights has the adapter's bits, "merge_error": largest error
        of the merged weights, relative to the largest weight of each matrix}.
    """
    adapter_dir = work_dir / "adapter"
    convert_adapter(adapter_dir, hf_dir, work_dir / "adapter_weights")
    export_adapter(work_dir / "adapter_weights", hf_dir, work_dir / "exported_adapter")
    return {
        "same_file": are_equal_adapters(adapter_dir, work_dir / "exported_adapter"),
        "merge_error": merge_error(hf_dir, adapter_dir),
    }


def _check_layout(spec: ModelSpec, layout_spec: LayoutSpec) -> None:
    """Raises UserError, in terms of the command line, if the layout is impossible for this model."""
    if spec.language.moe and layout_spec.tp > 1 and not layout_spec.sequence_parallel:
        sizes, colon, layers = layout_spec.layout_text.partition(":")
        raise UserError(
            f"--layouts {layout_spec.layout_text}: with experts, tensor parallelism needs sequence "
            f"parallelism (each rank routes its own tokens); write {sizes}sp{colon}{layers}"
        )
    try:
        make_layout(spec, **layout_spec.layout_arguments)
    except LayoutError as error:
        raise UserError(f"--layouts {layout_spec.layout_text}: {error}") from error


def _known_family(family_name: str) -> str:
    if family_name not in TINY_FAMILIES:
        raise UserError(f"--family {family_name!r} is unknown; valid: {', '.join(TINY_FAMILIES)}")
    return family_name


def _megatron_weights(
    options: ParityOptions, hf_dir: Path, spec: ModelSpec, work_dir: Path, print_line: Callable[[str], None]
) -> Path:
    """Returns the Megatron weights to compare, converting them if needed."""
    if options.checkpoint is None:
        print_line(f"converting {hf_dir}")
        convert_weights(hf_dir, work_dir / "weights")
        return work_dir / "weights"
    weight_reader = WeightReader(options.checkpoint)
    if weight_reader.spec.different_fields(spec):
        raise UserError(
            f"--checkpoint {options.checkpoint} holds a "
            f"{weight_reader.spec.family} model of other sizes than --hf {hf_dir}"
        )
    return options.checkpoint


def _rows_per_step(layout_specs: list[LayoutSpec]) -> int:
    """Returns the number of rows in a step: one for all layouts, so that one reference serves them."""
    row_multiple = math.lcm(*(layout.row_multiple for layout in layout_specs))
    return row_multiple * -(-2 // row_multiple)


def prepare_samples(
    image_paths: list[Path], hf_dir: Path, work_dir: Path, least_samples: int
) -> list[TokenizedSample]:
    """Makes at least ``least_samples`` samples of the pictures or the demo's photographs.

    Writes ``samples.safetensors`` and ``conversations.json`` of a :class:`ReferenceJob` to ``work_dir``.

    Raises:
        RecordError, FileNotFoundError: a picture is unusable or missing.
    """
    if image_paths:
        conversation_records, media_root = _picture_records(image_paths), Path("/")
    else:
        conversation_records, media_root = _demo_records(work_dir)

    # Every row of the step needs a sample, so they are repeated if there are fewer.
    sample_count = max(len(conversation_records), least_samples)
    conversation_records = list(itertools.islice(itertools.cycle(conversation_records), sample_count))

    sample_encoder = SampleEncoder(hf_dir)
    samples = []
    sample_descriptions = []
    for conversation_record in conversation_records:
        conversation = read_conversation(conversation_record)
        picture_paths = [media_root / reference for _, reference in conversation.media_references]
        media_contents = []
        for (kind, _), path in zip(conversation.media_references, picture_paths, strict=True):
            media_contents.append((kind, path.name, path.read_bytes()))
        samples.append(sample_encoder.encode_sample(conversation.messages, media_contents))
        sample_descriptions.append(
            {"messages": conversation.messages, "images": [str(path) for path in picture_paths]}
        )

    write_samples(samples, work_dir / "samples.safetensors")
    (work_dir / "conversations.json").write_text(json.dumps(sample_descriptions))
    return samples


def _picture_records(image_paths: list[Path]) -> list[dict[str, Any]]:
    """A conversation about each picture, and one without a picture."""
    picture_turns = [{"from": "human", "value": PICTURE_QUESTION}, {"from": "gpt", "value": PICTURE_ANSWER}]
    text_turns = [
        {"from": "human", "value": "Which day is it?"},
        {"from": "gpt", "value": "It is Friday."},
    ]
    conversation_records: list[dict[str, Any]] = []
    for path in image_paths:
        conversation_records.append({"image": str(path.resolve()), "conversations": picture_turns})
    return [*conversation_records, {"conversations": text_turns}]


def _demo_records(work_dir: Path) -> tuple[list[dict[str, Any]], Path]:
    """Conversations of the demo, and the folder of their media."""
    from toolkit.demo.demo_data import write_raw_data

    conversations = json.loads(write_raw_data(work_dir / "raw").read_text())
    demo_records = [record for record in conversations if record["id"] in DEMO_CONVERSATIONS]
    return demo_records, work_dir / "raw" / "media"


def run_layouts(
    options: ParityOptions,
    hf_dir: Path,
    weights_dir: Path,
    samples: list[TokenizedSample],
    work_dir: Path,
    print_line: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Runs the layouts and maps each to its result; one group of processes serves each number of ranks."""
    step_rows, seq_len = _spread_rows(options, samples)
    layouts_by_size: dict[int, list[LayoutSpec]] = {}
    for layout_spec in options.layout_specs:
        layouts_by_size.setdefault(layout_spec.world_size, []).append(layout_spec)

    make_case = partial(
        ParityCase,
        hf=str(hf_dir),
        weights=str(weights_dir),
        steps=[step_rows] * max(options.steps, 1),
        seq_len=seq_len,
        **_case_fields(options, work_dir),
    )
    results_by_layout: dict[str, dict[str, Any]] = {}
    for world_size, same_size_layouts in sorted(layouts_by_size.items()):
        layout_names = ", ".join(layout_spec.layout_text for layout_spec in same_size_layouts)
        print_line(f"{layout_names} in {world_size} process{'es' if world_size > 1 else ''}")
        parity_cases = []
        for layout_spec in same_size_layouts:
            parity_cases.append(
                make_case(
                    name=layout_spec.layout_text,
                    sequence_parallel=layout_spec.sequence_parallel,
                    **layout_spec.layout_arguments,
                )
            )
        results_by_layout |= _run_cases(parity_cases, options.platform, world_size, work_dir)
    layout_names_in_order = [layout_spec.layout_text for layout_spec in options.layout_specs]
    return {layout_name: results_by_layout[layout_name] for layout_name in layout_names_in_order}


def _spread_rows(options: ParityOptions, samples: list[TokenizedSample]) -> tuple[list[list[str]], int]:
    """The samples of each row of a step, and the length of the rows in tokens."""
    sample_rows = spread_samples(len(samples), _rows_per_step(options.layout_specs))
    longest_row = max(sum(len(samples[i]) for i in row) for row in sample_rows)
    # All layouts get rows of one length, which each of them must be able to split.
    length_multiple = math.lcm(64, *(layout_spec.tp * layout_spec.cp for layout_spec in options.layout_specs))
    step_rows = [[f"sample:{i}" for i in row] for row in sample_rows]
    return step_rows, -(-longest_row // length_multiple) * length_multiple


def _case_fields(options: ParityOptions, work_dir: Path) -> dict[str, Any]:
    """The fields that the cases of all layouts share, apart from weights and rows."""
    adapter_fields: dict[str, Any] = {}
    if options.lora:
        adapter_dir = work_dir / "adapter_weights"
        lora_config = WeightReader(adapter_dir, takes_adapters=True).lora
        adapter_fields = {"adapter": str(adapter_dir), "lora": dataclasses.asdict(lora_config)}

    trains = options.steps > 0
    return adapter_fields | {
        "dtype": options.dtype,
        "train": trains,
        "samples": str(work_dir / "samples.safetensors"),
        "reference": str(work_dir),
        "activations": not trains,
        "optimizer": trains,
        # The fused kernels do not support float32.
        "attention": "reference" if options.dtype == "float32" else "auto",
    }


def _run_cases(
    parity_cases: list[ParityCase], platform: str, world_size: int, work_dir: Path
) -> dict[str, dict[str, Any]]:
    """Runs the cases in one group of processes, and maps the name of each to its result."""
    cases_path = work_dir / f"cases_{world_size}.json"
    results_path = work_dir / f"results_{world_size}.json"
    write_cases(parity_cases, cases_path)
    completed_process = run_group(
        "toolkit.parity.worker",
        [cases_path, results_path, platform],
        world_size,
        on_cpu=platform == "cpu",
    )

    # The worker writes after each case, so a crash loses only the case in which it happened and later ones.
    written_results = json.loads(results_path.read_text()) if results_path.exists() else {}
    missing_result = {
        "ok": False,
        "error": f"the processes ended before this layout:\n{last_output_lines(completed_process)}",
    }
    return {case.name: written_results.get(case.name, missing_result) for case in parity_cases}


def spread_samples(sample_count: int, row_count: int) -> list[list[int]]:
    """Distributes sample numbers over rows, in order and as evenly as possible."""
    row_bounds = [sample_count * i // row_count for i in range(row_count + 1)]

    samples_by_row: list[list[int]] = []
    for row_start, row_end in zip(row_bounds, row_bounds[1:], strict=False):
        samples_by_row.append(list(range(row_start, row_end)))
    return samples_by_row


def first_departure(layout_result: dict[str, Any]) -> str:
    """Names the first location that departs, or "" if every location agrees.

    Outputs are examined first, in the order of the forward pass; then gradients, in backward order.
    """
    for step_result in layout_result.get("steps", []):
        if step_result.get("departs"):
            return step_result["departs"]
        if step_result.get("unexpected"):
            return f"gradient of {step_result['unexpected'][0]}"
        bf16_noise = step_result.get("transformers_bf16_gradient_error")
        error_limit = GRADIENT_TOLERANCE if bf16_noise is None else bf16_noise * BF16_GRADIENT_RATIO

        # The gradient of the last layer is computed first, so the last wrong location departs first.
        location_order = list(step_result.get("activations", {}))
        last_location, last_position = "", -2
        for location, error in step_result.get("gradients", {}).items():
            position = location_order.index(location) if location in location_order else -1
            if not error <= error_limit and position > last_position:
                last_location, last_position = location, position
        if last_location:
            return f"gradient of {last_location}"
    return ""


def differing_tensors(
    options: ParityOptions, hf_dir: Path, layout_result: dict[str, Any], work_dir: Path
) -> list[str]:
    """Names the tensors of the first departing location that differ from a conversion of ``hf_dir``."""
    location = first_departure(layout_result).removeprefix("gradient of ")
    if not location or options.checkpoint is None:
        return []

    converted_dir = work_dir / "converted"
    if not converted_dir.exists():
        convert_weights(hf_dir, converted_dir)
    checkpoint_reader = WeightReader(options.checkpoint)
    converted_reader = WeightReader(converted_dir)

    differing_names: list[str] = []
    for name in tensor_table(checkpoint_reader.spec):
        if tensor_location(name) != location:
            continue
        if not torch.equal(checkpoint_reader.read_shard(name), converted_reader.read_shard(name)):
            differing_names.append(name)
    return differing_names
