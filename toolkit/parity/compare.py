"""Carries out ``megatron-vl parity``: prepares pictures, weights and the reference, and runs the layouts."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from converters.convert import convert
from data_tools.formats import read_conversation
from megatron_vl.data.packing.assemble import Sample
from megatron_vl.errors import UserError
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import make_layout
from megatron_vl.spec.tensors import LayoutError, tensor_table
from megatron_vl.weights.reader import WeightReader
from megatron_vl.weights.video_rule import exported_video_rule, weights_video_rule
from toolkit.hf import check_folder
from toolkit.launch import end_of, run_group
from toolkit.layouts import LayoutSpec
from toolkit.samples import SampleEncoder, write_samples
from toolkit.tiny import FAMILIES, write_tiny_checkpoint
from toolkit.trained_rules import follow

from .case import Case, write_cases
from .locations import component_of, location_of
from .stored import ReferenceJob, write_job
from .tolerances import BF16_GRADIENT_RATIO, GRADIENT_TOLERANCE

PHOTOGRAPHS = ("astronaut", "two_images", "image_between_texts", "text_only")
"""The demo conversations that are compared if no pictures are given."""
QUESTION, ANSWER = "<image>\nWhat is in this picture?", "This is what one can see in the picture."


@dataclass
class ParityRequest:
    """The options of one call of the command."""

    layouts: list[LayoutSpec]
    hf: Path | None = None
    family: str = ""
    """Use a small model of this family with random weights instead of ``hf``."""
    checkpoint: Path | None = None
    """Compare these Megatron weights instead of a fresh conversion of ``hf``."""
    images: list[Path] = field(default_factory=list)
    dtype: str = "float32"
    platform: str = "cpu"
    steps: int = 0
    reference_device: str = ""
    """Device of ``transformers``; empty: the platform's device."""


def run_parity(request: ParityRequest, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Compares every layout with ``transformers``.

    Args:
        say: receives a line of text before each long phase.

    Returns:
        {"ok", "hf", "dtype", "tokens", "inputs", "layouts": {layout: result of the case}}.

    Raises:
        UserError: a process of the comparison failed, or the request is impossible.
        FileNotFoundError: a folder or a picture does not exist.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-vl-parity-") as folder:
        work = Path(folder)
        hf = request.hf or write_tiny_checkpoint(work / "hf", _family(request.family), dtype=torch.float32)
        check_folder(hf)
        spec = read_spec(hf)
        for layout in request.layouts:
            _check_layout(spec, layout)
        _follow_videos(request, hf, spec, say)

        weights = _weights(request, hf, spec, work, say)
        samples = prepare_samples(request.images, hf, work, _count(request.layouts))
        say(
            f"transformers on {len(samples)} conversations of {sum(map(len, samples))} tokens, "
            f"{request.dtype}"
        )
        facts = _run_reference(request, hf, work)

        results = run_layouts(request, hf, weights, samples, work, say)
        if request.checkpoint:
            for result in results.values():
                result["tensors"] = differing_tensors(request, hf, result, work)

    inputs = facts["inputs"]
    ok = (
        not inputs["tokens_differ"]
        and inputs["pixel_error"] <= 1e-5
        and all(r["ok"] for r in results.values())
    )
    return {
        "ok": ok,
        "hf": str(request.hf) if request.hf else request.family,
        "dtype": request.dtype,
        "tokens": facts["tokens"],
        "inputs": inputs,
        "layouts": results,
    }


def _run_reference(request: ParityRequest, hf: Path, work: Path) -> dict[str, Any]:
    """Runs ``transformers`` in a process of its own and returns the contents of its ``reference.json``."""
    job = ReferenceJob(
        hf=str(hf),
        samples=str(work / "samples.safetensors"),
        conversations=str(work / "conversations.json"),
        out=str(work),
        dtype=request.dtype,
        device=request.reference_device or ("cuda" if request.platform == "cuda" else "cpu"),
        steps=request.steps,
    )

    write_job(job, work / "job.json")
    done = run_group("toolkit.parity.stored", [work / "job.json"], 1)
    if done.returncode:
        raise UserError(f"transformers failed on {hf}:\n{end_of(done)}")
    return json.loads((work / "reference.json").read_text())


def _check_layout(spec: ModelSpec, layout: LayoutSpec) -> None:
    """Raises UserError, in terms of the command line, if the layout is impossible for this model."""
    if spec.language.moe and layout.tp > 1 and not layout.sequence_parallel:
        sizes, colon, layers = layout.text.partition(":")
        raise UserError(
            f"--layouts {layout.text}: with experts, tensor parallelism needs sequence parallelism "
            f"(each rank routes its own tokens); write {sizes}sp{colon}{layers}"
        )
    try:
        make_layout(spec, **layout.model_parallel)
    except LayoutError as error:
        raise UserError(f"--layouts {layout.text}: {error}") from error


def _follow_videos(request: ParityRequest, hf: Path, spec: ModelSpec, say: Callable[[str], None]) -> None:
    """Says which rule for videos the checkpoint was trained under.

    The rule changes nothing here, because only pictures and text are compared.

    Raises:
        UserError: this version does not know the rule.
    """
    folder = hf
    trained = exported_video_rule(hf, spec)
    if request.checkpoint:
        reader = WeightReader(request.checkpoint)
        if rule := weights_video_rule(reader.path, reader.manifest, spec):
            folder, trained = reader.path, rule
    follow(
        folder,
        trained,
        {},
        lambda line: say(f"{line}; the pictures and texts compared here do not depend on it"),
    )


def _family(name: str) -> str:
    if name not in FAMILIES:
        raise UserError(f"--family {name!r} is unknown; valid: {', '.join(FAMILIES)}")
    return name


def _weights(
    request: ParityRequest, hf: Path, spec: ModelSpec, work: Path, say: Callable[[str], None]
) -> Path:
    """Returns the Megatron weights to compare, converting them if needed."""
    if request.checkpoint is None:
        say(f"converting {hf}")
        convert(hf, work / "weights")
        return work / "weights"
    reader = WeightReader(request.checkpoint)
    if reader.spec.differences(spec):
        raise UserError(
            f"--checkpoint {request.checkpoint} holds a {reader.spec.family} model of other sizes than "
            f"--hf {hf}"
        )
    return request.checkpoint


def _count(layouts: list[LayoutSpec]) -> int:
    """Returns the number of rows in a step: one for all layouts, so that one reference serves them."""
    multiple = math.lcm(*(layout.rows for layout in layouts))
    return multiple * -(-2 // multiple)


def prepare_samples(images: list[Path], hf: Path, work: Path, rows: int) -> list[Sample]:
    """Makes at least ``rows`` samples of the pictures or the demo's photographs.

    Writes ``samples.safetensors`` and ``conversations.json`` of a :class:`ReferenceJob` to ``work``.

    Raises:
        RecordError, FileNotFoundError: a picture is unusable or missing.
    """
    if images:
        turns = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]
        records = [{"image": str(path.resolve()), "conversations": turns} for path in images]
        records.append(
            {
                "conversations": [
                    {"from": "human", "value": "Which day is it?"},
                    {"from": "gpt", "value": "It is Friday."},
                ]
            }
        )
        root = Path("/")
    else:
        records, root = _photographs(work)

    records = list(itertools.islice(itertools.cycle(records), max(len(records), rows)))
    encoder = SampleEncoder(hf)
    samples = []
    described = []
    for record in records:
        conversation = read_conversation(record)
        paths = [root / reference for _, reference in conversation.media]
        media = [
            (kind, path.name, path.read_bytes())
            for (kind, _), path in zip(conversation.media, paths, strict=True)
        ]
        samples.append(encoder.sample(conversation.messages, media))
        described.append({"messages": conversation.messages, "images": [str(path) for path in paths]})

    write_samples(samples, work / "samples.safetensors")
    (work / "conversations.json").write_text(json.dumps(described))
    return samples


def _photographs(work: Path) -> tuple[list[dict[str, Any]], Path]:
    from toolkit.demo.data import write_raw_data

    conversations = json.loads(write_raw_data(work / "raw").read_text())
    return [record for record in conversations if record["id"] in PHOTOGRAPHS], work / "raw" / "media"


def run_layouts(
    request: ParityRequest,
    hf: Path,
    weights: Path,
    samples: list[Sample],
    work: Path,
    say: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Runs the layouts and maps each to its result; one group of processes serves each number of ranks."""
    rows = spread(len(samples), _count(request.layouts))
    longest = max(sum(len(samples[i]) for i in row) for row in rows)
    unit = math.lcm(64, *(layout.tp * layout.cp for layout in request.layouts))

    results: dict[str, dict[str, Any]] = {}
    for ranks in sorted({layout.ranks for layout in request.layouts}):
        group = [layout for layout in request.layouts if layout.ranks == ranks]

        cases = [
            Case(
                name=layout.text,
                hf=str(hf),
                weights=str(weights),
                steps=[[[f"sample:{i}" for i in row] for row in rows]] * max(request.steps, 1),
                seq_len=-(-longest // unit) * unit,
                dtype=request.dtype,
                train=request.steps > 0,
                samples=str(work / "samples.safetensors"),
                reference=str(work),
                activations=request.steps == 0,
                optimizer=request.steps > 0,
                sequence_parallel=layout.sequence_parallel,
                attention="sdpa" if request.dtype == "float32" else "auto",
                **layout.model_parallel,
            )
            for layout in group
        ]

        say(f"{', '.join(layout.text for layout in group)} in {ranks} process{'es' if ranks > 1 else ''}")
        given, out = work / f"cases_{ranks}.json", work / f"results_{ranks}.json"
        write_cases(cases, given)
        done = run_group(
            "toolkit.parity.worker", [given, out, request.platform], ranks, on_cpu=request.platform == "cpu"
        )

        found = json.loads(out.read_text()) if out.exists() else {}
        for layout in group:
            missing = {"ok": False, "error": f"the processes ended before this layout:\n{end_of(done)}"}
            results[layout.text] = found.get(layout.text, missing)

    return {layout.text: results[layout.text] for layout in request.layouts}


def spread(samples: int, rows: int) -> list[list[int]]:
    """Distributes sample numbers over rows, in order and as evenly as possible."""
    bounds = [samples * i // rows for i in range(rows + 1)]
    return [list(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]


def first_departure(result: dict[str, Any]) -> str:
    """Names the first location that departs, or "" if every location agrees.

    Outputs are examined first, in the order of the forward pass; then gradients, in backward order.
    """
    for step in result.get("steps", []):
        if step.get("departs"):
            return step["departs"]
        if step.get("unexpected"):
            return f"gradient of {step['unexpected'][0]}"
        noise = step.get("transformers_bf16_gradient_error")
        limit = GRADIENT_TOLERANCE if noise is None else noise * BF16_GRADIENT_RATIO
        order = list(step.get("activations", {}))
        wrong = [location for location, error in step.get("gradients", {}).items() if not error <= limit]
        if wrong:
            last = max(wrong, key=lambda location: order.index(location) if location in order else -1)
            return f"gradient of {last}"
    return ""


def by_component(locations: dict[str, float]) -> dict[str, float]:
    """Maps each component to the largest error among its locations."""
    worst: dict[str, float] = {}
    for location, error in locations.items():
        worst[component_of(location)] = max(worst.get(component_of(location), 0.0), error)
    return worst


def differing_tensors(request: ParityRequest, hf: Path, result: dict[str, Any], work: Path) -> list[str]:
    """Names the tensors of the first departing location that differ from a conversion of ``hf``."""
    location = first_departure(result).removeprefix("gradient of ")
    if not location or request.checkpoint is None:
        return []

    fresh = work / "converted"
    if not fresh.exists():
        convert(hf, fresh)
    ours = WeightReader(request.checkpoint)
    theirs = WeightReader(fresh)
    return [
        name
        for name in tensor_table(ours.spec)
        if location_of(name) == location and not torch.equal(ours.get(name), theirs.get(name))
    ]
