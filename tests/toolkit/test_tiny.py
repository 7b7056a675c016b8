"""A tiny checkpoint is a real one: transformers loads every part of it, with the written weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

CASES = [
    ("qwen2_vl", {"tied": True}),
    ("qwen2_5_vl", {"tied": False, "dtype": torch.float32}),
    ("qwen3_vl", {"tied": True}),
    ("qwen3_vl_moe", {"tied": True, "dense_layers": (1,)}),
    ("qwen3_5", {"tied": True}),
    ("qwen3_5_moe", {}),
]


@pytest.mark.parametrize(("family", "options"), CASES)
def test_transformers_loads_a_tiny_checkpoint(tiny_checkpoint, family, options):
    folder = tiny_checkpoint(family, **options)
    processor = AutoProcessor.from_pretrained(folder)
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), f"tensors missing, left over or of another shape: {report}"

    held = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            held |= {name: shard.get_tensor(name) for name in shard.keys()}
    assert ("lm_head.weight" in held) == (not options.get("tied", False))
    in_memory = family.startswith("qwen3")
    in_file = "model.visual.patch_embed.proj.weight" if in_memory else "visual.patch_embed.proj.weight"
    assert torch.equal(held[in_file], model.model.visual.patch_embed.proj.weight)
    if family == "qwen3_vl_moe":
        experts = model.model.language_model.layers[0].mlp.experts
        stored = held["model.language_model.layers.0.mlp.experts.down_proj"]
        assert stored.shape == (8, 48, 64) and torch.equal(stored.transpose(1, 2), experts.down_proj)

    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (100, 150, 3), dtype=np.uint8))
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    batch = processor(text=[text], images=[image], return_tensors="pt")
    assert (batch["input_ids"] == model.config.image_token_id).sum() == batch["image_grid_thw"].prod() // 4
    with torch.no_grad():
        assert torch.isfinite(model(**batch, labels=batch["input_ids"]).loss)
