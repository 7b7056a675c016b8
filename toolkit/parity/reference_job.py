"""Computes a reference, and writes it to a folder.

    python -m toolkit.parity.reference_job JOB.json

``JOB.json`` holds the fields of :class:`ReferenceJob`. ``megatron-vl parity`` runs this in a process of its
own, which frees its memory before the layouts run. Pictures and text then go through the checkpoint's own
processor in ``transformers``. Its tokens and pixels are compared with those that the loader's functions made.
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
from .case import ADAM_CONFIG
from .gather_tensors import LazyTensorFile
from .peft_reference import adapter_gradients, add_random_adapter
from .reference import (
    backward_mean_loss,
    canonical_gradients,
    hf_inputs,
    load_hf_for_training,
    to_canonical,
)
from .reference_trainer import ReferenceTrainer


@dataclass
class ReferenceJob:
    """One reference."""

    hf: str
    """Hugging Face checkpoint folder."""
    out: str
    """Folder for ``reference.json``, ``gradients.safetensors`` and ``activations.safetensors``; for a
    training, ``weights.safetensors``, ``exp_avg.safetensors`` and ``exp_avg_sq.safetensors`` instead."""
    dtype: str = "float32"
    device: str = "cpu"
    steps: int = 0
    """Number of optimizer steps of a training; 0: one forward and backward pass."""
    lora_rank: int = 0
    """Rank of an adapter of every matrix. It is written to ``adapter`` in ``out``, and its gradients are
    compared instead of the model's; 0: no adapter."""
    samples: str = ""
    """File of :func:`toolkit.sample_encoder.write_samples`, for the program. Each step is of all samples."""
    conversations: str = ""
    """JSON file with each sample's HF messages and picture files; empty: there are none to compare with."""


def main(argv: list[str]) -> int:
    job = ReferenceJob(**json.loads(Path(argv[0]).read_text()))
    torch.set_num_threads(max(torch.get_num_threads(), 2) if job.device == "cpu" else 1)
    torch.backends.cudnn.allow_tf32 = False  # the patch embedding is a convolution there
    write_reference(job, [read_samples(Path(job.samples))] * max(job.steps, 1))
    return 0


def write_reference(job: ReferenceJob, step_samples: list[list[TokenizedSample]]) -> None:
    """Computes a reference on the samples of each step, and writes ``reference.json`` last."""
    spec = read_spec(job.hf)
    processor_inputs, reference_facts = process_conversations(job, step_samples[0], spec)
    if job.steps:
        reference_facts |= _train(job, step_samples)
    else:
        reference_facts |= _run_one_pass(job, step_samples[0], processor_inputs, spec)
    (Path(job.out) / "reference.json").write_text(json.dumps(reference_facts))


def _run_one_pass(
    job: ReferenceJob,
    samples: list[TokenizedSample],
    processor_inputs: list[dict[str, Tensor]],
    spec: ModelSpec,
) -> dict[str, Any]:
    """Writes gradients and layer outputs in fp32, and returns the loss and the errors of bf16.

    For a comparison in bf16, the loss is that of bf16, and the model runs a second time for the errors of
    bf16 itself ("gradients_noise" and "activations_noise").
    """
    mean_loss, tensors = _run_transformers(job, samples, processor_inputs, spec, torch.float32)
    for kind, named_tensors in tensors.items():
        save_file(named_tensors, Path(job.out) / f"{kind}.safetensors")
    facts: dict[str, Any] = {"loss": mean_loss, "order": list(tensors["activations"])}
    facts |= {f"{kind}_noise": {} for kind in tensors}
    if job.dtype == "bfloat16":
        del tensors, named_tensors
        gc.collect()
        facts["loss"], tensors = _run_transformers(job, samples, processor_inputs, spec, torch.bfloat16)
        for kind, named_tensors in tensors.items():
            float32_tensors = LazyTensorFile(Path(job.out) / f"{kind}.safetensors")
            for name, tensor in named_tensors.items():
                squared_difference, squared_scale = squared_norms(tensor, float32_tensors[name])
                error = math.sqrt(squared_difference / max(squared_scale, 1e-60))
                facts[f"{kind}_noise"][name] = error
    return facts


def _run_transformers(
    job: ReferenceJob,
    samples: list[TokenizedSample],
    processor_inputs: list[dict[str, Tensor]],
    spec: ModelSpec,
    dtype: torch.dtype,
) -> tuple[float, dict[str, dict[str, Tensor]]]:
    """Returns (loss, {"gradients": canonical gradients, "activations": layer outputs})."""
    model = load_hf_for_training(job.hf, dtype, job.device)
    adapter_dir = Path(job.out) / "adapter"
    if job.lora_rank:
        peft_model = add_random_adapter(model, spec, job.lora_rank, adapter_dir)
    activation_recorder = HfActivationRecorder(model, spec)
    mean_loss = backward_mean_loss(model, samples, spec, read_pixel_norm(job.hf), processor_inputs)
    activation_recorder.remove_hooks()

    if job.lora_rank:
        gradients = adapter_gradients(peft_model, spec, adapter_dir)
    else:
        gradients = canonical_gradients(model, job.hf)
    return mean_loss, {"gradients": gradients, "activations": activation_recorder.tensors_by_location()}


def _train(job: ReferenceJob, step_samples: list[list[TokenizedSample]]) -> dict[str, Any]:
    """Trains, writes the final weights and moments, and returns losses and gradient norms."""
    trainer = ReferenceTrainer(job.hf, ADAM_CONFIG, device=job.device)
    losses, gradient_norms = [], []
    for step_number, samples in enumerate(step_samples):
        learning_rate = ADAM_CONFIG.lr * min(1.0, (step_number + 1) / ADAM_CONFIG.warmup_steps)
        loss, gradient_norm = trainer.train_step(samples, learning_rate)
        losses.append(loss)
        gradient_norms.append(gradient_norm)

    main_weights, adam_state = trainer.main_weights, trainer.adam_optimizer.state
    state_by_kind = {"weights": {name: weight.detach() for name, weight in main_weights.items()}}
    for kind in ("exp_avg", "exp_avg_sq"):
        state_by_kind[kind] = {name: adam_state[weight][kind] for name, weight in main_weights.items()}
    for kind, tensors in state_by_kind.items():
        save_file(to_canonical(tensors, job.hf), Path(job.out) / f"{kind}.safetensors")
    return {"losses": losses, "norms": gradient_norms}


def process_conversations(
    job: ReferenceJob, samples: list[TokenizedSample], spec: ModelSpec
) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Runs the checkpoint's own processor on the conversations and compares its output with ours.

    Returns:
        (keyword arguments of the model for each sample, {"tokens": number of tokens, "inputs":
        {"tokens_differ": numbers of the samples whose tokens differ, "pixel_error": largest difference of a
        normalised pixel}}).
    """
    pixel_norm = read_pixel_norm(job.hf)
    loader_inputs = [hf_inputs([sample], spec, pixel_norm) for sample in samples]
    token_count = sum(len(sample) for sample in samples)
    if not job.conversations:
        return loader_inputs, {"tokens": token_count}

    processor = load_hf_processor(job.hf)
    processor_inputs = []
    differing_samples = []
    pixel_error = 0.0
    conversations = json.loads(Path(job.conversations).read_text())
    for number, (loader_input, conversation) in enumerate(zip(loader_inputs, conversations, strict=True)):
        rendered_text = processor.apply_chat_template(conversation["messages"], tokenize=False)
        pictures = [_open_picture(path) for path in conversation["images"]]
        output = dict(processor(text=[rendered_text], images=pictures or None, return_tensors="pt"))
        if not torch.equal(output["input_ids"], loader_input["input_ids"]):
            differing_samples.append(number)
            # The losses must be of the same tokens. The caller reports the difference.
            output = loader_input
        elif pictures:
            pixel_difference = output["pixel_values"].float() - loader_input["pixel_values"]
            pixel_error = max(pixel_error, float(pixel_difference.abs().max()))
        processor_inputs.append({name: output[name] for name in loader_input})

    input_facts = {"tokens_differ": differing_samples, "pixel_error": pixel_error}
    return processor_inputs, {"tokens": token_count, "inputs": input_facts}


def _open_picture(picture_path: str) -> Any:
    """Opens an image in RGB as the loader does: releases of transformers differ in transparency and depth."""
    from torchvision.transforms.v2.functional import to_pil_image

    return to_pil_image(decode_image(Path(picture_path).read_bytes()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
