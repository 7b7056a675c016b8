"""Videos in transformers follow the released models: its positions, and the text for its processors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_vl.data.sample.pixel_settings import read_pixel_norm
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.positions import GridTHW
from tests.data.helpers import positions_one_by_one, sample_of, spec_of
from toolkit.common.hf_loading import apply_video_prompt, follow_video_positions, load_hf_model
from toolkit.parity.random_samples import make_sample
from toolkit.parity.reference import hf_inputs, load_hf_for_training

LONG = GridTHW(6, 4, 4, "video", 3.75)
FAST = GridTHW(3, 4, 8, "video", 0.75)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(
    "parts", [[2, LONG, 1, GridTHW(1, 8, 4), 2, FAST, 3], [1, GridTHW(1, 4, 4), FAST, 4], [5]]
)
def test_positions_of_a_prompt(family: str, parts: list[Any]) -> None:
    spec = spec_of(family)
    sample = sample_of(spec, parts)
    grids = [item.grid_thw for item in sample.media_items]
    by_kind = {kind: [grid for grid in grids if grid.kind == kind] for kind in ("image", "video")}
    sizes = {f"{kind}_grid_thw": [[g.t, g.h, g.w] for g in found] for kind, found in by_kind.items()}
    model: Any = follow_video_positions(SimpleNamespace(model=SimpleNamespace()), spec)
    positions, delta = model.model.get_rope_index(
        sample.token_ids[None],
        mm_token_type_ids=torch.zeros_like(sample.token_ids[None]),
        **{name: torch.tensor(found) if found else None for name, found in sizes.items()},
        second_per_grid_ts=torch.tensor([g.second_per_grid for g in by_kind["video"]]),
        attention_mask=torch.ones_like(sample.token_ids[None]),
    )
    counted = positions_one_by_one(sample.token_ids, grids, spec)
    assert positions[:, 0].T.tolist() == counted
    assert len(sample) + int(delta) == max(map(max, counted)) + 1


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_generate_of_transformers_goes_on_after_the_largest_position(family: str, tiny_checkpoint) -> None:
    """Its cached logits, token by token, equal those of one pass with explicit positions."""
    hf = tiny_checkpoint(family, dtype=torch.float32)
    spec = read_spec(hf)
    sample = make_sample("video_between", spec, 3)
    inputs = hf_inputs([sample], spec, read_pixel_norm(hf))
    del inputs["position_ids"]

    model = follow_video_positions(load_hf_model(hf, torch.float32), spec)
    step = {"max_new_tokens": 4, "do_sample": False, "repetition_penalty": 1.0, "eos_token_id": None}
    done = model.generate(**inputs, **step, output_logits=True, return_dict_in_generate=True)
    new = done.sequences[0, len(sample) :]
    whole = torch.cat([sample.token_ids, new])
    positions = positions_one_by_one(whole, [item.grid_thw for item in sample.media_items], spec)

    plain = load_hf_for_training(hf).eval()
    media = {name: value for name, value in inputs.items() if "pixel" in name or "grid" in name}
    with torch.no_grad():
        logits = plain(
            input_ids=whole[None], position_ids=torch.tensor(positions).T[:, None], **media, use_cache=False
        ).logits[0]
    kept = torch.cat(done.logits)
    assert torch.allclose(logits[len(sample) - 1 : -1], kept, atol=2e-4, rtol=0)
    assert kept.argmax(-1).tolist() == new.tolist()


def test_tokens_around_a_video_are_removed_for_qwen3_vl() -> None:
    ends = {f"vision_{end}_token": f"<|vision_{end}|>" for end in ("start", "end")}
    processor = SimpleNamespace(video_token="<|video_pad|>", **ends)
    video, image = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("video", "image"))
    text = f"a{video}b{image}{video}c"
    assert apply_video_prompt(text, processor, spec_of("qwen3_vl")) == f"a<|video_pad|>b{image}<|video_pad|>c"
    assert apply_video_prompt(text, processor, spec_of("qwen2_5_vl")) == text
