"""A field that a config.json leaves out is read as transformers' config classes read it, or refused."""

import copy
import json
from functools import reduce
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_vl.spec.families import ConfigError, ModelSpec, read_spec

CONFIGS = Path(__file__).parents[1] / "hf_configs"
DENSE = ["Qwen2-VL-72B", "Qwen2.5-VL-3B", "Qwen3-VL-2B", "Qwen3.5-0.8B"]
RELEASED = [*DENSE, "Qwen3-VL-30B-A3B", "Qwen3.5-35B-A3B"]


def released(name: str) -> dict[str, Any]:
    file = name if name.startswith(("Qwen3.5", "Qwen3.6")) else f"{name}-Instruct"
    return json.loads((CONFIGS / f"{file}.json").read_text())


TEXT_NAMES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
VISION_NAMES = {
    "num_layers": "depth",
    **{name: name for name in ("num_heads", "patch_size", "temporal_patch_size", "spatial_merge_size")},
    "in_channels": "in_channels",
}
VISION_SIZES = {
    "hidden_size": "hidden_size",
    "out_hidden_size": "out_hidden_size",
    "ffn_hidden_size": "intermediate_size",
}
MOE_NAMES = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "ffn_hidden_size": "moe_intermediate_size",
    "aux_loss_coef": "router_aux_loss_coef",
}
LINEAR_NAMES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
"""For our names, those of transformers."""


def named(section: str, config: Any, names: dict[str, str]) -> dict[str, Any]:
    return {f"{section}.{ours}": getattr(config, theirs) for ours, theirs in names.items()}


def by_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """What the config means to transformers, with our names."""
    hf, family = AutoConfig.for_model(**copy.deepcopy(config)), config["model_type"]
    text, vision, rope = hf.text_config, hf.vision_config, hf.text_config.rope_parameters
    found = {
        **named("language", text, TEXT_NAMES),
        **named("vision", vision, VISION_NAMES),
        "language.ffn_hidden_size": getattr(text, "intermediate_size", 0),
        "language.head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        "language.rope_theta": rope["rope_theta"],
        "language.mrope_section": tuple(rope.get("mrope_section", ())),
        "language.tied_embeddings": hf.tie_word_embeddings,
        "initializer_range": text.initializer_range,
    }
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    found |= {name: getattr(hf, name) for name in tokens}

    if family == "qwen2_vl":
        found |= named("vision", vision, {"hidden_size": "embed_dim", "out_hidden_size": "hidden_size"})
        found["vision.ffn_hidden_size"] = int(vision.embed_dim * vision.mlp_ratio)
    else:
        found |= named("vision", vision, VISION_SIZES)
    if family == "qwen2_5_vl":
        names = ("window_size", "tokens_per_second")
        found |= named("vision", vision, dict(zip(names, names, strict=True)))
        found["vision.full_attention_layers"] = tuple(vision.fullatt_block_indexes)
    if family.startswith("qwen3"):
        found["vision.position_table_side"] = vision.num_position_embeddings**0.5
        found["vision.deepstack_layers"] = tuple(getattr(vision, "deepstack_visual_indexes", ()))
        found["vision.activation"] = {"gelu_pytorch_tanh": "gelu_tanh"}[vision.hidden_act]
    if family.startswith("qwen3_5"):
        found |= named("language.linear_attention", text, LINEAR_NAMES)
        found["language.rotary_fraction"] = rope["partial_rotary_factor"]
        linear = tuple(i for i, kind in enumerate(text.layer_types) if kind == "linear_attention")
        found["language.linear_attention.linear_layers"] = linear
    if family.endswith("moe"):
        found |= named("language.moe", text, MOE_NAMES)
    if family == "qwen3_5_moe":
        found["language.moe.shared_ffn_hidden_size"] = text.shared_expert_intermediate_size
    if family == "qwen3_vl_moe":
        step, dense = text.decoder_sparse_step, text.mlp_only_layers
        layers = range(text.num_hidden_layers)
        found["language.moe.dense_layers"] = tuple(i for i in layers if i in dense or (i + 1) % step)
    return found


def by_us(spec: ModelSpec, names: dict[str, Any]) -> dict[str, Any]:
    return {name: attrgetter(name)(spec) for name in names}


def fields(config: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all fields; the fields of a section come before the section itself."""
    found = []
    for name, value in config.items():
        if isinstance(value, dict):
            found += fields(value, (*path, name))
        found.append((*path, name))
    return found


def without(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    section = reduce(getitem, path[:-1], changed)
    del section[path[-1]]
    return changed


@pytest.mark.parametrize("name", RELEASED)
def test_absent_fields_have_the_defaults_of_transformers(name: str) -> None:
    config = released(name)
    assert by_us(read_spec(config), by_transformers(config)) == by_transformers(config)

    refused = []
    for path in set(fields(config)) - {("model_type",)}:
        changed = without(config, path)
        try:
            spec = read_spec(changed)
        except ConfigError as error:
            assert path[-1] in str(error), (path, str(error))
            refused.append(path[-1])
            continue
        theirs = by_transformers(changed)
        assert by_us(spec, theirs) == theirs, path

    # Sizes are refused; what the config classes say is followed.
    assert {"hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"} <= set(refused)
    assert not {"rms_norm_eps", "rope_theta", "tie_word_embeddings", "depth"} & set(refused)


@pytest.mark.parametrize("name", DENSE[1:])
@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
def test_tied_embeddings_in_either_place(name: str, outer: bool | None, inner: bool | None) -> None:
    config = released(name)
    if not isinstance(config.get("text_config"), dict):  # as transformers 5 saves it
        vision = config["vision_config"]
        text = {name: value for name, value in config.items() if name not in ("vision_config", "model_type")}
        config = {"model_type": config["model_type"], "vision_config": vision, "text_config": text}
    for section, value in ((config, outer), (config["text_config"], inner)):
        section.pop("tie_word_embeddings", None)
        if value is not None:
            section["tie_word_embeddings"] = value
    assert read_spec(config).language.tied_embeddings == by_transformers(config)["language.tied_embeddings"]
