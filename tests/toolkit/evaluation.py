"""Images, tables, a video and checkpoints for the tests of `megatron-vl evaluate`."""

import base64
import csv
import io
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.data.media import video_of, write
from toolkit.common.hf_loading import load_hf_processor

COLUMNS = ("index", "image", "question", "A", "B", "C", "D", "answer")


def photographs() -> list[Image.Image]:
    from skimage import data

    images = [Image.fromarray(getattr(data, name)()) for name in ("astronaut", "chelsea", "coffee", "rocket")]
    for image in images:
        image.thumbnail((160, 160))
    return images


def write_table(path: Path, rows: list[list[object]], columns: tuple[str, ...] = COLUMNS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([columns, *rows])
    return path


def encoded(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def photograph_table(path: Path) -> Path:
    """Eight questions about four photographs; the right answers alternate between A, B, C and D."""
    images = photographs()
    options = ("a person", "a cat", "a cup", "a rocket")
    rows = [
        [i + 1, encoded(images[i // 2]), f"What is in image {i}?", *options, "ABCD"[i // 2]] for i in range(8)
    ]
    return write_table(path, rows)


def answers_letters(folder: Path, seed: int) -> Path:
    """Makes a tiny checkpoint whose first token is always one of A to D, depending on the image."""
    tokens = load_hf_processor(folder).tokenizer
    letters = [tokens.convert_tokens_to_ids(letter) for letter in "ABCD"]
    file = next(file for file in folder.glob("*.safetensors") if "lm_head.weight" in load_file(file))
    tensors = load_file(file)
    head = torch.zeros_like(tensors["lm_head.weight"])
    rows = torch.randn(2, head.shape[1], generator=torch.Generator().manual_seed(seed))
    head[letters] = torch.cat([rows, -rows]).to(
        head.dtype
    )  # one of four is always above the zero of all others
    save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    return folder


def damage(converted: Path, folder: Path) -> Path:
    """A copy with the heads of one k_proj swapped, as after a wrong conversion of grouped queries."""
    shutil.copytree(converted, folder)
    name = "model.layers.3.self_attn.k_proj.weight"
    file = next(file for file in folder.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    save_file(tensors | {name: torch.cat(tensors[name].chunk(2)[::-1])}, file, metadata={"format": "pt"})
    return folder


def write_video(path: Path, image: Image.Image, frames: int) -> None:
    """Writes a video of an image that moves to the left."""
    whole = np.asarray(image.convert("RGB").resize((96 + frames, 64)))
    write(path, video_of((np.ascontiguousarray(whole[:, i : i + 96]) for i in range(frames)), rate=8))
