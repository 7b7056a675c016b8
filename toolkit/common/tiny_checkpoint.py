"""Writes small Hugging Face checkpoints with the real architecture, for the demo, the tests and dry runs.

A folder has the files of a released checkpoint: a config (flat, or nested since Qwen3-VL), sharded
safetensors with the released names, a trained byte-level BPE tokenizer with Qwen's special tokens, a chat
template, an image processor and generation settings. Only the sizes are small. Structural oddities are kept:
grouped queries, window and full vision layers, a vision FFN width that no tensor parallel size divides,
M-RoPE sections of different lengths, more embedding rows than tokens, and stacks of experts with their input
dimension first.
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from converters import make_conversion_rules
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import MTP_PREFIX

NESTED_CONFIG_FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families released with a nested config, and with the tensor names that transformers uses in memory."""
HYBRID_FAMILIES = ("qwen3_5", "qwen3_5_moe")  # with linear attention
FLOAT32_SUFFIXES = (".linear_attn.A_log", ".linear_attn.norm.weight")
"""Suffixes of the names of Qwen3.5's float32 tensors; the other tensors may have another type."""

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
    checkpoint_dir: str | Path,
    family: str = "qwen2_5_vl",
    *,
    tied: bool = False,
    seed: int = 0,
    texts: Iterable[str] = DEFAULT_TEXTS,
    dtype: torch.dtype = torch.bfloat16,
    **sizes: Any,
) -> Path:
    """Writes a small checkpoint of a family with random weights. Returns its folder.

    Args:
        tied: whether input and output embeddings are one tensor, as in the 2B and 3B models. There is no
            ``lm_head.weight`` then.
        texts: texts to train the tokenizer on.
        sizes: fields of :class:`TinySizes`.

    Raises:
        FileExistsError: the folder already holds a checkpoint.
    """
    checkpoint_dir = Path(checkpoint_dir)
    if (checkpoint_dir / "config.json").exists():
        raise FileExistsError(f"{checkpoint_dir} already holds a checkpoint; give another folder")
    checkpoint_dir.mkdir(parents=True, exist_ok=True)
    config = write_small_files(checkpoint_dir, family, texts, TinySizes(**sizes), tied=tied, dtype=dtype)
    tensors = random_model(config, seed, dtype).state_dict()
    if family not in NESTED_CONFIG_FAMILIES:  # later families are released with the names in memory
        tensors = {
            name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
            for name, tensor in tensors.items()
        }
    if family == "qwen3_vl_moe":  # released with the inputs first
        tensors |= {n: stack.transpose(1, 2) for n, stack in tensors.items() if ".mlp.experts." in n}
    if tied:
        tensors.pop("lm_head.weight", None)
    if family in HYBRID_FAMILIES:
        tensors |= _random_mtp(checkpoint_dir, config, seed, dtype)
    _write_shards(checkpoint_dir, tensors)
    return checkpoint_dir


def write_small_files(
    checkpoint_dir: Path,
    family: str,
    texts: Iterable[str],
    sizes: TinySizes,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Writes the files of a tiny checkpoint except its tensors, with the arguments of
    :func:`write_tiny_checkpoint`. Returns the content of ``config.json``.

    ``resources/tiny/FAMILY.json`` has their contents. In it, ``$NAME`` stands for a field of
    :class:`TinySizes`, for what follows from it, or for the id of a special token.
    """
    vocabulary, bpe_merges = train_bpe(tuple(texts), sizes.text_vocab_size)
    _write_tokenizer(checkpoint_dir, vocabulary, bpe_merges)
    kinds = ["linear_attention"] * (sizes.full_attention_layers_of - 1) + ["full_attention"]
    values = {
        **asdict(sizes),
        **{token: len(vocabulary) + i for i, token in enumerate(SPECIAL_TOKENS)},
        "tied": tied,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": ((len(vocabulary) + len(SPECIAL_TOKENS)) // 128 + 1) * 128,
        "position_embeddings": sizes.position_table_side**2,
        "video_max_pixels": 2 * sizes.max_pixels,  # an area of all frames together
        "layer_types": [kinds[i % len(kinds)] for i in range(sizes.layers)],
    }
    contents = _fill_resource(f"tiny/{family}.json", values)
    config = contents["config.json"]
    if tied and family in NESTED_CONFIG_FAMILIES:
        config["text_config"]["tie_word_embeddings"] = True
    for name, content in contents.items():
        _write_json(checkpoint_dir / name, content)
    return config


def _fill_resource(resource_name: str, values: dict[str, Any]) -> Any:
    """The JSON of a resource with ``values["NAME"]`` in the place of each string ``$NAME``."""

    def fill(template: Any) -> Any:
        if isinstance(template, dict):
            return {name: fill(value) for name, value in template.items()}
        if isinstance(template, list):
            return [fill(value) for value in template]
        if isinstance(template, str) and template.startswith("$"):
            value = values[template[1:]]
            return list(value) if isinstance(value, tuple) else value
        return template

    return fill(json.loads(files("toolkit").joinpath("resources", resource_name).read_text()))


def random_model(config: dict[str, Any], seed: int, dtype: torch.dtype) -> torch.nn.Module:
    """Makes the transformers model of a config with random parameters.

    Biases and norms are random too, so that a test notices if one is lost.
    """
    import transformers

    model_class = getattr(transformers, config["architectures"][0])
    config_fields = {k: v for k, v in config.items() if k not in ("architectures", "transformers_version")}
    # transformers gives all parameters the config's type, even those that are released in float32.
    model = model_class(model_class.config_class(**config_fields)).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random_values(name, torch.randn(parameter.shape, generator=generator), config))
        if config["model_type"] in HYBRID_FAMILIES:
            _relate_keys_to_queries(model, config["text_config"])

    for name, parameter in model.named_parameters():
        if not name.endswith(FLOAT32_SUFFIXES):
            parameter.data = parameter.data.to(dtype)
    return model


def _random_mtp(
    checkpoint_dir: Path, config: dict[str, Any], seed: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Multi-token prediction, which no model of transformers has, with its experts apart as in Qwen3.5."""
    generator = torch.Generator().manual_seed(seed + 1)
    rules = make_conversion_rules(read_spec(checkpoint_dir).with_mtp(), mtp_expert_style="apart")
    shapes = {n: s for rule in rules if rule.name.startswith(MTP_PREFIX) for n, s in rule.hf_shapes.items()}
    return {
        name: _random_values(name, torch.randn(shape, generator=generator), config).to(dtype)
        for name, shape in shapes.items()
    }


def _random_values(name: str, noise: Tensor, config: dict[str, Any]) -> Tensor:
    """Normally distributed ``noise``, scaled as a parameter of this name is in trained models."""
    if name.endswith("A_log"):
        return noise.sub(4.0)  # memories of a few to a few hundred tokens
    is_language_norm = name.endswith("norm.weight") and "visual" not in name and "linear_attn" not in name
    if config["model_type"] in HYBRID_FAMILIES and is_language_norm:
        return 0.1 * noise  # these norms multiply by 1 + weight
    if noise.dim() == 1:
        # Norm weights lie around one, biases around zero.
        return (0.0 if name.endswith("bias") else 1.0) + 0.1 * noise
    if "embed_tokens" in name:
        return 0.1 * noise if config["tie_word_embeddings"] else noise
    # Unit gain, so that signals of a small model neither vanish nor explode. A patch embedding has five
    # dimensions; a stack of experts has three, with the inputs last.
    fan_in = noise.shape[-1] if noise.dim() == 3 else noise[0].numel()
    return noise / fan_in**0.5


def _relate_keys_to_queries(model: torch.nn.Module, text_config: dict[str, Any]) -> None:
    """Makes the queries and keys of linear attention similar, as training does.

    At the first token of a sequence, the output of the delta rule is the value times the product of query and
    key. The norm that follows keeps only the sign of that product, and near zero rounding decides the sign.
    """
    keys = text_config["linear_num_key_heads"] * text_config["linear_key_head_dim"]
    for name, parameter in model.named_parameters():
        if name.endswith(("in_proj_qkv.weight", "linear_attn.conv1d.weight")):
            parameter[keys : 2 * keys].mul_(0.4).add_(0.9 * parameter[:keys])


@cache
def train_bpe(
    training_texts: tuple[str, ...], vocab_size: int
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Trains a byte-level BPE with Qwen2's normalizer and pre-tokenizer: (token -> id, merges in order)."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe_trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(training_texts, bpe_trainer)
    bpe_model = json.loads(tokenizer.to_str())["model"]
    return bpe_model["vocab"], [tuple(merge) for merge in bpe_model["merges"]]


def _write_tokenizer(
    checkpoint_dir: Path, vocabulary: dict[str, int], bpe_merges: list[tuple[str, str]]
) -> None:
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=bpe_merges)
    # Added one by one and in order, so that each token gets the id in the config.
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.backend_tokenizer.save(str(checkpoint_dir / "tokenizer.json"))
    _write_json(checkpoint_dir / "vocab.json", vocabulary)
    (checkpoint_dir / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(f"{left_token} {right_token}\n" for left_token, right_token in bpe_merges)
    )
    values = {
        "added_tokens_decoder": {
            str(len(vocabulary) + i): {
                "content": token,
                **dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False),
                "special": True,
            }
            for i, token in enumerate(SPECIAL_TOKENS)
        },
        "additional_special_tokens": SPECIAL_TOKENS[1:],
        "chat_template": files("toolkit").joinpath("resources/qwen2_vl.chat_template.jinja").read_text(),
    }
    for name, content in _fill_resource("tiny/tokenizer.json", values).items():
        _write_json(checkpoint_dir / name, content)


def _write_shards(checkpoint_dir: Path, tensors: dict[str, Tensor]) -> None:
    """Writes two safetensors files of roughly equal size in model order, with their index."""
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    starts = itertools.accumulate((tensor.nbytes for tensor in tensors.values()), initial=0)
    numbers = {name: 1 + (2 * start >= total_bytes) for name, start in zip(tensors, starts, strict=False)}
    weight_map = {name: f"model-{number:05d}-of-00002.safetensors" for name, number in numbers.items()}
    for file_name in sorted({*weight_map.values()}):
        half = {n: tensor.contiguous() for n, tensor in tensors.items() if weight_map[n] == file_name}
        save_file(half, checkpoint_dir / file_name, metadata={"format": "pt"})
    weight_index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(checkpoint_dir / "model.safetensors.index.json", weight_index)


def _write_json(json_path: Path, json_value: Any) -> None:
    json_path.write_text(json.dumps(json_value, indent=2, ensure_ascii=False) + "\n")
