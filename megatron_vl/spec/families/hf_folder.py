"""Judges a Hugging Face folder before anything else reads it.

Every command reads a folder's config here, so that all of them refuse the same folders: those with files that
contradict each other, of which one would be read in silence, and those with files that were not downloaded.
"""

import hashlib
import json
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_vl.spec.families.base import ConfigError
from megatron_vl.spec.families.rope import serving_config
from megatron_vl.system.folder_kind import folder_kind

WEIGHT_INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CHAT_TEMPLATE_FILE = "chat_template.jinja"

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_READ_SUFFIXES = (".json", ".jinja", ".txt", ".safetensors")
FP8_FIELD = "quantization_config"
SCALE_SUFFIX = "_scale_inv"
"""The scales of a FP8 tensor ``NAME`` are in ``NAME_scale_inv``."""
_QUANTISATION_FIELDS = (FP8_FIELD, "quantization", "compression_config")
"""Fields for the quantisation by transformers, MLX, and compressed-tensors."""
_QUANTISATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files of ModelOpt, AutoGPTQ and AutoAWQ."""
_QUANTISED_SUFFIXES = (
    *(".weight_scale", ".weight_scale_inv", ".weight_packed", ".weight_shape", ".weight_zero_point"),
    *(".input_scale", ".qweight", ".qzeros", ".scales", ".g_idx", ".SCB", "_blocks", "_scales", "_scale_inv"),
    *(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"),
)
"""Ends of the names of tensors that hold quantised weights or their scales."""
_WEIGHT_TYPES = ("F64", "F32", "F16", "BF16")
_UNQUANTISED_ADVICE = (
    "of quantised weights, only FP8 in blocks (F8_E4M3 with weight_scale_inv, as in Qwen3-VL-8B-Instruct-FP8)"
    " is read: use the model's folder in bfloat16"
)
_PROCESSOR_TEMPLATES = ("chat_template.json", "processor_config.json")


def read_config(config_path: Path) -> dict[str, Any]:
    """Reads a ``config.json``, and judges the folder that it is in.

    Raises:
        ConfigError: the message names the file or field, and says what to do.
    """
    hf_path = config_path.parent
    is_folder = config_path.name == "config.json"
    _refuse_pipes_and_lfs_pointers(hf_path.iterdir() if is_folder else [config_path])
    config = _read_object(config_path)
    is_fp8 = fp8_block_size(config) is not None
    _refuse_quantisation_fields(config_path, {**config, FP8_FIELD: None} if is_fp8 else config)
    if "transformers_weights" in config:
        raise ConfigError(f"{config_path}: field 'transformers_weights' names other weights; remove it")
    if is_folder:
        _refuse_other_weights(hf_path)
        _check_quantised_tensors(hf_path, is_fp8)
        read_chat_template(hf_path, is_required=False)
    # What is read is not quantised, and neither are weights or exports that carry this config.
    return {name: value for name, value in config.items() if not (is_fp8 and name == FP8_FIELD)}


def fp8_block_size(config: dict[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks that have one scale each; None if a config says no FP8 of this form.

    The form is that of the released ``*-FP8`` folders and of DeepSeek-V3: E4M3 weights, activations
    quantised while the model runs.
    """
    fields = config.get(FP8_FIELD)
    if not isinstance(fields, dict) or fields.get("quant_method") != "fp8":
        return None
    block_size = fields.get("weight_block_size")
    usual = {"fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "float"}
    if (
        not isinstance(block_size, list)
        or [type(side) for side in block_size] != [int, int]
        or min(block_size) < 1
        or any(fields.get(name, value) != value for name, value in usual.items())
    ):
        return None
    return block_size[0], block_size[1]


def _read_object(json_path: Path) -> dict[str, Any]:
    try:
        json_object = json.loads(json_path.read_text())
    except ValueError as error:
        raise ConfigError(f"{json_path} is not JSON ({error}); download it again") from error
    if not isinstance(json_object, dict):
        raise ConfigError(f"{json_path} does not hold a JSON object")
    return json_object


def _refuse_pipes_and_lfs_pointers(paths: Any) -> None:
    for path in sorted(paths):
        if path.is_fifo():
            raise ConfigError(f"{path} is a named pipe; put the file itself in its place")
        if path.suffix in _READ_SUFFIXES and path.is_file() and path.stat().st_size < 1024:
            if path.read_bytes().startswith(_LFS_POINTER):
                raise ConfigError(
                    f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder, or"
                    " download the file"
                )


def _refuse_quantisation_fields(config_path: Path, config: dict[str, Any]) -> None:
    sections = {"": config} | {f"{k}.": value for k, value in config.items() if isinstance(value, dict)}
    for prefix, section in sections.items():
        for name in _QUANTISATION_FIELDS:
            if (fields := section.get(name)) is not None:
                method = fields.get("quant_method") if isinstance(fields, dict) else None
                raise ConfigError(
                    f"{config_path}: field '{prefix}{name}' says that the weights are quantised"
                    f" ({method or name}); {_UNQUANTISED_ADVICE}, or remove the field if the tensors are in"
                    " bfloat16"
                )


def _refuse_other_weights(hf_path: Path) -> None:
    """Raises ConfigError for files that say that the folder's weights are others than its safetensors."""
    for name in _QUANTISATION_FILES:
        if (hf_path / name).exists():
            raise ConfigError(
                f"{hf_path / name} says that the weights are quantised; {_UNQUANTISED_ADVICE}, or remove the"
                " file if the tensors are in bfloat16"
            )
    if (hf_path / "adapter_config.json").exists():
        raise ConfigError(folder_kind(hf_path))
    indexed_files = _weight_map(hf_path).values()
    if (hf_path / SINGLE_FILE).exists() and indexed_files and SINGLE_FILE not in indexed_files:
        raise ConfigError(
            f"{hf_path} holds both {SINGLE_FILE} and {WEIGHT_INDEX_FILE}, which names other files;"
            " transformers reads the first, serving engines the others: remove what does not belong here"
        )


def _weight_map(hf_path: Path) -> dict[str, str]:
    """The file of each tensor; empty if the index is not usable, which the reader of weights reports."""
    try:
        weight_map = json.loads((hf_path / WEIGHT_INDEX_FILE).read_text())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _check_quantised_tensors(hf_path: Path, is_fp8: bool) -> None:
    """Judges the tensors of one file by type and name, and those of the others by the names in the index.

    A large model has a hundred files, and every rank would open them. The reader of weights checks all types.
    """
    from safetensors import SafetensorError, safe_open

    weight_map = _weight_map(hf_path)
    first_path = hf_path / Path(min(weight_map.values(), default=SINGLE_FILE)).name
    types: dict[str, str] = {}
    # The reader of weights says what is wrong.
    with suppress(SafetensorError, OSError), safe_open(first_path, framework="numpy") as weights:
        types = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    valid_types = (*_WEIGHT_TYPES, "F8_E4M3") if is_fp8 else _WEIGHT_TYPES

    def is_quantised(name: str) -> bool:
        return name.endswith(_QUANTISED_SUFFIXES) and not (is_fp8 and name.endswith(SCALE_SUFFIX))

    for name, dtype in types.items():
        if dtype not in valid_types or is_quantised(name):
            raise ConfigError(f"{first_path}: tensor {name!r} has type {dtype}; {_UNQUANTISED_ADVICE}")
    for name, file in weight_map.items():
        if is_quantised(name):
            raise ConfigError(f"{hf_path / file}: tensor {name!r} is quantised; {_UNQUANTISED_ADVICE}")
    names = weight_map or types
    if is_fp8 and names and not any(name.endswith(SCALE_SUFFIX) for name in names):
        raise ConfigError(
            f"{hf_path / 'config.json'}: field {FP8_FIELD!r} says that the weights are quantised (fp8), but"
            f" no tensor has scales (weight{SCALE_SUFFIX}); remove the field if the tensors are in bfloat16"
        )


# --- Chat templates -----------------------------------------------------------------------------------------


def _chat_templates(hf_path: Path) -> dict[str, Any]:
    """File -> its chat template, in the order in which transformers looks for them."""
    jinja_path = hf_path / CHAT_TEMPLATE_FILE
    templates: dict[str, Any] = {jinja_path.name: jinja_path.read_text()} if jinja_path.is_file() else {}
    for name in (*_PROCESSOR_TEMPLATES, "tokenizer_config.json"):
        if (hf_path / name).is_file():
            template = _read_object(hf_path / name).get("chat_template")
            templates |= {} if template is None else {name: template}
    return templates


def read_chat_template(hf_dir: str | Path, *, is_required: bool = True) -> str:
    """The chat template of an HF folder.

    It is in ``chat_template.jinja``, ``chat_template.json``, the processor's or the tokenizer's config.

    Args:
        is_required: whether a folder without a template is refused. Otherwise, the text is empty.

    Raises:
        FileNotFoundError: the folder has no chat template.
        ConfigError: it has several, or they differ. The released Qwen2.5-VL has another one in
            ``tokenizer_config.json``, so that this file may differ (:func:`chat_template_note`).
    """
    hf_path = Path(hf_dir)
    templates = _chat_templates(hf_path)
    several = [name for name, template in templates.items() if not isinstance(template, str)]
    several += [name for name in ("additional_chat_templates/tool_use.jinja",) if (hf_path / name).exists()]
    if several:
        raise ConfigError(
            f"{hf_path / several[0]} holds several named chat templates, of which transformers chooses one by"
            " the request; keep the one to train with, as text in chat_template.jinja"
        )
    if not templates:
        if not is_required:
            return ""
        raise FileNotFoundError(
            f"{hf_path} has no chat template (chat_template.jinja, chat_template.json or"
            " tokenizer_config.json)"
        )

    first_name, first_template = next(iter(templates.items()))
    for name in _PROCESSOR_TEMPLATES:
        if name in templates and templates[name].rstrip() != first_template.rstrip():
            raise ConfigError(
                f"{hf_path}: the chat templates in {first_name} and {name} differ; remove the one that the"
                " model is not to be trained and served with"
            )
    return first_template


def text_digests(hf_path: Path) -> dict[str, str]:
    """Digests of tokenizer and chat template, as a run records them; of what the folder has."""
    from tokenizers import Tokenizer

    digests = {}
    if template := read_chat_template(hf_path, is_required=False):
        digests["chat template"] = describe_template_digest(compute_template_digest(template))
    if (tokenizer_path := hf_path / "tokenizer.json").is_file():
        digests["tokenizer"] = compute_tokenizer_digest(Tokenizer.from_file(str(tokenizer_path)))
    elif (hf_path / "vocab.json").is_file():
        from transformers import AutoTokenizer  # which makes one of vocab.json and merges.txt

        tokenizer = AutoTokenizer.from_pretrained(hf_path, trust_remote_code=False, local_files_only=True)
        digests["tokenizer"] = compute_tokenizer_digest(tokenizer.backend_tokenizer)
    return digests


def compute_template_digest(template: str) -> int:
    """The CRC-32 by which a loader's state knows a chat template."""
    return zlib.crc32(template.encode())


def describe_template_digest(digest: int) -> str:
    """The digest as ``run.json`` and manifests have it."""
    return f"CRC-32 {digest:08x}"


def compute_tokenizer_digest(tokenizer: Any) -> str:
    """A digest of vocabulary, merges, added tokens, normaliser, pre-tokenizer and post-processor.

    It does not depend on how a file writes them, nor on what only turns tokens into text.
    """
    tokenizer_fields = json.loads(tokenizer.to_str())
    for name in ("version", "truncation", "padding", "decoder"):
        del tokenizer_fields[name]
    # Versions of the library write merges as pairs or as texts.
    merges = tokenizer_fields["model"].get("merges", ())
    tokenizer_fields["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    return hashlib.sha256(json.dumps(tokenizer_fields, sort_keys=True).encode()).hexdigest()[:16]


def write_chat_template(hf_path: Path, template: str) -> None:
    """Makes ``template`` the only chat template of a folder, for every reader: also where others stand."""
    for name in (*_PROCESSOR_TEMPLATES, "tokenizer_config.json"):
        if (hf_path / name).is_file() and "chat_template" in (config := _read_object(hf_path / name)):
            (hf_path / name).write_text(json.dumps(config | {"chat_template": template}, indent=2) + "\n")
    (hf_path / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")


def chat_template_note(hf_dir: str | Path) -> str:
    """A note if the tokenizer's template is another one than the processor's; otherwise empty."""
    templates = _chat_templates(Path(hf_dir))
    first_name, first_template = next(iter(templates.items()), ("", ""))
    if templates.get("tokenizer_config.json", first_template).rstrip() == first_template.rstrip():
        return ""
    return (
        f"{hf_dir}: the chat templates in {first_name} and tokenizer_config.json differ; the first is used,"
        " as by transformers' processors. A server that reads the tokenizer's needs it as an option"
        " (vllm serve --chat-template)"
    )


def write_rope_fields(hf_dir: Path, trained_rope: dict[str, Any]) -> None:
    """Makes a folder's config say which rotary positions training saw, if it does not for every program."""
    config_path = hf_dir / "config.json"
    config = json.loads(config_path.read_bytes())
    served_config = serving_config(config, trained_rope)
    if served_config != config:
        config_path.write_text(json.dumps(served_config, indent=2) + "\n")
