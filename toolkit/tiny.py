"""Writes small Hugging Face checkpoints with the real architecture, for the demo, the tests and dry runs.

A folder has the files of a released checkpoint: a config (flat, or nested since Qwen3-VL), sharded
safetensors with the released names, a trained byte-level BPE tokenizer with Qwen's special tokens, a chat
template, an image processor and generation settings. Only the sizes are small. Structural oddities are kept:
grouped queries, window and full vision layers, a vision FFN width that no tensor parallel size divides,
M-RoPE sections of different lengths, more embedding rows than tokens, and stacks of experts with their input
dimension first.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families for which a tiny checkpoint can be written."""
NESTED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families released with a nested config, and with the tensor names that transformers uses in memory."""
HYBRID = ("qwen3_5", "qwen3_5_moe")
"""Families with linear attention."""
FLOAT32 = (".linear_attn.A_log", ".linear_attn.norm.weight")
"""Suffixes of the names of Qwen3.5's float32 tensors; the other tensors may have another type."""
CLASSES = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
"""The classes of transformers for the families with a nested config."""

SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
"""Added tokens of Qwen2-VL in the order of their ids (from 151643 in the released vocabulary)."""

# Qwen2's pre-tokenizer, as in transformers' Qwen2Tokenizer: single digits, words with their leading space.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

DEFAULT_TEXTS = (
    "A cat sits on a table next to a cup of coffee and looks at the camera.",
    "What is in this picture? Describe the image in one sentence. How many people are there?",
    "The first image shows a rocket on its launch pad, the second one shows an astronaut in a space suit.",
    "user assistant system You are a helpful assistant. The video shows a road. 0 1 2 3 4 5 6 7 8 9",
)
"""Text on which the tokenizer is trained if none is given."""


@dataclass(frozen=True)
class TinySizes:
    """Sizes of a tiny model; the defaults keep every structural oddity of the released models."""

    hidden_size: int = 64
    layers: int = 4
    ffn_hidden_size: int = 176
    heads: int = 4
    kv_heads: int = 2
    mrope_section: tuple[int, int, int] = (2, 3, 3)
    """The sum must be half of the head dimension ``hidden_size / heads``."""
    vision_hidden_size: int = 80
    """Head dimension 20 with four heads: like the released 80, a multiple of 4 but not a power of two."""
    vision_layers: int = 4
    vision_heads: int = 4
    vision_ffn_hidden_size: int = 107
    """Qwen2.5-VL only; odd, so that no tensor parallel size divides it (released: 3420). In Qwen2-VL, this is
    4 * ``vision_hidden_size``."""
    full_attention_layers: tuple[int, ...] = (1, 3)
    """Qwen2.5-VL only: vision layers that do not attend in windows."""
    head_dim: int = 24
    """Qwen3-VL only: head dimension of the language model, not ``hidden_size / heads`` as in the others."""
    interleaved_section: tuple[int, int, int] = (6, 3, 3)
    """Qwen3-VL only: the sum must be half of ``head_dim``."""
    position_table_side: int = 6
    """Qwen3-VL only: smaller than some grids and larger than others (released: 48)."""
    deepstack_layers: tuple[int, ...] = (0, 1, 3)
    """Qwen3-VL only: vision layers whose output goes to the first decoder layers."""
    experts: int = 8
    """Qwen3-VL-MoE only, like the fields below."""
    experts_per_token: int = 2
    expert_ffn_hidden_size: int = 48
    """Neither ``hidden_size`` nor half of it: a square matrix does not show the order of its dimensions."""
    dense_layers: tuple[int, ...] = ()
    """Decoder layers without experts (released: none)."""
    shared_ffn_hidden_size: int = 40
    """Qwen3.5-MoE only: width of the shared expert (released: that of the others)."""
    hybrid_head_dim: int = 32
    """Qwen3.5 only, like the fields below: head dimension of softmax attention; a quarter of it rotates."""
    hybrid_section: tuple[int, int, int] = (2, 1, 1)
    """The sum must be an eighth of ``hybrid_head_dim``."""
    linear_key_heads: int = 4
    linear_value_heads: int = 8
    linear_key_dim: int = 24
    linear_value_dim: int = 12
    """Unlike the released models, different from ``linear_key_dim``: a transposed square state would go
    unnoticed."""
    full_attention_layers_of: int = 4
    """One decoder layer in this many has softmax attention: the last of each group."""
    text_vocab_size: int = 400
    """Largest number of byte-pair tokens. Special tokens are added, and the embedding is rounded up to a
    multiple of 128."""
    min_pixels: int = 3136
    max_pixels: int = 12845056


def write_tiny_checkpoint(
    folder: str | Path,
    family: str = "qwen2_5_vl",
    *,
    tied: bool = False,
    released_style: bool = True,
    memory_names: bool = False,
    seed: int = 0,
    texts: Iterable[str] = DEFAULT_TEXTS,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 2,
    sizes: TinySizes | None = None,
    **overrides: Any,
) -> Path:
    """Writes a small checkpoint of ``family`` with random weights and returns its folder.

    Args:
        tied: input and output embeddings are one tensor, as in the 2B and 3B models; there is no
            ``lm_head.weight``.
        released_style: flat config, preprocessor and tokenizer files, and stacks of experts with the input
            dimension first, as in the released folders; False: the files that ``save_pretrained`` of the
            installed transformers writes (5.x nests the config but keeps the released names, and puts the
            experts' output dimension first).
        memory_names: name tensors ``model.visual.*`` and ``model.language_model.*``, as transformers >= 4.52
            holds them in memory and some tools save them; False: ``visual.*`` and ``model.*``.
        texts: texts to train the tokenizer on.
        shards: number of safetensors files.
        sizes, overrides: a :class:`TinySizes`, or its fields by name.

    Raises:
        ValueError: the family is unknown.
        FileExistsError: the folder already holds a checkpoint.
    """
    if family not in FAMILIES:
        raise ValueError(f"there is no tiny checkpoint of family {family!r}; valid: {', '.join(FAMILIES)}")

    folder = Path(folder)
    if (folder / "config.json").exists():
        raise FileExistsError(f"{folder} already holds a checkpoint; give another folder")

    folder.mkdir(parents=True, exist_ok=True)
    sizes = sizes or TinySizes(**overrides)
    vocabulary, merges = train_bpe(tuple(texts), sizes.text_vocab_size)
    config = tiny_config(family, sizes, text_tokens=len(vocabulary), tied=tied, dtype=dtype)
    model = random_model(config, seed, dtype)

    if released_style:
        _write_processor(folder, family, sizes, vocabulary, merges)
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", _generation(config))
    else:
        _save_pretrained(folder, model, family, sizes, vocabulary, merges)
        for file in folder.glob("*.safetensors"):
            file.unlink()

    tensors = {name: t for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    if not (memory_names or family in NESTED):  # the released Qwen3-VL uses the in-memory names
        tensors = {_released_name(name): t for name, t in tensors.items()}
    if released_style and family == "qwen3_vl_moe":
        tensors = {name: t.transpose(1, 2) if ".mlp.experts." in name else t for name, t in tensors.items()}
    if released_style and family in HYBRID:
        tensors |= prediction_tensors(config, seed)

    _write_shards(folder, tensors, shards)
    return folder


def tiny_config(
    family: str, sizes: TinySizes, *, text_tokens: int, tied: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """Makes the released ``config.json``: flat for Qwen2-VL and Qwen2.5-VL, nested for the others."""
    if family in NESTED:
        return _nested_config(family, sizes, text_tokens, tied, dtype)

    ids = {token: text_tokens + i for i, token in enumerate(SPECIAL_TOKENS)}
    used = text_tokens + len(SPECIAL_TOKENS)
    return {
        "architectures": [
            (
                "Qwen2VLForConditionalGeneration"
                if family == "qwen2_vl"
                else "Qwen2_5_VLForConditionalGeneration"
            )
        ],
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": sizes.ffn_hidden_size,
        "max_position_embeddings": 32768,
        "max_window_layers": sizes.layers,
        "model_type": family,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "transformers_version": "4.41.2",
        "use_cache": True,
        "use_sliding_window": False,
        "vision_config": _flat_tower(family, sizes),
        "rope_scaling": {"type": "mrope", "mrope_section": list(sizes.mrope_section)},
        "vocab_size": (used // 128 + 1) * 128,
    }


def _flat_tower(family: str, sizes: TinySizes) -> dict[str, Any]:
    """The ``vision_config`` of Qwen2-VL and Qwen2.5-VL."""
    tower: dict[str, Any] = {
        "depth": sizes.vision_layers,
        "num_heads": sizes.vision_heads,
        "in_chans": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    }

    if family == "qwen2_vl":
        tower |= {"embed_dim": sizes.vision_hidden_size, "mlp_ratio": 4, "hidden_size": sizes.hidden_size}
    else:
        tower |= {
            "hidden_act": "silu",
            "hidden_size": sizes.vision_hidden_size,
            "intermediate_size": sizes.vision_ffn_hidden_size,
            "out_hidden_size": sizes.hidden_size,
            "window_size": 112,
            "fullatt_block_indexes": list(sizes.full_attention_layers),
            "tokens_per_second": 2,
        }

    return tower


def _nested_config(
    family: str, sizes: TinySizes, text_tokens: int, tied: bool, dtype: torch.dtype
) -> dict[str, Any]:
    ids = {token: text_tokens + i for i, token in enumerate(SPECIAL_TOKENS)}
    text = _nested_text(family, sizes, ids, dtype)
    return {
        "architectures": [CLASSES[family]],
        "image_token_id": ids["<|image_pad|>"],
        "model_type": family,
        "text_config": text | ({"tie_word_embeddings": True} if tied else {}),
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": _nested_tower(family, sizes),
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def _nested_text(family: str, sizes: TinySizes, ids: dict[str, int], dtype: torch.dtype) -> dict[str, Any]:
    """The ``text_config`` of the families since Qwen3-VL; ``ids`` are those of the special tokens."""
    used = max(ids.values()) + 1
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": ids["<|im_end|>"],
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": sizes.ffn_hidden_size,
        "max_position_embeddings": 262144,
        "model_type": f"{family}_text",
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": 1e-06,
        "use_cache": True,
        "vocab_size": (used // 128 + 1) * 128,
    }

    if family in HYBRID:
        text |= _linear_attention(sizes)
    else:
        text |= {
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": list(sizes.interleaved_section),
                "rope_type": "default",
            },
            "rope_theta": 5000000,
        }

    if family == "qwen3_5_moe":
        del text["intermediate_size"]
        text |= {
            "mlp_only_layers": [],
            "moe_intermediate_size": sizes.expert_ffn_hidden_size,
            "num_experts": sizes.experts,
            "num_experts_per_tok": sizes.experts_per_token,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": sizes.shared_ffn_hidden_size,
        }

    if family == "qwen3_vl_moe":
        text |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(sizes.dense_layers),
            "moe_intermediate_size": sizes.expert_ffn_hidden_size,
            "norm_topk_prob": True,
            "num_experts": sizes.experts,
            "num_experts_per_tok": sizes.experts_per_token,
        }

    return text


def _nested_tower(family: str, sizes: TinySizes) -> dict[str, Any]:
    """The ``vision_config`` of the families since Qwen3-VL."""
    return {
        "deepstack_visual_indexes": [] if family in HYBRID else list(sizes.deepstack_layers),
        "depth": sizes.vision_layers,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": sizes.vision_hidden_size,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": sizes.vision_ffn_hidden_size,
        "model_type": family,
        "num_heads": sizes.vision_heads,
        "num_position_embeddings": sizes.position_table_side**2,
        "out_hidden_size": sizes.hidden_size,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _linear_attention(sizes: TinySizes) -> dict[str, Any]:
    """The fields of Qwen3.5's text config that Qwen3-VL lacks or sets to other values."""
    interval = sizes.full_attention_layers_of
    layer_types = [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(sizes.layers)
    ]

    return {
        "attn_output_gate": True,
        "full_attention_interval": interval,
        "head_dim": sizes.hybrid_head_dim,
        "layer_types": layer_types,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": sizes.linear_key_dim,
        "linear_num_key_heads": sizes.linear_key_heads,
        "linear_num_value_heads": sizes.linear_value_heads,
        "linear_value_head_dim": sizes.linear_value_dim,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": list(sizes.hybrid_section),
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    }


def prediction_tensors(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Makes some tensors of multi-token prediction, which released Qwen3.5 has in addition to the model."""
    width = config["text_config"]["hidden_size"]
    generator = torch.Generator().manual_seed(seed + 1)
    shapes = {"fc.weight": (width, 2 * width), "norm.weight": (width,), "pre_fc_norm_hidden.weight": (width,)}
    return {
        f"mtp.{name}": torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def random_model(config: dict[str, Any], seed: int, dtype: torch.dtype) -> torch.nn.Module:
    """Makes the transformers model of a config with random parameters.

    Biases and norms are random too, so that a test notices if one is lost.
    """
    import transformers

    model_class = getattr(transformers, config["architectures"][0])
    fields = {
        name: value for name, value in config.items() if name not in ("architectures", "transformers_version")
    }
    # transformers gives all parameters the config's type, even those that are released in float32.
    model = model_class(model_class.config_class(**fields)).float()
    generator = torch.Generator().manual_seed(seed)
    hybrid = config["model_type"] in HYBRID

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(noise.sub(4.0))  # memories of a few to a few hundred tokens
            elif (
                hybrid and name.endswith("norm.weight") and "visual" not in name and "linear_attn" not in name
            ):
                parameter.copy_(0.1 * noise)  # these norms multiply by 1 + weight
            elif parameter.dim() == 1:
                # Norm weights lie around one, biases around zero.
                parameter.copy_((0.0 if name.endswith("bias") else 1.0) + 0.1 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(0.1 * noise if config["tie_word_embeddings"] else noise)
            else:
                # Unit gain, so that signals of a small model neither vanish nor explode. A patch embedding
                # has five dimensions; a stack of experts has three, with the inputs last.
                inputs = parameter.shape[-1] if parameter.dim() == 3 else parameter[0].numel()
                parameter.copy_(noise / inputs**0.5)

        if hybrid:
            _relate_keys_to_queries(model, config["text_config"])

    kept = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith(FLOAT32)}
    model = model.to(dtype)
    for name, value in kept.items():
        model.get_parameter(name).data = value
    return model


def _relate_keys_to_queries(model: torch.nn.Module, text: dict[str, Any]) -> None:
    """Makes the queries and keys of linear attention similar, as training does.

    At the first token of a sequence, the output of the delta rule is the value times the product of query and
    key. The norm that follows keeps only the sign of that product, and near zero rounding decides the sign.
    """
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    for name, parameter in model.named_parameters():
        if name.endswith(("in_proj_qkv.weight", "linear_attn.conv1d.weight")):
            parameter[keys : 2 * keys].mul_(0.4).add_(0.9 * parameter[:keys])


@cache
def train_bpe(texts: tuple[str, ...], vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Trains a byte-level BPE with Qwen2's normalizer and pre-tokenizer: (token -> id, merges in order)."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"), to_bytes]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def chat_template() -> str:
    """The chat template of the released Qwen2-VL and Qwen2.5-VL checkpoints."""
    return files("toolkit").joinpath("resources/qwen2_vl.chat_template.jinja").read_text()


def _save_pretrained(
    folder: Path,
    model: Any,
    family: str,
    sizes: TinySizes,
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
) -> None:
    """Writes the folder as the installed transformers does.

    The config is nested, the tensors have transformers' names, and there is a ``processor_config.json``.
    """
    from transformers import AutoProcessor

    with tempfile.TemporaryDirectory() as released:
        _write_processor(Path(released), family, sizes, vocabulary, merges)
        AutoProcessor.from_pretrained(
            released, trust_remote_code=False, local_files_only=True
        ).save_pretrained(folder)
    model.save_pretrained(folder)


def _write_processor(
    folder: Path, family: str, sizes: TinySizes, vocabulary: dict[str, int], merges: list[tuple[str, str]]
) -> None:
    _write_tokenizer(folder, vocabulary, merges)
    _write_json(folder / "preprocessor_config.json", _preprocessor(family, sizes))
    if family in NESTED:
        _write_json(folder / "video_preprocessor_config.json", _video_preprocessor(sizes))


def _write_tokenizer(folder: Path, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Writes the tokenizer's files and the chat template in the released form."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    # Added one by one and in order, so that each token gets the id in the config.
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    for i, token in enumerate(SPECIAL_TOKENS):
        if (found := tokenizer.convert_tokens_to_ids(token)) != len(vocabulary) + i:
            raise AssertionError(f"special token {token} has id {found}, not {len(vocabulary) + i}")

    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    ids = {str(len(vocabulary) + i): token for i, token in enumerate(SPECIAL_TOKENS)}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": {i: {"content": token} | flags for i, token in ids.items()},
            "additional_special_tokens": SPECIAL_TOKENS[1:],
            "bos_token": None,
            "chat_template": chat_template(),
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "model_max_length": 32768,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
    )

    _write_json(folder / "chat_template.json", {"chat_template": chat_template()})


def _preprocessor(family: str, sizes: TinySizes) -> dict[str, Any]:
    if family in NESTED:
        return _qwen3_preprocessor(sizes.min_pixels, sizes.max_pixels) | {
            "image_processor_type": "Qwen2VLImageProcessorFast"
        }
    return {
        "min_pixels": sizes.min_pixels,
        "max_pixels": sizes.max_pixels,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor" if family == "qwen2_vl" else "Qwen2_5_VLProcessor",
    }


def _video_preprocessor(sizes: TinySizes) -> dict[str, Any]:
    """Qwen3-VL's video preprocessor; its areas are those of all frames together."""
    return _qwen3_preprocessor(sizes.min_pixels, 2 * sizes.max_pixels) | {
        "video_processor_type": "Qwen3VLVideoProcessor"
    }


def _qwen3_preprocessor(shortest: int, longest: int) -> dict[str, Any]:
    """The common part of Qwen3-VL's image and video processors; areas in pixels."""
    return {
        "size": {"longest_edge": longest, "shortest_edge": shortest},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }


def _generation(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config", config)
    return {
        "bos_token_id": text["bos_token_id"],
        "pad_token_id": text["bos_token_id"],
        "do_sample": True,
        "eos_token_id": [text["eos_token_id"], text["bos_token_id"]],
        "repetition_penalty": 1.05,
        "temperature": 0.1,
        "top_k": 1,
        "top_p": 0.001,
        "transformers_version": "4.41.2",
    }


def _released_name(name: str) -> str:
    """Returns the released name of a tensor.

    transformers >= 4.52 names it ``model.visual.*`` or ``model.language_model.*``.
    """
    return (
        name.removeprefix("model.")
        if name.startswith("model.visual.")
        else name.replace("model.language_model.", "model.", 1)
    )


def _write_shards(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    """Writes safetensors files of roughly equal size in model order, with their index."""
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    seen = 0
    for name, tensor in tensors.items():
        parts[min(shards - 1, seen * shards // total)][name] = tensor.contiguous()
        seen += tensor.numel() * tensor.element_size()

    if shards == 1:
        save_file(parts[0], folder / "model.safetensors", metadata={"format": "pt"})
        return

    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)

    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
