"""Images, tables, videos and checkpoints for the tests of `megatron-vl evaluate`."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pyarrow import Table
from pyarrow.parquet import write_table as write_parquet
from safetensors.torch import load_file, save_file

from tests.data.media import video_of, write
from toolkit.common.hf_loading import load_hf_processor
from toolkit.evaluate.evaluation import read_answers

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


DIALOGUES = (
    ["<ImageHere> <ImageHere> Which of the two is a cat?", "And the other?"],
    ["What is <ImageHere>?", "Why?", "Who?"],
)


def dialogue_table(folder: Path) -> Path:
    """MMDU's form: lists of base64 images, of questions (``DIALOGUES``) and of reference answers."""
    images = [encoded(image) for image in photographs()]
    rows: list[list[object]] = [
        [1, str(images[:2]), str(DIALOGUES[0]), "['The second.', 'A person.']"],
        [2, str(images[2:3]), str(DIALOGUES[1]), "['A cup.', 'It is red.', 'Nobody.']"],
    ]
    return write_table(folder / "MMDU.tsv", rows, ("index", "image", "question", "answer"))


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


def answers_of(out: Path, role: str) -> list[dict]:
    return read_answers(next((out / "work" / "results").glob(f"{role}-*")))


PUBLISHED = """
import hashlib, json, pathlib
published = json.loads(pathlib.Path(__file__).with_name("published.json").read_text())
class Md5:
    def __init__(self): self.update = (real := hashlib.md5()).update; self.real = real
    def hexdigest(self): return published.get(self.real.hexdigest(), self.real.hexdigest())
own_new = hashlib.new
hashlib.new = lambda name, *more, **named: Md5() if name == "md5" else own_new(name, *more, **named)
"""


def as_published(folder: Path, tables: dict[Path, str]) -> str:
    """A ``PYTHONPATH`` with which VLMEvalKit takes small tables for the ones whose MD5 it knows."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PUBLISHED)
    md5s = {hashlib.md5(table.read_bytes()).hexdigest(): published for table, published in tables.items()}
    (folder / "published.json").write_text(json.dumps(md5s))
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


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


def video_mme(hub: Path) -> Path:
    """Video-MME in Hugging Face's cache, with its videos unpacked: a clip of each photograph.

    Returns:
        The folder of the data set.
    """
    repository = hub / "datasets--lmms-lab--Video-MME"
    folder = repository / "snapshots" / ("0" * 40)
    for i, image in enumerate(photographs()):
        write_video(folder / "video" / f"clip{i}.mp4", image, 24 + i)
    for name in ("subtitle", "videomme"):
        (folder / name).mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    facts = {"duration": "short", "domain": "Knowledge", "sub_category": "Technology"}
    facts |= {
        "task_type": "Counting Problem",
        "options": ["A. a person", "B. a cat", "C. a cup", "D. a rocket"],
    }
    rows = [
        facts | {"videoID": f"clip{i}", "question": f"What is in video {i}?", "answer": "ABCD"[i]}
        for i in range(4)
    ]
    write_parquet(Table.from_pylist(rows), folder / "videomme" / "test-00000-of-00001.parquet")
    return folder
