"""Says what a folder is that was given where another one belongs."""

import re
from pathlib import Path


def folder_kind(path: str | Path) -> str:
    """What a folder is, and where it belongs; empty if it is no adapter, no data set and no model."""
    folder = Path(path)
    if (folder / "adapter_config.json").exists():
        return (
            f"{path} is a LoRA adapter (adapter_config.json): train it further with --lora.adapter, or"
            f" merge it with `megatron-vl export --checkpoint {path} --hf HF_DIR --merge --out MERGED`"
        )
    if (folder / ".nv-meta").exists():
        return f"{path} is a data set: give it as --data.path"
    if (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file():
        return f"{path} is the folder of a model: give it as --model.hf"
    return ""


def is_hub_name(model: str) -> bool:
    """Whether this is a model's name on the Hub (``Qwen/Qwen2.5-VL-7B-Instruct``), and no folder, also none
    that is missing here."""
    owner, is_name = model.partition("/")[0], re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model)
    return bool(is_name) and owner != "checkpoints" and not Path(owner).exists()


def why_no_model(path: str | Path) -> str:
    """Why a folder without ``config.json`` cannot be the model, and what to do."""
    name, problem = Path(path).name, "holds no config.json" if Path(path).exists() else "does not exist"
    repository, folder = "REPOSITORY", "FOLDER"
    if is_hub_name(f"{path}"):
        repository, folder = f"{path}", f"checkpoints/{name}"
    elif name.startswith("Qwen"):  # such as model.hf of an example
        repository, folder = f"Qwen/{name}", f"{path}"
    return folder_kind(path) or (
        f"{path} {problem}; give the folder of a downloaded checkpoint"
        f" (`hf download {repository} --local-dir {folder}`; where no weights are needed,"
        f" `hf download {repository} config.json --local-dir {folder}`)"
    )
