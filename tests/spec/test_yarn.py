"""YaRN is read from every place of a config as transformers means it, never left out; others are refused."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron_vl.models.rotary_embedding import MultimodalRope, rotary_frequencies
from megatron_vl.spec.families import ConfigError, read_spec
from megatron_vl.spec.families.rope import YarnSpec, serving_config
from megatron_vl.spec.positions import GridTHW, mrope_positions, placeholder_runs
from tests.tiny import tiny_checkpoint

CONFIGS = Path(__file__).parents[1] / "hf_configs"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5"]
"""One of each form of a config; Qwen2-VL's is that of Qwen2.5-VL, and those with experts have no other."""


def config_of(family: str) -> dict[str, Any]:
    return json.loads((tiny_checkpoint(family) / "config.json").read_text())


def without_type(rope_fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rope_fields.items() if name not in ("type", "rope_type")}


def rope_config(family: str) -> tuple[dict, dict, dict]:
    """A config, the section with its text fields, and its rope fields, which are taken out."""
    config = config_of(family)
    text = config.get("text_config", config)
    return config, text, text.pop("rope_scaling", None) or text.pop("rope_parameters")


def with_places(family: str, places: dict[str, dict | None]) -> dict[str, Any]:
    """A config with other rope fields in some places, which add to those it had, but their type."""
    config, text, old = rope_config(family)
    text |= {name: value if value is None else without_type(old) | value for name, value in places.items()}
    return config


def transformers_rope(config: dict[str, Any]) -> Any:
    """The text model's rotary embedding in transformers, from a config as a folder has it."""
    family = config["model_type"]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    names = [name for name in vars(module) if name.endswith("RotaryEmbedding") and "Vision" not in name]
    return getattr(module, names[0])(AutoConfig.for_model(**config).get_text_config())


def test_frequencies_by_hand() -> None:
    """Head of 128, theta 1e6, factor 4, original length 32,768, as Qwen2.5-VL's model card gives it.

    A frequency i turns 32768 / (2 pi theta^(i/64)) times within the original length. 32 turns are at i = 64
    ln(32768 / 64 pi) / ln 1e6 = 23.6, so up to 23 nothing changes; 1 turn is at 39.7, so from 40 on angles
    are divided by 4. In the middle, 31 is 8 of 17 steps on the way.
    """
    spec = read_spec(
        CONFIGS / "Qwen2.5-VL-7B-Instruct.json", YARN | {"original_max_position_embeddings": 32768}
    )
    plain = torch.tensor([1e6 ** (-i / 64) for i in range(64)], dtype=torch.float64)
    got = rotary_frequencies(spec.language).double() / plain
    assert spec.language.yarn == YarnSpec(4.0, 32768, 0.1 * math.log(4) + 1)
    assert spec.language.yarn.ramp_bounds(128, 1e6) == (23, 40)
    torch.testing.assert_close(got[:24], torch.ones(24, dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(got[40:], torch.full((24,), 0.25, dtype=torch.float64), rtol=1e-6, atol=0)
    assert got[31].item() == pytest.approx(9 / 17 + 8 / 17 / 4, rel=1e-6)
    assert spec.language.query_scale == (128, pytest.approx(1.1386294361**2, rel=1e-9))


@pytest.mark.parametrize(
    "fields",
    [
        YARN,
        {"type": "yarn", "factor": 3.0},
        YARN | {"attention_factor": 1.5},
        YARN | {"beta_fast": 64, "beta_slow": 2.0},
        YARN | {"factor": 1.0, "beta_fast": None},
    ],
)
@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B-Instruct", "Qwen3.5-9B"])
def test_cosines_equal_those_of_transformers(name: str, fields: dict[str, Any]) -> None:
    """At positions of a video that goes on far beyond the original length: cos and sin, with the factor."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    text = config.get("text_config", config)
    place = next(place for place in ("rope_scaling", "rope_parameters") if text.get(place))
    text[place] = without_type(text[place]) | fields

    spec, reference = read_spec(config), transformers_rope(config)
    assert spec.language.yarn is not None
    assert spec.language.yarn.attention_factor == pytest.approx(reference.attention_scaling, rel=1e-6)
    torch.testing.assert_close(rotary_frequencies(spec.language), reference.inv_freq, rtol=1e-6, atol=0)

    merged = spec.vision.spatial_merge_size
    grid = GridTHW(120, 8 * merged, 12 * merged, kind="video", second_per_grid=60.0)
    runs = [[5, *[spec.video_token_id] * run.num_tokens(merged)] for run in placeholder_runs([grid], spec)]
    positions = mrope_positions(torch.tensor(sum(runs, [])), [grid], spec)
    # Some position passes the original length, except where time stands still in a frame group.
    positions = positions + spec.language.yarn.original_length
    angles = MultimodalRope(spec.language)(positions)[:, 0, 0]
    cos, sin = reference(torch.zeros(1), positions[:, None])
    factor = spec.language.yarn.attention_factor
    torch.testing.assert_close(angles.cos() * factor, cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(angles.sin() * factor, sin[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "places",
    [
        {"rope_scaling": YARN},
        {"rope_parameters": YARN},
        {"rope_scaling": {}, "rope_parameters": YARN},
        {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": YARN},
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "type": "mrope"}},
        {"rope_scaling": YARN, "rope_parameters": YARN | {"type": "yarn"}},
        {"top": {"rope_scaling": YARN}},
        {"top": {"rope_parameters": YARN}},
    ],
    ids=lambda places: " ".join(f"{name}:{value.get('rope_type', '-')}" for name, value in places.items()),
)
def test_yarn_counts_in_every_place(family: str, places: dict[str, dict]) -> None:
    """Also where transformers would not read it; an export says it in the place that counts."""
    config = with_places(family, {} if "top" in places else places)
    if top := places.get("top"):
        config, text, old = rope_config(family)
        text["rope_parameters"] = old if text is not config else without_type(old) | YARN
        config |= top if text is not config else {}
    spec = read_spec(config)
    assert spec.language.yarn == YarnSpec(4.0, 4096, 0.1 * math.log(4) + 1)

    served = serving_config(config, spec.language.rope_fields)
    assert read_spec(served).language == spec.language
    reference = transformers_rope(served)
    torch.testing.assert_close(rotary_frequencies(spec.language), reference.inv_freq, rtol=1e-6, atol=0)
    assert reference.attention_scaling == pytest.approx(spec.language.yarn.attention_factor)
    assert serving_config(served, spec.language.rope_fields) is served


OTHER_TYPE = r"rope type '\w+' in .*rope_\w+\.(rope_)?type is not supported"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, OTHER_TYPE),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": {}}, OTHER_TYPE),
        ({"rope_scaling": {"type": "longrope"}}, OTHER_TYPE),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, "factor is"),
        ({"rope_scaling": YARN | {"beta_fast": 16}, "rope_parameters": YARN}, "beta_fast is"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 7.0}}, "rope_theta is"),
        ({"rope_scaling": {}, "rope_parameters": {"mrope_section": [20, 22, 22]}}, "mrope_section is .* in "),
        ({"rope_scaling": {}, "rope_parameters": {"mrope_interleaved": 0.5}}, "mrope_interleaved is .* in "),
        ({"rope_scaling": YARN | {"type": "mrope"}}, "make them equal, or remove type"),
        ({"rope_scaling": {"factor": 4.0}}, "set rope_type to yarn"),
        ({"rope_scaling": YARN | {"factor": None}}, "factor None of YaRN must be a number"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "number of at least 1"),
        ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 2}}, "must be at least beta_slow"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "whole number of at least 1"),
        ({"rope_scaling": YARN | {"orignal_length": 4096}}, "'orignal_length' of YaRN is not supported"),
        ({"rope_scaling": YARN | {"attn_factor": 1.3}}, "means an attention_factor of 1.48"),
    ],
)
def test_contradictions_and_other_types_are_refused(
    family: str, places: dict[str, dict], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(with_places(family, places))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(
    "places",
    [
        {"rope_scaling": {"type": "mrope", "rope_type": "default"}},  # as transformers 4.4x saves it
        {"rope_parameters": {"type": "default", "rope_type": "default"}},
        {"rope_scaling": {"type": "mrope"}, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": None, "rope_parameters": {}},
    ],
)
def test_usual_positions_are_read(family: str, places: dict[str, dict | None]) -> None:
    config = with_places(family, places)
    config["vision_config"]["rope_parameters"] = {"rope_type": "axial", "rope_theta": 10000.0}
    assert read_spec(config) == read_spec(tiny_checkpoint(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_original_length_stands_in_one_of_two_places(family: str) -> None:
    """As transformers reads it: the text fields first, and last the longest position of the model."""
    config, text, old = rope_config(family)
    text |= {"rope_parameters": old | {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 640}
    text["rope_parameters"].pop("type", None)
    assert read_spec(config).language.yarn.original_length == 640
    text["original_max_position_embeddings"] = 320
    assert read_spec(config).language.yarn.original_length == 320
    text["rope_parameters"]["original_max_position_embeddings"] = 640
    with pytest.raises(ConfigError, match="is 320 in the text fields, but 640 in the rope fields"):
        read_spec(config)


def test_rope_scaling_of_a_run_replaces_that_of_the_config() -> None:
    config = config_of("qwen3_5")
    with_yarn = read_spec(config, YARN)
    assert with_yarn.language.yarn == YarnSpec(4.0, 4096, 0.1 * math.log(4) + 1)
    assert with_yarn.different_fields(read_spec(config)) == []

    # Nothing of the old YaRN stays.
    again = read_spec(read_spec(config, YARN | {"beta_fast": 64.0}).hf_config, YARN | {"factor": 2.0})
    assert again.language.yarn == YarnSpec(2.0, 4096, 0.1 * math.log(2) + 1)
    without = read_spec(with_yarn.hf_config, {"rope_type": "default"})
    assert without.language == read_spec(config).language


@pytest.mark.parametrize(
    ("rope_scaling", "message"),
    [
        ({"factor": 4.0}, "set rope_type to yarn"),
        (YARN | {"facter": 4.0}, "field 'facter' of YaRN is not supported; valid: rope_type, factor"),
        (YARN | {"rope_theta": 3.0}, "rope_theta 3.0 differs from"),
        (YARN | {"mrope_section": [1, 1, 2]}, "mrope_section .* differs from"),
        ({"rope_type": "linear", "factor": 2.0}, "rope type 'linear'"),
        (YARN | {"attention_factor": 0}, "attention_factor 0 of YaRN must be a number above 0"),
    ],
)
def test_wrong_rope_scaling_is_refused_by_its_name(rope_scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.rope_scaling: .*{message}|^{message}"):
        read_spec(tiny_checkpoint("qwen3_5"), rope_scaling)


def test_serving_config_speaks_to_vllm_too() -> None:
    """vLLM multiplies 0.1 ln(factor) + 1 by attn_factor, and knows no attention_factor."""
    config = config_of("qwen3_vl")
    spec = read_spec(config, YARN | {"attention_factor": 1.5})
    served = serving_config(config, spec.language.rope_fields)["text_config"]["rope_scaling"]
    assert served["attention_factor"] == 1.5
    assert served["attn_factor"] * (0.1 * math.log(4) + 1) == pytest.approx(1.5, rel=1e-12)
    assert "type" not in served and served["rope_type"] == "yarn"

    # A training with fewer fields of YaRN than the folder has.
    plain = read_spec(config, YARN)
    for other in (YARN | {"attention_factor": 1.5}, YARN | {"beta_fast": 64.0}):
        again = serving_config(read_spec(config, other).hf_config, plain.language.rope_fields)
        assert read_spec(again).language == plain.language

    # A training without YaRN on a folder with it.
    without = serving_config(spec.hf_config, read_spec(config).language.rope_fields)
    assert read_spec(without).language.yarn is None
    assert serving_config(config, read_spec(config).language.rope_fields) is config
