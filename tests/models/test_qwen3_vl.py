"""Compares the parts of Qwen3-VL with transformers' own functions, and checks its config."""

import json

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from megatron_vl.models.rotary_embedding import MultimodalRope
from megatron_vl.models.vision import PositionTable
from megatron_vl.spec.families import ConfigError, read_spec
from megatron_vl.spec.positions import GridTHW, patch_positions


@pytest.mark.parametrize("side", [6, 48])
def test_position_table_is_interpolated_as_in_transformers(side: int) -> None:
    grids = [GridTHW(*sides) for sides in ((1, 2, 2), (1, 48, 48), (2, 6, 10), (1, 2, 100), (1, 64, 4))]
    table = PositionTable(side, 5, torch.float32)
    torch.nn.init.normal_(table.weight)
    thw = torch.tensor([[g.t, g.h, g.w] for g in grids])
    options = {"mode": "bilinear", "align_corners": True, "spatial_merge_size": 2}
    index, weight = get_vision_interpolation_indices_and_weights(thw, side, **options)

    want = (table.weight[index] * weight[:, :, None]).sum(1)
    place = torch.cat([patch_positions(grid, 2) for grid in grids]).int()
    frame = torch.cat([torch.tensor([[g.h, g.w]]).expand(g.num_patches, 2) for g in grids]).int()
    torch.testing.assert_close(table(place, frame), want, rtol=0, atol=2e-6)
    draw = torch.randn(want.shape)
    ours, theirs = (
        torch.autograd.grad((x * draw).sum(), table.weight)[0] for x in (table(place, frame), want)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("section", [(6, 3, 3), (4, 4, 4), (2, 5, 5)])
def test_frequencies_take_turns_as_in_transformers(tiny_checkpoint, section: tuple[int, int, int]) -> None:
    folder = tiny_checkpoint("qwen3_vl", interleaved_section=section)
    config = AutoConfig.from_pretrained(folder).text_config
    positions = torch.randint(0, 500, (3, 1, 40), generator=torch.Generator().manual_seed(0))
    cos, _ = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), positions)
    angles = MultimodalRope(read_spec(folder).language)(positions)
    torch.testing.assert_close(angles[:, 0, 0].cos(), cos[0], rtol=0, atol=1e-4)


def test_fewer_layers_keep_the_deepstack_layers_that_fit(tiny_checkpoint) -> None:
    spec = read_spec(tiny_checkpoint("qwen3_vl"))
    assert spec.vision.deepstack_layers == (0, 1, 3)
    assert spec.replace_layers(num_vision_layers=3).vision.deepstack_layers == (0, 1)
    assert spec.replace_layers(num_language_layers=1).vision.deepstack_layers == (0,)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("vision", {"deepstack_visual_indexes": [1, 4]}, "must ascend and be below 4"),
        ("vision", {"num_position_embeddings": 35}, "not the square"),
        ("vision", {"hidden_act": "tanh"}, "vision hidden_act 'tanh' is not supported"),
        ("text", {"num_hidden_layers": 2}, "3 DeepStack layers need as many decoder layers; there are 2"),
        ("text", {"attention_bias": True}, "attention_bias=true"),
        ("text", {"head_dim": 16}, "add up to head_dim/2 = 8"),
    ],
)
def test_impossible_fields_are_refused(tiny_checkpoint, part: str, change: dict, message: str) -> None:
    config = json.loads((tiny_checkpoint("qwen3_vl") / "config.json").read_text())
    config[f"{part}_config"] |= change
    with pytest.raises(ConfigError, match=message):
        read_spec(config)
