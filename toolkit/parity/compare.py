"""Carries out ``megatron-vl parity``: prepares images, weights and the reference, and runs the layouts.

``reference_job`` writes what ``reference`` computes; ``case`` has the trainer build a layout that ``worker``
compares.
"""

import dataclasses
import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from converters.convert import convert_adapter, convert_weights
from data_tools.formats import read_conversation
from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.families.hf_folder import write_rope_fields
from megatron_vl.spec.layout import make_layout
from megatron_vl.spec.tensors import LayoutError
from megatron_vl.system.errors import UserError
from megatron_vl.system.plurals import pluralize
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.common.hf_loading import check_hf_folder
from toolkit.common.launch import last_output_lines, run_group
from toolkit.common.layouts import LayoutSpec
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint
from toolkit.demo.demo_data import write_raw_data

from .case import ParityCase, encode_conversations, write_cases
from .options import ParityOptions
from .reference_job import ReferenceJob

DEMO_CONVERSATIONS = ("astronaut", "two_images", "image_between_texts", "text_only")


def run_parity(options: ParityOptions, print_line: Callable[[str], None]) -> dict[str, Any]:
    """Compares every layout with ``transformers``.

    Args:
        print_line: receives a line of text before each long phase.

    Returns:
        {"ok", "hf", "dtype", "layouts": {layout: result of the case}}.

    Raises:
        UserError: the reference failed, or the request is impossible.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-vl-parity-") as temporary_dir:
        work_dir = Path(temporary_dir)
        hf_dir = work_dir / "hf" if options.family else Path(options.hf)
        if options.family:
            write_tiny_checkpoint(hf_dir, options.family, dtype=torch.float32)
        # Everything that can be refused is refused before the models run, which takes minutes.
        check_hf_folder(hf_dir)
        spec = read_spec(hf_dir)
        for layout in options.layout_specs:
            _check_layout(spec, layout)

        weights_dir = options.checkpoint or work_dir / "weights"
        if options.checkpoint is None:
            print_line(f"converting {hf_dir}")
            convert_weights(hf_dir, weights_dir)
        else:
            weights_spec = WeightReader(weights_dir).spec
            if weights_spec.different_fields(spec):
                raise UserError(f"--checkpoint {weights_dir} holds another model than --hf {hf_dir}")
            hf_dir = _with_rope_fields(hf_dir, work_dir / "hf", weights_spec.language.rope_fields)

        # Every layout has this number of rows, at least two, so that one reference serves all of them.
        num_rows = math.lcm(*(layout.row_multiple for layout in options.layout_specs))
        num_rows *= 1 + (num_rows == 1)
        samples = prepare_samples(hf_dir, work_dir, num_rows)
        device = reference_device(hf_dir)
        print_line(
            f"transformers on {len(samples)} conversations of {sum(map(len, samples))} tokens,"
            f" {options.dtype}, {device}"
        )
        _run_reference(options, hf_dir, work_dir, device)
        case_fields = _case_fields(options, hf_dir, weights_dir, samples, num_rows, work_dir)
        results_by_layout = run_layouts(options, case_fields, print_line)

    return {
        "ok": all(result["ok"] for result in results_by_layout.values()),
        "hf": options.hf,
        "dtype": options.dtype,
        "layouts": results_by_layout,
    }


def _with_rope_fields(hf_dir: Path, linked_dir: Path, rope_fields: dict[str, Any]) -> Path:
    """A folder of links to a Hugging Face folder, whose config has the rotary positions (YaRN) of weights."""
    linked_dir.mkdir()
    for path in hf_dir.iterdir():
        (linked_dir / path.name).symlink_to(path.resolve())
    (linked_dir / "config.json").unlink()
    shutil.copy(hf_dir / "config.json", linked_dir)
    write_rope_fields(linked_dir, rope_fields)
    return linked_dir


def reference_device(hf_dir: Path) -> str:
    """``cuda`` if a GPU holds ``transformers`` with float32 weights and gradients, else ``cpu``."""
    if not torch.cuda.is_available():
        return "cpu"
    parameters = sum(file.stat().st_size for file in hf_dir.glob("*.safetensors")) / 2
    # What it needs for a parameter of a released size: 66 GiB for Qwen2.5-VL-7B.
    return "cuda" if 9.5 * parameters <= torch.cuda.get_device_properties(0).total_memory else "cpu"


def _run_reference(options: ParityOptions, hf_dir: Path, work_dir: Path, device: str) -> None:
    """Runs ``transformers`` in a process of its own, so that its memory is free when the layouts run."""
    (work_dir / "reference").mkdir(exist_ok=True)
    job = ReferenceJob(
        hf=str(hf_dir),
        out=str(work_dir / "reference"),
        dtype=options.dtype,
        device=device,
        lora_rank=options.lora,
        conversations=str(work_dir / "conversations.json"),
    )
    (work_dir / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
    completed_process = run_group("toolkit.parity.reference_job", [work_dir / "job.json"], 1)
    if completed_process.returncode:
        raise UserError(f"transformers failed on {hf_dir}:\n{last_output_lines(completed_process)}")


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


def prepare_samples(hf_dir: Path, work_dir: Path, least_samples: int) -> list[TokenizedSample]:
    """Makes at least ``least_samples`` samples of the demo's photographs.

    Writes their ``conversations.json`` to ``work_dir``.
    """
    records = json.loads(write_raw_data(work_dir / "raw").read_text())
    records = [record for record in records if record["id"] in DEMO_CONVERSATIONS]
    conversations = []
    # Every row of the step needs a sample, so they are repeated if there are fewer.
    repeated = itertools.islice(itertools.cycle(records), max(len(records), least_samples))
    for conversation in map(read_conversation, repeated):
        images = [str(work_dir / "raw" / "media" / name) for _, name in conversation.media_references]
        conversations.append({"messages": conversation.messages, "images": images})
    (conversations_path := work_dir / "conversations.json").write_text(json.dumps(conversations))
    return encode_conversations(conversations_path, hf_dir)


def _case_fields(
    options: ParityOptions,
    hf_dir: Path,
    weights_dir: Path,
    samples: list[TokenizedSample],
    num_rows: int,
    work_dir: Path,
) -> dict[str, Any]:
    rows = list(itertools.pairwise(len(samples) * i // num_rows for i in range(num_rows + 1)))
    longest_row = max(sum(map(len, samples[start:end])) for start, end in rows)
    # All layouts get rows of one length, which each of them must be able to split.
    length_multiple = math.lcm(64, *(layout.tp * layout.cp for layout in options.layout_specs))
    case_fields: dict[str, Any] = {
        "hf": str(hf_dir),
        "weights": str(weights_dir),
        "steps": [[[f"sample:{i}" for i in range(*row)] for row in rows]],
        "seq_len": -(-longest_row // length_multiple) * length_multiple,
        "dtype": options.dtype,
        "samples": str(work_dir / "conversations.json"),
        "reference": str(work_dir / "reference"),
        "activations": True,
        "optimizer": False,
        # The fused kernels do not support float32.
        "attention": "reference" if options.dtype == "float32" else "auto",
    }
    if options.lora:
        adapter_dir = work_dir / "adapter_weights"
        convert_adapter(work_dir / "reference" / "adapter", hf_dir, adapter_dir)
        lora_config = WeightReader(adapter_dir, takes_lora=True).lora
        case_fields["lora"] = dataclasses.asdict(lora_config) | {"adapter": str(adapter_dir)}
    return case_fields


def run_layouts(
    options: ParityOptions, case_fields: dict[str, Any], print_line: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Runs the layouts and maps each to its result; one group of processes serves each number of ranks."""
    results: dict[str, dict[str, Any]] = {}
    platform = "cuda" if torch.cuda.is_available() else "cpu"
    layout_specs = sorted(options.layout_specs, key=lambda layout: layout.world_size)
    for world_size, layouts in itertools.groupby(layout_specs, key=lambda layout: layout.world_size):
        cases = [
            ParityCase(
                layout.layout_text,
                sequence_parallel=layout.sequence_parallel,
                **case_fields,
                **layout.layout_arguments,
            )
            for layout in layouts
        ]
        print_line(f"{', '.join(case.name for case in cases)} with {pluralize(world_size, 'rank')}")
        cases_path = Path(case_fields["reference"]) / f"cases_{world_size}.json"
        results_path = cases_path.with_name(f"results_{world_size}.json")
        write_cases(cases, cases_path)
        arguments: list[str | Path] = [cases_path, results_path, platform]
        group = run_group("toolkit.parity.worker", arguments, world_size, on_cpu=platform == "cpu")
        # The worker writes after each case, so a crash loses only that case and later ones.
        why = f"the processes ended before this layout:\n{last_output_lines(group)}"
        results |= {case.name: {"ok": False, "error": why} for case in cases}
        if results_path.exists():
            results |= json.loads(results_path.read_text())
    return {layout.layout_text: results[layout.layout_text] for layout in options.layout_specs}
