"""Small Hugging Face folders with the structure of every released size."""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.tensor_folder import SINGLE_FILE, WEIGHT_INDEX_FILE, TensorFolder
from megatron_vl.spec.families import read_spec
from toolkit.cli import main

CONFIGS = Path(__file__).resolve().parent.parent / "hf_configs"
RELEASED = sorted(path.stem for path in CONFIGS.glob("*.json"))
"""All released sizes."""
SIZES = [size for size in RELEASED if "-VL-" in size or size in ("Qwen3.6-27B", "Qwen3.5-35B-A3B")]
"""One of each structure. What the small dense sizes of Qwen3.5 have besides (tied embeddings, float32) is in
``test_round_trip.py``."""


def small_config(size: str, layers: int = 4, vision_layers: int = 2) -> dict[str, Any]:
    """The released config with the same heads, key/value heads and flags, and few and narrow experts.

    Where a config has a head dimension, the width of all heads together is not the hidden size, as in the
    released Qwen3-VL-4B and 32B.
    """
    config = json.loads((CONFIGS / f"{size}.json").read_text())
    is_nested = "text_config" in config
    text, vision = config.get("text_config", config), config["vision_config"]
    hidden = (6 if is_nested else 8) * text["num_attention_heads"]
    text |= {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": 1208}
    if "intermediate_size" in text:
        text["intermediate_size"] = 280  # 8 divides it, 16 does not
    if "layer_types" in text:
        # Narrow heads, as many as released; heads of 16, of which a quarter rotates.
        text |= {"head_dim": 16, "linear_key_head_dim": 4, "linear_value_head_dim": 6}
        text["layer_types"] = text["layer_types"][:layers]
        text["rope_parameters"] |= {"mrope_section": [1, 1, 0]}
        text |= {"shared_expert_intermediate_size": 24} if "shared_expert_intermediate_size" in text else {}
    else:
        text["rope_scaling"] |= {"mrope_section": [2, 1, 1]}
        text |= {"bos_token_id": 1, "eos_token_id": 2} | ({"head_dim": 8} if is_nested else {})
    if "num_experts" in text:
        text |= {"num_experts": 8, "num_experts_per_tok": 2}
        text["moe_intermediate_size"] = 40 if hidden < 300 else 56

    vision["depth"] = vision_layers
    if config["model_type"] == "qwen2_vl":
        # An FFN width of 192, so that this family's padding is exercised as well.
        vision |= {"embed_dim": 64, "hidden_size": hidden, "mlp_ratio": 3}
        return config
    # As the released widths: some need no padding, and one no tensor parallelism above 1 divides.
    vision["intermediate_size"] = 171 if vision["intermediate_size"] in (3420, 4304) else 256
    vision["out_hidden_size"] = hidden
    if not is_nested:
        vision |= {"hidden_size": 64, "fullatt_block_indexes": [1]}
        return config
    vision |= {"hidden_size": 4 * vision["num_heads"], "num_position_embeddings": 49}
    vision["deepstack_visual_indexes"] = [0, 1] if vision["deepstack_visual_indexes"] else []
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return config | {name: 3 + i for i, name in enumerate(tokens)}


def mtp_tensors(size: str) -> dict[str, Tensor]:
    """Tensors of multi-token prediction as released: Qwen3.5 stores its experts apart, Qwen3.6 stacked."""
    config = small_config(size)
    if not config["model_type"].startswith("qwen3_5"):
        return {}
    text = config["text_config"]
    h = text["hidden_size"]
    shapes = {"fc.weight": (h, 2 * h), "norm.weight": (h,), "layers.0.self_attn.k_norm.weight": (16,)}
    if "num_experts" in text:
        f, experts = text["moe_intermediate_size"], "layers.0.mlp.experts"
        if size.startswith("Qwen3.5"):
            for expert in range(text["num_experts"]):
                shapes |= {f"{experts}.{expert}.{name}_proj.weight": (f, h) for name in ("gate", "up")}
                shapes[f"{experts}.{expert}.down_proj.weight"] = (h, f)
        else:
            count = text["num_experts"]
            shapes |= {f"{experts}.gate_up_proj": (count, 2 * f, h), f"{experts}.down_proj": (count, h, f)}
    generator = torch.Generator().manual_seed(2)
    return {f"mtp.{name}": torch.randn(s, generator=generator).bfloat16() for name, s in shapes.items()}


@functools.cache
def hf_model(size: str, layers: int = 4):
    """The transformers model of :func:`small_config` with every parameter random, also norms and biases."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = small_config(size, layers)
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model.to(torch.bfloat16)


def released_tensors(size: str, layers: int = 4) -> dict[str, Tensor]:
    """The state dict of transformers' model under the released names, without a tied output layer.

    In Qwen3-VL-MoE, the experts' input dimension comes first there; in memory, their output dimension does.
    Qwen3.5 has multi-token prediction beside the model, and decays and norms of linear attention in float32.
    """
    model = hf_model(size, layers)
    config = small_config(size)
    tied, family = config["tie_word_embeddings"], config["model_type"]
    nested = family.startswith("qwen3")  # released with the names in memory
    turned = family == "qwen3_vl_moe"
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not nested:
            name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        tensors[name] = tensor.transpose(1, 2) if turned and ".mlp.experts." in name else tensor
    if tied:
        tensors.pop("lm_head.weight")
    if size.startswith("Qwen3.5"):
        for name in tensors:
            if name.endswith((".A_log", ".linear_attn.norm.weight")):
                tensors[name] = tensors[name].float() * 1.0001  # what bfloat16 cannot hold
    return tensors | mtp_tensors(size)


def experts_apart(tensors: dict[str, Tensor], *, input_first: bool = True) -> dict[str, Tensor]:
    """Tensors with each expert's matrices apart, named as in the text models (Qwen3-MoE)."""
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name or name.startswith("mtp."):
            apart[name] = tensor
            continue
        prefix, kind = name.rsplit(".", 1)
        for expert, matrix in enumerate(tensor.transpose(1, 2) if input_first else tensor):
            parts = (
                {"down_proj": matrix}
                if kind == "down_proj"
                else dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            )
            apart |= {f"{prefix}.{expert}.{part}.weight": values for part, values in parts.items()}
    return apart


def stack_mtp_experts(hf: Path) -> None:
    """Stores the experts of multi-token prediction in stacks, as Qwen3.6 has them."""
    prefix, weight_map = "mtp.layers.0.mlp.experts.", {}
    for file in sorted(hf.glob("*.safetensors")):
        tensors = load_file(file)
        apart = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
        if apart:
            gate, up, down = (
                torch.stack([apart[f"{prefix}{i}.{kind}_proj.weight"] for i in range(len(apart) // 3)])
                for kind in ("gate", "up", "down")
            )
            tensors |= {f"{prefix}gate_up_proj": torch.cat((gate, up), 1), f"{prefix}down_proj": down}
            save_file(tensors, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    index = json.loads((hf / WEIGHT_INDEX_FILE).read_text()) | {"weight_map": weight_map}
    (hf / WEIGHT_INDEX_FILE).write_text(json.dumps(index))


def write_hf(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], files: int = 1) -> Path:
    """A HF folder as released: weights in ``files`` files with an index, and the small files beside them."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer", "preprocessor_config", "generation_config", "chat_template"):
        (folder / f"{name}.json").write_text(json.dumps({"file": name}))

    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if files == 1:
        save_file(tensors, folder / SINGLE_FILE, {"format": "pt"})
        return folder

    names = list(tensors)
    numbers = {name: i * files // len(names) + 1 for i, name in enumerate(names)}
    where = {name: f"model-{number:05d}-of-{files:05d}.safetensors" for name, number in numbers.items()}
    for file in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / WEIGHT_INDEX_FILE).write_text(json.dumps(index))
    return folder


def released_folder(folder: Path, size: str, files: int = 2, layers: int = 4) -> Path:
    return write_hf(folder, released_tensors(size, layers), small_config(size, layers), files)


def run(*words: object) -> int:
    return main([str(word) for word in words])


def assert_same_folder(a: Path, b: Path) -> None:
    """Every file of ``a`` is in ``b`` with the same bytes, and nothing else is."""
    names = [sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file()) for folder in (a, b)]
    assert names[0] == names[1]
    for name in names[0]:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    where = TensorFolder(folder)
    files = [load_file(folder / file) for file in where.reader_by_file]
    return {name: tensors[name] for tensors in files for name in tensors}


def tp_sizes(size: str) -> list[int]:
    """Those of 1, 2, 4 and 8 that the heads of ``size`` allow."""
    spec = read_spec(small_config(size))
    heads = (spec.language.num_heads, spec.vision.num_heads)  # 16 key heads of linear attention allow all
    return [tp for tp in (1, 2, 4, 8) if not any(count % tp for count in heads)]
