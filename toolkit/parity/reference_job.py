"""Computes the reference once for all layouts.

    python -m toolkit.parity.reference_job JOB.json

``JOB.json`` holds the fields of :class:`ReferenceJob`. This runs in a process of its own, which frees its
memory before the layouts run. Pictures and text go through the checkpoint's own processor in
``transformers``. Its tokens and pixels are compared with those that the loader's functions made.
"""

from __future__ import annotations

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

from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.data.sample.pixels import decode_image, read_pixel_norm
from megatron_vl.spec.families import ModelSpec, read_spec
from toolkit.hf_loading import load_hf_processor
from toolkit.sample_encoder import read_samples

from .activations import HfActivationRecorder, squared_norms
from .gather_tensors import LazyTensorFile
from .locations import forward_order
from .peft_reference import adapter_gradients, add_random_adapter
from .reference import backward_mean_loss, canonical_gradients, hf_inputs, load_hf_for_training
from .training import reference_training


@dataclass
class ReferenceJob:
    """One call of this program."""

    hf: str
    """Hugging Face checkpoint folder."""
    samples: str
    """File written by :func:`toolkit.sample_encoder.write_samples`."""
    conversations: str
    """JSON file with each sample's HF messages and picture files."""
    out: str
    """Folder for ``reference.json``, ``gradients.safetensors`` and ``activations.safetensors``; for a
    training, ``training.safetensors`` instead."""
    dtype: str = "float32"
    device: str = "cpu"
    lora_rank: int = 0
    """Rank of an adapter of every matrix. It is written to ``adapter`` in ``out``, and its gradients are
    compared instead of the model's; 0: no adapter."""
    steps: int = 0
    """Number of optimizer steps of a training, each over all samples; 0: one forward and backward pass."""


def main(argv: list[str]) -> int:
    reference_job = ReferenceJob(**json.loads(Path(argv[0]).read_text()))
    torch.set_num_threads(max(torch.get_num_threads(), 2) if reference_job.device == "cpu" else 1)
    torch.backends.cudnn.allow_tf32 = False  # the patch embedding is a convolution there
    samples = read_samples(Path(reference_job.samples))
    run_reference = train_transformers if reference_job.steps else one_pass
    reference_facts = run_reference(reference_job, samples)
    (Path(reference_job.out) / "reference.json").write_text(json.dumps(reference_facts))
    return 0


def one_pass(reference_job: ReferenceJob, samples: list[TokenizedSample]) -> dict[str, Any]:
    """Computes loss, gradients and activations in one pass over the samples, and writes the tensors.

    The tensors are in fp32. For a comparison in bf16, the loss is that of bf16, and the model runs a second
    time for the errors of bf16 itself ("gradient_noise" and "activation_noise").

    Returns:
        The contents of ``reference.json``.
    """
    spec = read_spec(reference_job.hf)
    out_dir = Path(reference_job.out)
    processor_inputs, input_facts = process_conversations(reference_job, samples, spec)
    mean_loss, gradients, activations = run_transformers(
        reference_job, samples, processor_inputs, spec, torch.float32
    )
    save_file(gradients, out_dir / "gradients.safetensors")
    save_file(activations, out_dir / "activations.safetensors")

    reference_facts: dict[str, Any] = {
        "loss": mean_loss,
        "gradient_noise": {},
        "activation_noise": {},
        "order": forward_order(spec),
        "inputs": input_facts,
        "tokens": sum(len(sample) for sample in samples),
    }

    if reference_job.dtype == "bfloat16":
        del gradients, activations
        gc.collect()
        reference_facts["loss"], gradients, activations = run_transformers(
            reference_job, samples, processor_inputs, spec, torch.bfloat16
        )

        for noise_kind, file_stem, bf16_tensors in (
            ("gradient", "gradients", gradients),
            ("activation", "activations", activations),
        ):
            float32_tensors = LazyTensorFile(out_dir / f"{file_stem}.safetensors")
            noise_by_name = reference_facts[f"{noise_kind}_noise"]
            for name, bf16_tensor in bf16_tensors.items():
                noise_by_name[name] = _relative_error(bf16_tensor, float32_tensors[name])

    return reference_facts


def _relative_error(actual_tensor: Tensor, expected_tensor: Tensor) -> float:
    """Relative L2 error."""
    squared_difference, squared_scale = squared_norms(actual_tensor, expected_tensor)
    return math.sqrt(squared_difference / max(squared_scale, 1e-60))


def run_transformers(
    reference_job: ReferenceJob,
    samples: list[TokenizedSample],
    processor_inputs: list[dict[str, Tensor]],
    spec: ModelSpec,
    dtype: torch.dtype,
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Returns (loss, canonical gradients, layer outputs) of ``transformers`` in ``dtype``."""
    model = load_hf_for_training(reference_job.hf, dtype, reference_job.device)
    adapter_dir = Path(reference_job.out) / "adapter"
    if reference_job.lora_rank:
        peft_model = add_random_adapter(model, spec, reference_job.lora_rank, adapter_dir)
    activation_recorder = HfActivationRecorder(model, spec)
    mean_loss = backward_mean_loss(model, samples, spec, read_pixel_norm(reference_job.hf), processor_inputs)
    activation_recorder.remove_hooks()

    if reference_job.lora_rank:
        gradients = adapter_gradients(peft_model, spec, adapter_dir)
    else:
        gradients = canonical_gradients(model, reference_job.hf)
    return mean_loss, gradients, activation_recorder.tensors_by_location()


def process_conversations(
    reference_job: ReferenceJob, samples: list[TokenizedSample], spec: ModelSpec
) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Runs the checkpoint's own processor on the conversations and compares its output with ours.

    Returns:
        (keyword arguments of the model for each sample, {"tokens_differ": numbers of the samples whose tokens
        differ, "pixel_error": largest difference of a normalised pixel}).
    """
    processor = load_hf_processor(reference_job.hf)
    pixel_norm = read_pixel_norm(reference_job.hf)
    processor_inputs = []
    differing_samples = []
    pixel_error = 0.0
    conversations = json.loads(Path(reference_job.conversations).read_text())
    for sample_number, (sample, conversation) in enumerate(zip(samples, conversations, strict=True)):
        rendered_text = processor.apply_chat_template(conversation["messages"], tokenize=False)
        opened_pictures = [_open_picture(path) for path in conversation["images"]]
        processor_output = dict(
            processor(text=[rendered_text], images=opened_pictures or None, return_tensors="pt")
        )
        loader_output = hf_inputs([sample], spec, pixel_norm)
        if not torch.equal(processor_output["input_ids"], loader_output["input_ids"]):
            differing_samples.append(sample_number)
            # The losses must be of the same tokens. The caller reports the difference.
            processor_output = loader_output
        elif opened_pictures:
            pixel_difference = processor_output["pixel_values"].float() - loader_output["pixel_values"]
            pixel_error = max(pixel_error, float(pixel_difference.abs().max()))
        processor_inputs.append({name: processor_output[name] for name in loader_output})

    return processor_inputs, {"tokens_differ": differing_samples, "pixel_error": pixel_error}


def _open_picture(picture_path: str) -> Any:
    """Opens an image in RGB as the loader does: releases of transformers differ in transparency and depth."""
    from torchvision.transforms.v2.functional import to_pil_image

    return to_pil_image(decode_image(Path(picture_path).read_bytes()))


def train_transformers(reference_job: ReferenceJob, samples: list[TokenizedSample]) -> dict[str, Any]:
    """Runs the training and writes the final weights and moments to ``training.safetensors``.

    Returns:
        The contents of ``reference.json``: losses, gradient norms and facts about the samples.
    """
    losses, gradient_norms, state_by_kind = reference_training(
        reference_job.hf, [samples] * reference_job.steps, reference_job.device
    )
    stored_tensors: dict[str, Tensor] = {}
    for state_kind, kind_tensors in state_by_kind.items():
        if state_kind != "main":
            stored_tensors |= {f"{state_kind}/{name}": tensor for name, tensor in kind_tensors.items()}
    save_file(stored_tensors, Path(reference_job.out) / "training.safetensors")
    input_facts = process_conversations(reference_job, samples, read_spec(reference_job.hf))[1]
    return {
        "losses": losses,
        "norms": gradient_norms,
        "inputs": input_facts,
        "tokens": sum(map(len, samples)),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
