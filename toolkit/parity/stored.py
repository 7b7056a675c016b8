"""Computes the reference once for all layouts.

    python -m toolkit.parity.stored JOB.json

``JOB.json`` holds the fields of :class:`ReferenceJob`. This runs in a process of its own, which frees its
memory before the layouts run. Pictures and text go through the checkpoint's own processor in
``transformers``. Its tokens and pixels are compared with those that the loader's functions made.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_vl.data.packing.assemble import Sample
from megatron_vl.data.sample.pixels import open_image, read_pixel_norm
from megatron_vl.spec.families import ModelSpec, read_spec
from toolkit.hf import load_processor
from toolkit.samples import read_samples

from .activations import HfWatch, squared_norms
from .gather import StoredTensors
from .locations import forward_order
from .reference import backward, canonical, hf_inputs, load_hf
from .training import reference_training


@dataclass
class ReferenceJob:
    """One call of this program."""

    hf: str
    """Hugging Face checkpoint folder."""
    samples: str
    """File written by :func:`toolkit.samples.write_samples`."""
    conversations: str
    """JSON file with each sample's HF messages and picture files."""
    out: str
    """Folder for ``reference.json``, ``gradients.safetensors`` and ``activations.safetensors``; for a
    training, ``training.safetensors`` instead."""
    dtype: str = "float32"
    device: str = "cpu"
    steps: int = 0
    """Number of optimizer steps of a training, each over all samples; 0: one forward and backward pass."""


def main(argv: list[str]) -> int:
    job = ReferenceJob(**json.loads(Path(argv[0]).read_text()))
    torch.set_num_threads(max(torch.get_num_threads(), 2) if job.device == "cpu" else 1)
    torch.backends.cudnn.allow_tf32 = False  # the patch embedding is a convolution there
    samples = read_samples(Path(job.samples))
    facts = train(job, samples) if job.steps else one_pass(job, samples)
    (Path(job.out) / "reference.json").write_text(json.dumps(facts))
    return 0


def one_pass(job: ReferenceJob, samples: list[Sample]) -> dict[str, Any]:
    """Computes loss, gradients and activations in one pass over the samples, and writes the tensors.

    The tensors are in fp32. For a comparison in bf16, the loss is that of bf16, and the model runs a second
    time for the errors of bf16 itself ("gradient_noise" and "activation_noise").

    Returns:
        The contents of ``reference.json``.
    """
    spec = read_spec(job.hf)
    out = Path(job.out)
    given, inputs = processed(job, samples, spec)
    loss, gradients, activations = run(job, samples, given, spec, torch.float32)
    save_file(gradients, out / "gradients.safetensors")
    save_file(activations, out / "activations.safetensors")

    facts: dict[str, Any] = {
        "loss": loss,
        "gradient_noise": {},
        "activation_noise": {},
        "order": forward_order(spec),
        "inputs": inputs,
        "tokens": sum(len(s) for s in samples),
    }

    if job.dtype == "bfloat16":
        del gradients, activations
        gc.collect()
        facts["loss"], gradients, activations = run(job, samples, given, spec, torch.bfloat16)

        for kind, file, rounded in (
            ("gradient", "gradients", gradients),
            ("activation", "activations", activations),
        ):
            exact = StoredTensors(out / f"{file}.safetensors")
            facts[f"{kind}_noise"] = {name: _error(rounded[name], exact[name]) for name in rounded}

    return facts


def _error(got: Tensor, want: Tensor) -> float:
    """Relative L2 error."""
    difference, scale = squared_norms(got, want)
    return math.sqrt(difference / max(scale, 1e-60))


def run(
    job: ReferenceJob,
    samples: list[Sample],
    inputs: list[dict[str, Tensor]],
    spec: ModelSpec,
    dtype: torch.dtype,
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Returns (loss, canonical gradients, layer outputs) of ``transformers`` in ``dtype``."""
    model = load_hf(job.hf, dtype, job.device)
    watch = HfWatch(model, spec)
    loss = backward(model, samples, spec, read_pixel_norm(job.hf), inputs)
    watch.close()
    gradients = {
        name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()
    }
    return loss, canonical(gradients, job.hf), watch.tensors()


def processed(
    job: ReferenceJob, samples: list[Sample], spec: ModelSpec
) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Runs the checkpoint's own processor on the conversations and compares its output with ours.

    Returns:
        (keyword arguments of the model for each sample, {"tokens_differ": numbers of the samples whose tokens
        differ, "pixel_error": largest difference of a normalised pixel}).
    """
    processor = load_processor(job.hf)
    norm = read_pixel_norm(job.hf)
    given = []
    differ = []
    pixel_error = 0.0
    for number, (sample, conversation) in enumerate(
        zip(samples, json.loads(Path(job.conversations).read_text()), strict=True)
    ):
        text = processor.apply_chat_template(conversation["messages"], tokenize=False)
        images = [_opened(path) for path in conversation["images"]]
        theirs = dict(processor(text=[text], images=images or None, return_tensors="pt"))
        ours = hf_inputs(sample, spec, norm)
        if not torch.equal(theirs["input_ids"], ours["input_ids"]):
            differ.append(number)
            theirs = ours  # the losses must be of the same tokens; the caller reports the difference
        elif images:
            pixel_error = max(
                pixel_error, float((theirs["pixel_values"].float() - ours["pixel_values"]).abs().max())
            )
        given.append({name: theirs[name] for name in ours})

    return given, {"tokens_differ": differ, "pixel_error": pixel_error}


def _opened(path: str) -> Any:
    """Opens a picture as ``transformers.image_utils.load_image`` does; the loader's formats are valid."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(open_image(Path(path).read_bytes())).convert("RGB")


def train(job: ReferenceJob, samples: list[Sample]) -> dict[str, Any]:
    """Runs the training and writes the final weights and moments to ``training.safetensors``.

    Returns:
        The contents of ``reference.json``: losses, gradient norms and facts about the samples.
    """
    losses, norms, state = reference_training(job.hf, [samples] * job.steps, job.device)
    tensors: dict[str, Tensor] = {}
    for kind, part in state.items():
        if kind != "main":
            tensors |= {f"{kind}/{name}": tensor for name, tensor in part.items()}
    save_file(tensors, Path(job.out) / "training.safetensors")
    inputs = processed(job, samples, read_spec(job.hf))[1]
    return {"losses": losses, "norms": norms, "inputs": inputs, "tokens": sum(map(len, samples))}


def write_job(job: ReferenceJob, path: Path) -> None:
    path.write_text(json.dumps(dataclasses.asdict(job)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
