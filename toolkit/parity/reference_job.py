"""Computes a reference, and writes it to a folder.

    python -m toolkit.parity.reference_job JOB.json

``JOB.json`` holds the fields of :class:`ReferenceJob`. ``megatron-vl parity`` runs this in a process of its
own, which frees its memory before the layouts run. Pictures and text then go through the checkpoint's own
processor in ``transformers``. Its tokens and pixels are compared with those that the loader's functions made.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.data.sample.pixels import decode_image, read_pixel_norm
from megatron_vl.spec.families import read_spec
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.hf_loading import load_hf_processor

from .activations import HfActivationRecorder
from .case import ADAM_CONFIG, ParityCase, encode_conversations
from .errors import relative_error, squared_norms
from .reference import (
    ReferenceTrainer,
    add_random_adapter,
    backward_mean_loss,
    gradients_by_name,
    hf_inputs,
    load_hf_for_training,
    write_adapter_gradients,
    write_canonical,
)


@dataclass
class ReferenceJob:
    """One reference."""

    hf: str
    """Hugging Face checkpoint folder."""
    out: str
    """Folder for ``reference.json``, ``activations.safetensors`` and the Megatron weights ``gradients``; of a
    training, for ``reference.json`` and the Megatron weights ``weights``, ``exp_avg`` and ``exp_avg_sq``."""
    dtype: str = "float32"
    device: str = "cpu"
    steps: int = 0
    """Number of optimizer steps of a training; 0: one forward and backward pass."""
    lora_rank: int = 0
    """Rank of an adapter of every matrix. It is written to ``adapter`` in ``out``, and its gradients are
    compared instead of the model's; 0: no adapter."""
    conversations: str = ""
    """File of :func:`~toolkit.parity.case.encode_conversations`, all of which are in each step; empty: other
    samples are given, and there is nothing that a processor could read."""


def main(argv: list[str]) -> int:
    job = ReferenceJob(**json.loads(Path(argv[0]).read_text()))
    torch.set_num_threads(max(torch.get_num_threads(), 2) if job.device == "cpu" else 1)
    torch.backends.cudnn.allow_tf32 = False  # the patch embedding is a convolution there
    write_reference(job, [encode_conversations(Path(job.conversations), job.hf)] * max(job.steps, 1))
    return 0


def find_reference(
    case: ParityCase,
    step_numbers: Sequence[int],
    step_samples: list[list[list[TokenizedSample]]],
    device: str,
) -> Path:
    """The folder of the reference of these steps. Computes it, unless a case before has had the same.

    Args:
        step_samples: for each of the steps and row, its samples.
    """
    if case.reference:
        return Path(case.reference)
    # The samples follow from their kinds and the number of the step, however they are spread over rows.
    kinds = [[number, *itertools.chain(*case.steps[number])] for number in step_numbers]
    inputs = json.dumps([case.hf, case.dtype, case.train, kinds])
    folder = _references_root() / hashlib.sha256(inputs.encode()).hexdigest()
    if not (folder / "reference.json").exists():
        folder.mkdir()
        job = ReferenceJob(case.hf, str(folder), case.dtype, device, len(step_samples) if case.train else 0)
        write_reference(job, [list(itertools.chain(*samples)) for samples in step_samples])
    return folder


@cache
def _references_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="parity-references-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def write_reference(job: ReferenceJob, step_samples: list[list[TokenizedSample]]) -> None:
    """Computes a reference on the samples of each step, and writes ``reference.json`` last."""
    inputs, facts = process_conversations(job, step_samples[0])
    facts |= _train(job, step_samples) if job.steps else _run_one_pass(job, step_samples[0], inputs)
    (Path(job.out) / "reference.json").write_text(json.dumps(facts))


def _run_one_pass(
    job: ReferenceJob, samples: list[TokenizedSample], inputs: list[dict[str, Tensor]]
) -> dict[str, Any]:
    """Writes gradients and layer outputs in fp32, and returns the loss and the errors of bf16.

    For a comparison in bf16, the loss is that of bf16, and the model runs a second time for the errors of
    bf16 itself, by tensor and location.
    """
    out = Path(job.out)
    loss, outputs = _run_transformers(job, samples, inputs, torch.float32, out / "gradients")
    save_file(outputs, out / "activations.safetensors")
    facts: dict[str, Any] = {"loss": loss, "order": list(outputs)}
    facts |= {"gradient_noise": {}, "activation_noise": {}}
    if job.dtype == "bfloat16":
        facts["loss"], bf16_outputs = _run_transformers(job, samples, inputs, torch.bfloat16, out / "bf16")
        for location, output in bf16_outputs.items():
            facts["activation_noise"][location] = relative_error(*squared_norms(output, outputs[location]))
        exact, rounded = WeightReader(out / "gradients"), WeightReader(out / "bf16")
        for name in exact.tensor_names():
            squares = squared_norms(rounded.read_shard(name), exact.read_shard(name))
            facts["gradient_noise"][name] = relative_error(*squares)
    return facts


def _run_transformers(
    job: ReferenceJob,
    samples: list[TokenizedSample],
    inputs: list[dict[str, Tensor]],
    dtype: torch.dtype,
    gradients_dir: Path,
) -> tuple[float, dict[str, Tensor]]:
    """Writes the canonical gradients to ``gradients_dir``. Returns the loss and the layer outputs."""
    spec = read_spec(job.hf)
    model = load_hf_for_training(job.hf, dtype, job.device)
    adapter_dir = Path(job.out) / "adapter"
    peft_model = add_random_adapter(model, spec, job.lora_rank, adapter_dir) if job.lora_rank else None
    recorder = HfActivationRecorder(model, spec)
    mean_loss = backward_mean_loss(model, samples, spec, read_pixel_norm(job.hf), inputs)
    recorder.remove_hooks()
    if peft_model is not None:
        write_adapter_gradients(peft_model, adapter_dir, job.hf, gradients_dir)
    else:
        write_canonical(gradients_by_name(model), job.hf, gradients_dir)
    return mean_loss, recorder.tensors_by_location()


def _train(job: ReferenceJob, step_samples: list[list[TokenizedSample]]) -> dict[str, Any]:
    """Trains, writes the final weights and moments, and returns losses and gradient norms."""
    trainer = ReferenceTrainer(job.hf, ADAM_CONFIG, device=job.device)
    losses, norms = [], []
    for step_number, samples in enumerate(step_samples):
        learning_rate = ADAM_CONFIG.lr * min(1.0, (step_number + 1) / ADAM_CONFIG.warmup_steps)
        loss, norm = trainer.train_step(samples, learning_rate)
        losses.append(loss)
        norms.append(norm)

    write_canonical(trainer.main_weights, job.hf, Path(job.out) / "weights")
    adam_state = trainer.adam_optimizer.state
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = {name: adam_state[weight][kind] for name, weight in trainer.main_weights.items()}
        write_canonical(moments, job.hf, Path(job.out) / kind)
    return {"losses": losses, "norms": norms}


def process_conversations(
    job: ReferenceJob, samples: list[TokenizedSample]
) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Runs the checkpoint's own processor on the conversations and compares its output with ours.

    Returns:
        (keyword arguments of the model for each sample, {"tokens": number of tokens, "inputs":
        {"tokens_differ": numbers of the samples whose tokens differ, "pixel_error": largest difference of a
        normalised pixel}}).
    """
    spec, pixel_norm = read_spec(job.hf), read_pixel_norm(job.hf)
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
