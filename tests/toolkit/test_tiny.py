"""A tiny checkpoint is a real one: transformers loads every part of it, with the written weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import LayoutError, check_tensor_parallel
from toolkit.common.tiny_checkpoint import SPECIAL_TOKENS, write_tiny_checkpoint

CASES = [
    ("qwen2_vl", {"tied": True}),
    ("qwen2_5_vl", {"tied": False, "dtype": torch.float32}),
    ("qwen2_5_vl", {"tied": True}),
    ("qwen3_vl", {"tied": True}),
    ("qwen3_vl", {"dtype": torch.float32}),
    ("qwen3_vl_moe", {}),
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


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def test_special_tokens_and_config_agree(tiny_checkpoint, family):
    folder = tiny_checkpoint(family)
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    config = json.loads((folder / "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    assert tokenizer.is_fast
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == config["image_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|video_pad|>") == config["video_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|vision_start|>") == config["vision_start_token_id"]
    assert len(tokenizer) < vocabulary and vocabulary % 128 == 0
    text = "Ça va? 1234 \n\n naïve 图片 don't"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    first = config.get("text_config", config)["bos_token_id"]
    assert tokenizer("".join(SPECIAL_TOKENS))["input_ids"] == [first + i for i in range(len(SPECIAL_TOKENS))]


def test_tiny_checkpoint_keeps_the_oddities(tiny_checkpoint):
    spec = read_spec(tiny_checkpoint("qwen2_5_vl"))
    assert spec.vision.ffn_hidden_size % 2 == 1 and spec.language.num_kv_heads < spec.language.num_heads
    assert {spec.vision.is_full_attention(i) for i in range(spec.vision.num_layers)} == {True, False}
    check_tensor_parallel(spec, 4)
    with pytest.raises(LayoutError, match="heads"):
        check_tensor_parallel(spec, 8)


def test_tiny_checkpoint_refuses_what_it_cannot_write(tmp_path):
    with pytest.raises(ValueError, match="qwen2_5_vl"):
        write_tiny_checkpoint(tmp_path / "a", "llama")
    write_tiny_checkpoint(tmp_path / "b")
    with pytest.raises(FileExistsError, match="another folder"):
        write_tiny_checkpoint(tmp_path / "b")
