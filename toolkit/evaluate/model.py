"""The one adapter that every checkpoint is asked through: same type, same pixel limits, greedy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.data.pixels import open_image
from toolkit.hf import load_model, load_processor

Prompt = Sequence[Mapping[str, Any]]
"""VLMEvalKit's message: parts ``{"type": "image" | "text", "value": path or text}`` in their order."""


class Checkpoint:
    """A Hugging Face folder that answers prompts.

    Args:
        settings: ``dtype``, ``device`` (``cpu``, ``cuda`` or ``auto``: spread over the visible GPUs), ``min_pixels`` and
            ``max_pixels`` of a picture (None: the checkpoint's own), ``max_new_tokens``, ``largest_picture`` in pixels.
        roots: folders that pictures are read from.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], roots: Sequence[Path]) -> None:
        from transformers import GenerationConfig

        self.roots = [root.resolve() for root in roots]
        self.largest = settings["largest_picture"]
        self.processor = load_processor(folder)
        size = self.processor.image_processor.size
        low, high = settings["min_pixels"] or size["shortest_edge"], settings["max_pixels"] or size["longest_edge"]
        self.processor.image_processor.size = {"shortest_edge": low, "longest_edge": high}
        device = settings["device"]
        self.model = load_model(folder, getattr(torch, settings["dtype"]), "auto" if device == "auto" else None)
        if device != "auto":
            self.model.to(device)
        # Released folders ask for sampling and a repetition penalty: nothing of theirs but the tokens that end an answer.
        own = self.model.generation_config
        ends, pad = own.eos_token_id, own.pad_token_id
        pad = pad if pad is not None else ends[0] if isinstance(ends, list) else ends
        limit = settings["max_new_tokens"]
        self.generation = GenerationConfig(do_sample=False, max_new_tokens=limit, eos_token_id=ends, pad_token_id=pad)

    def inputs(self, prompt: Prompt) -> Any:
        """What the model is given: the prompt as the checkpoint's own processor and chat template make it."""
        content: list[dict[str, str]] = []
        images = []
        for part in prompt:
            if part["type"] == "image":
                content.append({"type": "image"})
                images.append(self._picture(Path(part["value"])))
            elif part["type"] == "text":
                content.append({"type": "text", "text": str(part["value"])})
            else:
                raise ValueError(f"a prompt holds {part['type']!r}; only data sets of pictures and text are evaluated")
        messages = [{"role": "user", "content": content}]
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        batch = self.processor(text=[text], images=images or None, return_tensors="pt")
        return batch.to(self.model.device)

    def _picture(self, path: Path) -> Any:
        """RGB, in the formats and up to the size that the loader reads too."""
        if not any(path.resolve().is_relative_to(root) for root in self.roots):
            raise ValueError(f"{path} is not inside the folder of the data set")
        with open_image(path.read_bytes(), self.largest) as image:
            return image.convert("RGB")

    @torch.no_grad()
    def logits(self, prompt: Prompt) -> dict[str, Any]:
        """Digests of all inputs and of all logits ``[tokens, vocabulary]``, and the last token's logits (float32)."""
        inputs = self.inputs(prompt)
        logits = self.model(**inputs, use_cache=False).logits[0]
        names = {name: digest(value) for name, value in inputs.items() if isinstance(value, Tensor)}
        return {"inputs": names, "logits": digest(logits), "last": logits[-1].float().cpu(), "tokens": len(logits)}

    @torch.no_grad()
    def answer(self, prompt: Prompt) -> str:
        """The greedy answer."""
        inputs = self.inputs(prompt)
        tokens = self.model.generate(**inputs, generation_config=self.generation)
        return self.processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bits."""
    data = tensor.detach().cpu().contiguous()
    state = hashlib.sha256(f"{data.dtype} {list(data.shape)}".encode())
    state.update(memoryview(data.reshape(-1).view(torch.uint8).numpy()))
    return state.hexdigest()
