"""Opens Hugging Face folders in ``transformers`` without executing or unpickling anything in them.

A checkpoint may come from an untrusted source. By default, transformers 5.17 asks at the terminal whether to
run the code that ``auto_map`` names, falls back to ``torch.load`` if there are no safetensors, follows
``adapter_config.json`` to another model, and downloads kernels that ``config.json`` names as its attention.
"""

import importlib
import inspect
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converters import make_conversion_rules
from converters.fp8 import Fp8Folder, open_tensor_folder
from converters.hf_checkpoint import HfCheckpoint, detect_expert_style
from converters.tensor_folder import TensorFolder
from megatron_vl.data.sample.conversation_checks import iterate_texts
from megatron_vl.data.sample.tokenizer import load_tokenizer
from megatron_vl.spec.families import ConfigError, ModelSpec, read_spec
from megatron_vl.spec.families.hf_folder import read_chat_template
from megatron_vl.spec.families.rope import serving_config
from megatron_vl.spec.positions import GridTHW, mrope_positions

SAFE_LOADING_ARGUMENTS: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
"""Arguments of every ``from_pretrained`` in this project."""


def check_hf_folder(hf_dir: str | Path) -> TensorFolder:
    """Checks a checkpoint folder before anything opens it.

    Returns:
        Its safetensors files.

    Raises:
        FileNotFoundError: there are no safetensors weights.
        ConfigError: there is no config, or its ``model_type`` is unknown, or a field is impossible or names
            other weights or models.
        WeightsError: index and files disagree, or a name leaves the folder.
    """
    read_spec(hf_dir)
    refuse_named_models(Path(hf_dir))
    return open_tensor_folder(hf_dir)


def load_hf_processor(hf_dir: str | Path) -> Any:
    """Loads the folder's tokenizer, image and video processor and chat template (rendered in transformers'
    sandbox).

    They are loaded one by one: transformers' processors also load the models that their files name, from
    other folders and with pickles. The tokenizer is the one that training uses.

    Raises:
        ConfigError: a processor's file names another folder or model.
        The errors of :class:`~megatron_vl.data.sample.chat.ChatEncoder`'s tokenizer and template.
    """
    from transformers import AutoImageProcessor, AutoVideoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    refuse_named_models(Path(hf_dir))
    tokenizer, _ = load_tokenizer(hf_dir)
    return processor_class_from_name(PROCESSOR_MAPPING_NAMES[read_spec(hf_dir).family])(
        image_processor=AutoImageProcessor.from_pretrained(hf_dir, **SAFE_LOADING_ARGUMENTS),
        tokenizer=tokenizer,
        video_processor=AutoVideoProcessor.from_pretrained(hf_dir, **SAFE_LOADING_ARGUMENTS),
        chat_template=read_chat_template(hf_dir),
    )


def refuse_named_models(hf_path: Path) -> None:
    """Raises ConfigError if a processor's file has a ``*_name_or_path``, which transformers would load."""
    for file_path in sorted(hf_path.glob("*processor*config.json")):
        for text in iterate_texts(json.loads(file_path.read_text())):
            if text.endswith("_name_or_path"):
                raise ConfigError(f"{file_path}: field {text!r} names another model or folder; remove it")


def load_hf_model(hf_dir: str | Path, dtype: torch.dtype, device_map: str | None = None) -> Any:
    """Loads the folder's model from its safetensors, in evaluation mode with SDPA attention.

    FP8 weights are dequantised, which needs accelerate, and have the values that training starts from.

    Args:
        device_map: None loads it into this machine's memory; ``auto`` distributes it over the GPUs, which
            needs accelerate.

    Raises:
        The errors of :func:`check_hf_folder`.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText, FineGrainedFP8Config

    folder, spec = check_hf_folder(hf_dir), read_spec(hf_dir)
    if device_map is None:
        use_torch_for_linear_attention(spec)
    # transformers would not see YaRN in the second of two places.
    config = json.loads((Path(hf_dir) / "config.json").read_text())
    served_config = serving_config(config, spec.language.rope_fields)
    options: dict[str, Any] = {}
    if served_config != config:
        options["config"] = AutoConfig.for_model(**served_config)
    if isinstance(folder, Fp8Folder):
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForImageTextToText.from_pretrained(
        hf_dir,
        dtype=dtype,
        attn_implementation="sdpa",
        use_safetensors=True,
        device_map=device_map,
        **options,
        **SAFE_LOADING_ARGUMENTS,
    ).eval()
    with torch.no_grad():
        if isinstance(folder, Fp8Folder):
            # transformers rounds to the type of the model, and training to that of the folder.
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(parameter.to(folder.weight_dtype))
        if spec.language.moe and (
            isinstance(folder, Fp8Folder) or detect_expert_style(spec, folder) == "apart"
        ):
            _fill_experts(model, hf_dir)
    return model


def _fill_experts(model: Any, hf_dir: str | Path) -> None:
    """Gives the experts of a model the weights that training starts from.

    Up to 5.24, transformers takes stacks in FP8 without their scales, and leaves the experts of Qwen3-VL-MoE
    random if they are stored apart.
    """
    source = HfCheckpoint(hf_dir)
    for rule in make_conversion_rules(source.spec, "output_first"):  # as in transformers' memory
        if source.tensor_infos[rule.name].num_experts:
            (name,) = rule.hf_shapes
            model.get_parameter(name).copy_(source.read_shard(rule.name))


def use_torch_for_linear_attention(spec: ModelSpec) -> None:
    """Makes transformers compute linear attention in plain torch in this process, whatever is installed.

    If flash-linear-attention is installed, transformers would use its kernels even on CPU, where they fail,
    and in float32, where they round products to TF32.
    """
    if spec.language.linear_attention is None:
        return
    module = importlib.import_module(f"transformers.models.{spec.family}.modeling_{spec.family}")
    for name, kernel_function in vars(module).copy().items():
        if name.startswith(("torch_chunk_", "torch_recurrent_", "causal_conv1d_")):
            setattr(module, name, inspect.unwrap(kernel_function))


# --- Videos as the models were trained ----------------------------------------------------------------------


def apply_video_prompt(rendered_text: str, processor: Any, spec: ModelSpec) -> str:
    """Prepares a rendered conversation so that the processor writes videos as for the released models.

    Since transformers 5.10, Qwen3-VL's processor replaces only the placeholder with frame groups. The pair of
    tokens around it is removed first, as in transformers 4.57.
    """
    if not spec.vision.video_timestamps:
        return rendered_text
    video_token = processor.video_token
    return rendered_text.replace(
        f"{processor.vision_start_token}{video_token}{processor.vision_end_token}", video_token
    )


def follow_video_positions(model: Any, spec: ModelSpec) -> Any:
    """Makes a transformers model use our positions instead of its own, in ``forward`` and in ``generate``.

    In transformers 5.3 to 5.24, the positions of text continue within a video (their issue 45381). Up to
    5.17, the seconds of a frame group are truncated. Qwen3-VL has the same rule in all versions and is not
    changed.

    Args:
        model: a ``...ForConditionalGeneration`` of ``spec``; it is changed and returned. It then takes one
            sample at a time.
    """
    if not spec.vision.video_timestamps:
        model.model.get_rope_index = partial(_rope_index, spec)
    return model


def _rope_index(
    spec: ModelSpec,
    input_ids: Tensor,
    *,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Iterable[Any] | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """The positions of one sample, int64 [3, 1, S], and a new token's position minus its index, [1, 1]."""
    grids = {
        spec.image_token_id: _media_grids("image", image_grid_thw, None),
        spec.video_token_id: _media_grids("video", video_grid_thw, second_per_grid_ts),
    }
    [token_ids] = input_ids.cpu()
    positions = mrope_positions(token_ids, _grids_in_text_order(token_ids, grids, spec), spec)
    delta = positions[:, -1].max() + 1 - len(token_ids)
    return positions[:, None].to(input_ids.device), delta.view(1, 1).to(input_ids.device)


def _media_grids(kind: Any, grid_thw: Tensor | None, seconds: Iterable[Any] | None) -> Iterator[GridTHW]:
    """All media of one kind, from the processor's ``*_grid_thw`` [N, 3] and ``second_per_grid_ts`` [N]."""
    sizes = [] if grid_thw is None else grid_thw.tolist()
    for (t, h, w), grid_seconds in zip(
        sizes, [1.0] * len(sizes) if seconds is None else seconds, strict=True
    ):
        yield GridTHW(t, h, w, kind, float(grid_seconds))


def _grids_in_text_order(
    token_ids: Tensor, grids: dict[int, Iterator[GridTHW]], spec: ModelSpec
) -> list[GridTHW]:
    """The grids of the media in the order of the text ``token_ids`` [S], from those of each placeholder."""
    ordered: list[GridTHW] = []
    placeholders_left = 0
    for token_id in filter(grids.__contains__, token_ids.tolist()):
        if not placeholders_left:
            ordered.append(next(grids[token_id]))
            placeholders_left = ordered[-1].num_tokens(spec.vision.spatial_merge_size)
        placeholders_left -= 1
    return ordered
