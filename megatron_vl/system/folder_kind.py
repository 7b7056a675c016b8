"""Says what a folder is that was given where another one belongs."""

from __future__ import annotations

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


def why_no_model(path: str | Path) -> str:
    """Why a folder without ``config.json`` cannot be the model, and what to do."""
    problem = "holds no config.json" if Path(path).exists() else "does not exist"
    return folder_kind(path) or (
        f"{path} {problem}; give the folder of a downloaded checkpoint"
        " (`hf download REPOSITORY --local-dir FOLDER`; where no weights are needed,"
        " `hf download REPOSITORY config.json --local-dir FOLDER`)"
    )
