"""Computes a reference, and writes it to a folder.

    python -m toolkit.parity.reference_job JOB.json

``JOB.json`` holds the fields of :class:`ReferenceJob`. ``megatron-vl parity`` runs this in a process of its
own, which frees its memory before the layouts run. Images and text then go through the checkpoint's own
processor in ``transformers``.
"""

import atexit
import gc
import hashlib
import itertools
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_vl.data.packing.assemble_row import TokenizedSample
from megatron_vl.data.sample.images import decode_image
from megatron_vl.data.sample.pixel_settings import read_pixel_norm
from megatron_vl.spec.families import read_spec
from megatron_vl.system.errors import UserError
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.common.hf_loading import load_hf_processor

from .activations import HfActivationRecorder
from .case import ParityCase, draw_samples, encode_conversations
from .errors import relative_error
from .reference import (
    add_random_adapter,
    backward_mean_loss,
    gradients_by_name,
    hf_inputs,
    load_hf_for_training,
    write_adapter_gradients,
    write_canonical,
)
from .tolerances import PIXEL_TOLERANCE


@dataclass
class ReferenceJob:
    hf: str
    out: str
    """Folder for ``reference.json``, ``activations.safetensors`` and the Megatron weights ``gradients``."""
    dtype: str = "float32"
    device: str = "cpu"
    lora_rank: int = 0
    """Rank of an adapter of every matrix. It is written to ``adapter`` in ``out``, and its gradients are
    compared instead of the model's; 0: no adapter."""
    conversations: str = ""
    """For the program: file of :func:`~toolkit.parity.case.encode_conversations`."""


def main(argv: list[str]) -> int:
    job = ReferenceJob(**json.loads(Path(argv[0]).read_text()))
    torch.set_num_threads(max(torch.get_num_threads(), 2) if job.device == "cpu" else 1)
    torch.backends.cudnn.allow_tf32 = False  # the patch embedding is a convolution there
    samples = encode_conversations(Path(job.conversations), job.hf)
    check_processor(job, samples)
    write_reference(job, samples)
    return 0


def find_reference(case: ParityCase, step_number: int, device: str) -> Path:
    """The folder of the reference of a step. Computes it, unless a case before has had the same."""
    if case.reference:
        return Path(case.reference)
    # The samples follow from their kinds and the number of the step, however they are spread over rows.
    kinds = [*itertools.chain(*case.steps[step_number])]
    inputs = json.dumps([case.hf, case.dtype, case.samples, step_number, kinds])
    folder = _references_root() / hashlib.sha256(inputs.encode()).hexdigest()
    if not (folder / "reference.json").exists():
        folder.mkdir(exist_ok=True)
        [samples] = draw_samples([kinds], read_spec(case.hf), step_number, case)
        write_reference(ReferenceJob(case.hf, str(folder), case.dtype, device), samples)
    return folder


@cache
def _references_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="parity-references-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def write_reference(job: ReferenceJob, samples: list[TokenizedSample]) -> None:
    """Writes gradients and layer outputs in fp32, and then ``reference.json`` with the loss and the errors of
    bf16, by tensor and location.

    For a comparison in bf16, the loss is that of bf16, and the model runs a second time for its own errors.
    """
    out = Path(job.out)
    loss, outputs = _run_transformers(job, samples, torch.float32, out / "gradients")
    save_file(outputs, out / "activations.safetensors")
    facts: dict[str, Any] = {
        "loss": loss,
        "order": list(outputs),
        "gradient_noise": {},
        "activation_noise": {},
    }
    if job.dtype == "bfloat16":
        gc.collect()  # frees the first model
        facts["loss"], bf16_outputs = _run_transformers(job, samples, torch.bfloat16, out / "bf16")
        facts["activation_noise"] = {
            location: relative_error(output, outputs[location]) for location, output in bf16_outputs.items()
        }
        exact, rounded = (WeightReader(out / name, takes_lora=True) for name in ("gradients", "bf16"))
        facts["gradient_noise"] = {
            name: relative_error(rounded.read_shard(name), exact.read_shard(name))
            for name in exact.tensor_names()
        }
    (out / "reference.json").write_text(json.dumps(facts))


def _run_transformers(
    job: ReferenceJob, samples: list[TokenizedSample], dtype: torch.dtype, gradients_dir: Path
) -> tuple[float, dict[str, Tensor]]:
    """Writes the canonical gradients to ``gradients_dir``. Returns the loss and the layer outputs."""
    spec, model = read_spec(job.hf), load_hf_for_training(job.hf, dtype, job.device)
    adapter_dir = Path(job.out) / "adapter"
    peft_model = add_random_adapter(model, spec, job.lora_rank, adapter_dir) if job.lora_rank else None
    recorder = HfActivationRecorder(model, spec)
    mean_loss = backward_mean_loss(model, samples, spec, read_pixel_norm(job.hf))
    recorder.remove_hooks()
    if peft_model is not None:
        write_adapter_gradients(peft_model, adapter_dir, job.hf, gradients_dir)
    else:
        write_canonical(gradients_by_name(model), job.hf, gradients_dir)
    return mean_loss, recorder.tensors_by_location()


def check_processor(job: ReferenceJob, samples: list[TokenizedSample]) -> None:
    """Compares tokens and pixels of the conversations with those of the checkpoint's own processor.

    Raises:
        UserError: they differ. Equal losses would say nothing about a user's data then.
    """
    from torchvision.transforms.v2.functional import to_pil_image

    spec, pixel_norm = read_spec(job.hf), read_pixel_norm(job.hf)
    processor = load_hf_processor(job.hf)
    conversations = json.loads(Path(job.conversations).read_text())
    for number, (sample, conversation) in enumerate(zip(samples, conversations, strict=True)):
        text = processor.apply_chat_template(conversation["messages"], tokenize=False)
        # In RGB as the loader opens them: releases of transformers differ in transparency and depth.
        images = [to_pil_image(decode_image(Path(path).read_bytes())) for path in conversation["images"]]
        output = processor(text=[text], images=images or None, return_tensors="pt")
        for name, ours in hf_inputs([sample], spec, pixel_norm).items():
            if output[name].shape != ours.shape or (output[name] - ours).abs().max() > PIXEL_TOLERANCE:
                raise UserError(f"conversation {number}: the checkpoint's own processor makes other {name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
