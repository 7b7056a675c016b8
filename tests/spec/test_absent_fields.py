"""A field that a config.json leaves out is read as transformers' config classes read it, or refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_vl.spec.families import ConfigError, ModelSpec, read_spec

CONFIGS = Path(__file__).parents[1] / "hf_configs"
RELEASED = [
    *("Qwen2-VL-72B", "Qwen2.5-VL-3B", "Qwen3-VL-2B", "Qwen3-VL-30B-A3B", "Qwen3.5-0.8B", "Qwen3.5-35B-A3B")
]


def released(name: str) -> dict[str, Any]:
    file = name if name.startswith(("Qwen3.5", "Qwen3.6")) else f"{name}-Instruct"
    return json.loads((CONFIGS / f"{file}.json").read_text())


def by_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """What the config means to transformers, with our names."""
    hf = AutoConfig.for_model(**copy.deepcopy(config))
    text = hf.text_config
    vision = hf.vision_config
    rope = hf.text_config.rope_parameters
    third = config["model_type"].startswith("qwen3")
    hybrid = config["model_type"].startswith("qwen3_5")
    found = {
        "language.hidden_size": text.hidden_size,
        "language.num_layers": text.num_hidden_layers,
        "language.ffn_hidden_size": getattr(text, "intermediate_size", 0),
        "language.num_heads": text.num_attention_heads,
        "language.num_kv_heads": text.num_key_value_heads,
        "language.head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        "language.vocab_size": text.vocab_size,
        "language.norm_eps": text.rms_norm_eps,
        "language.rope_theta": rope["rope_theta"],
        "language.mrope_section": tuple(rope.get("mrope_section", ())),
        "language.tied_embeddings": hf.tie_word_embeddings,
        "vision.num_layers": vision.depth,
        "vision.num_heads": vision.num_heads,
        "vision.patch_size": vision.patch_size,
        "vision.temporal_patch_size": vision.temporal_patch_size,
        "vision.spatial_merge_size": vision.spatial_merge_size,
        "vision.in_channels": vision.in_channels,
        "image_token_id": hf.image_token_id,
        "video_token_id": hf.video_token_id,
        "vision_start_token_id": hf.vision_start_token_id,
        "vision_end_token_id": hf.vision_end_token_id,
        "initializer_range": text.initializer_range,
    }

    if config["model_type"] == "qwen2_vl":
        sizes = {"hidden_size": vision.embed_dim, "out_hidden_size": vision.hidden_size}
        sizes["ffn_hidden_size"] = int(vision.embed_dim * vision.mlp_ratio)
    else:
        names = ("hidden_size", "out_hidden_size")
        sizes = {name: getattr(vision, name) for name in names} | {
            "ffn_hidden_size": vision.intermediate_size
        }

    found |= {f"vision.{name}": value for name, value in sizes.items()}
    if config["model_type"] == "qwen2_5_vl":
        found |= {
            "vision.window_size": vision.window_size,
            "vision.tokens_per_second": vision.tokens_per_second,
        }
        found["vision.full_attention_layers"] = tuple(vision.fullatt_block_indexes)

    if third:
        found["vision.position_table_side"] = vision.num_position_embeddings**0.5
        found["vision.deepstack_layers"] = () if hybrid else tuple(vision.deepstack_visual_indexes)
        found["vision.activation"] = {"gelu_pytorch_tanh": "gelu_tanh"}[vision.hidden_act]

    if hybrid:
        found |= {
            "language.rotary_fraction": rope["partial_rotary_factor"],
            "language.linear_attention.key_heads": text.linear_num_key_heads,
            "language.linear_attention.value_heads": text.linear_num_value_heads,
            "language.linear_attention.key_dim": text.linear_key_head_dim,
            "language.linear_attention.value_dim": text.linear_value_head_dim,
            "language.linear_attention.conv_width": text.linear_conv_kernel_dim,
            "language.linear_attention.linear_layers": tuple(
                i for i, kind in enumerate(text.layer_types) if kind == "linear_attention"
            ),
        }

    if config["model_type"] == "qwen3_5_moe":
        found |= {
            "language.moe.num_experts": text.num_experts,
            "language.moe.top_k": text.num_experts_per_tok,
            "language.moe.ffn_hidden_size": text.moe_intermediate_size,
            "language.moe.shared_ffn_hidden_size": text.shared_expert_intermediate_size,
            "language.moe.aux_loss_coef": text.router_aux_loss_coef,
        }

    if config["model_type"] == "qwen3_vl_moe":
        found |= {
            "language.moe.num_experts": text.num_experts,
            "language.moe.top_k": text.num_experts_per_tok,
            "language.moe.ffn_hidden_size": text.moe_intermediate_size,
            "language.moe.aux_loss_coef": text.router_aux_loss_coef,
            "language.moe.dense_layers": tuple(
                i
                for i in range(text.num_hidden_layers)
                if i in text.mlp_only_layers or (i + 1) % text.decoder_sparse_step
            ),
        }

    return found


def by_us(spec: ModelSpec, names: dict[str, Any]) -> dict[str, Any]:
    def value(name: str) -> Any:
        found: Any = spec
        for part in name.split("."):
            found = getattr(found, part)
        return found

    return {name: value(name) for name in names}


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
    section = changed
    for name in path[:-1]:
        section = section[name]
    del section[path[-1]]
    return changed


@pytest.mark.parametrize("name", RELEASED)
def test_absent_fields_have_the_defaults_of_transformers(name: str) -> None:
    config = released(name)
    assert by_us(read_spec(config), by_transformers(config)) == by_transformers(config)

    refused = []
    for path in fields(config):
        if path == ("model_type",):
            continue
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


@pytest.mark.parametrize("name", ["Qwen2.5-VL-3B", "Qwen3-VL-2B", "Qwen3.5-0.8B"])
@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
def test_tied_embeddings_in_either_place(name: str, outer: bool | None, inner: bool | None) -> None:
    config = released(name)
    if not isinstance(config.get("text_config"), dict):  # as transformers 5 saves it
        vision = config["vision_config"]
        kept = {
            k: v for k, v in config.items() if k not in ("vision_config", "model_type", "tie_word_embeddings")
        }
        config = {"model_type": config["model_type"], "vision_config": vision, "text_config": kept}
    for section, value in ((config, outer), (config["text_config"], inner)):
        section.pop("tie_word_embeddings", None)
        if value is not None:
            section["tie_word_embeddings"] = value
    assert read_spec(config).language.tied_embeddings == by_transformers(config)["language.tied_embeddings"]


def test_rope_fields_are_read_under_both_names() -> None:
    """If a config has both, transformers takes the older one. Serving engines may not, so they must agree."""
    config = released("Qwen3-VL-8B")
    text = config["text_config"]
    text["rope_parameters"] = text["rope_scaling"] | {"rope_theta": text["rope_theta"]}
    theirs = by_transformers(config)
    assert by_us(read_spec(config), theirs) == theirs

    for name, value in (("rope_theta", 7.0), ("mrope_section", [20, 22, 22]), ("mrope_interleaved", False)):
        other = json.loads(json.dumps(config))
        other["text_config"]["rope_parameters"][name] = value
        with pytest.raises(ConfigError, match=f"{name} is .* in text_config.rope_parameters, but"):
            read_spec(other)
