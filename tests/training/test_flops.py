"""Our FLOP counts against torch's counter over the Hugging Face model."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_vl.config import ModelConfig
from megatron_vl.data.assemble import pack_row
from megatron_vl.data.pixels import read_pixel_norm
from megatron_vl.models.families import read_spec
from megatron_vl.training.flops import language_forward, row_flops, vision_forward
from toolkit.parity.batches import make_sample
from toolkit.parity.reference import hf_inputs


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("kind", ["text", "two_images", "mixed"])
def test_forward_equals_counted(tiny_checkpoint, family: str, kind: str) -> None:
    """Eager attention computes the whole square, so the causal half that we leave out is added for the comparison."""
    from transformers import AutoModelForImageTextToText

    hf = tiny_checkpoint(family, dtype=torch.float32)
    spec, norm = read_spec(hf), read_pixel_norm(hf)
    model = AutoModelForImageTextToText.from_pretrained(hf, dtype=torch.float32, attn_implementation="eager")
    sample = make_sample(kind, spec, 0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**hf_inputs(sample, spec, norm), use_cache=False)
    row = pack_row([sample], spec, len(sample))
    m = spec.language
    ours = language_forward(m, [len(sample)]) + m.num_layers * 2 * m.num_heads * m.head_dim * len(sample) ** 2
    if sample.media:
        ours += sum(
            vision_forward(spec.vision, row.vision.cu_seqlens.diff().tolist(), row.vision.cu_window_seqlens.diff().tolist())
        )
    # transformers computes rotary angles as a matrix product with an inner dimension of 1; nothing else may differ.
    rotary = 2 * 3 * len(sample) * m.head_dim // 2
    assert counter.get_total_flops() - ours == pytest.approx(rotary, abs=rotary)


def test_frozen_parts_cost_less(tiny_checkpoint) -> None:
    spec = read_spec(tiny_checkpoint("qwen2_5_vl"))
    lengths, full, window = [100, 50], [140], [64, 64, 12]
    everything = row_flops(spec, ModelConfig(), lengths, full, window)
    tower = row_flops(spec, ModelConfig(freeze_vision=True), lengths, full, window)
    both = row_flops(spec, ModelConfig(freeze_vision=True, freeze_merger=True), lengths, full, window)
    language = row_flops(spec, ModelConfig(freeze_language=True), lengths, full, window)
    blocks, merger = vision_forward(spec.vision, full, window)
    forward = language_forward(spec.language, lengths)
    assert everything.vision == pytest.approx(3 * (blocks + merger)) and everything.language == 3 * forward
    assert tower.vision == pytest.approx(blocks + 2 * merger) and tower.language == 3 * forward
    assert both.vision == pytest.approx(blocks + merger) and both.language == 3 * forward
    assert language.language == 2 * forward and language.vision == everything.vision


def test_documents_do_not_attend_to_each_other(tiny_checkpoint) -> None:
    m = read_spec(tiny_checkpoint("qwen2_5_vl")).language
    apart, joined = language_forward(m, [100, 100]), language_forward(m, [200])
    assert joined - apart == m.num_layers * 2 * m.num_heads * m.head_dim * (200**2 - 2 * 100**2)
