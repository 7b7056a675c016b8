"""Pictures, tables, videos and checkpoints for the tests of `megatron-vl evaluate`."""

from __future__ import annotations

import base64
import csv
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from toolkit.hf import load_processor

COLUMNS = ("index", "image", "question", "A", "B", "C", "D", "answer")
VIDEO_COLUMNS = (
    "index video video_path duration domain candidates sub_category task_type subtitle_path".split()
)
VIDEO_COLUMNS += ["question", "answer"]


def photographs() -> list[Image.Image]:
    from skimage import data

    pictures = [
        Image.fromarray(getattr(data, name)()) for name in ("astronaut", "chelsea", "coffee", "rocket")
    ]
    for picture in pictures:
        picture.thumbnail((160, 160))
    return pictures


def write_table(path: Path, rows: list[list[object]], columns: tuple[str, ...] = COLUMNS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([columns, *rows])
    return path


def encoded(picture: Image.Image) -> str:
    data = io.BytesIO()
    picture.save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def photograph_table(path: Path) -> Path:
    """Eight questions about four photographs; the right answers alternate between A, B, C and D."""
    pictures = photographs()
    options = ("a person", "a cat", "a cup", "a rocket")
    rows = [
        [i + 1, encoded(pictures[i // 2]), f"What is in picture {i}?", *options, "ABCD"[i // 2]]
        for i in range(8)
    ]
    return write_table(path, rows)


DIALOGUES = (
    ["<ImageHere> <ImageHere> Which of the two is a cat?", "And the other?"],
    ["What is <ImageHere>?", "Why?", "Who?"],
)


def dialogue_table(folder: Path) -> Path:
    """MMDU's form: lists of base64 pictures, of questions (``DIALOGUES``) and of reference answers."""
    pictures = [encoded(picture) for picture in photographs()]
    rows: list[list[object]] = [
        [1, str(pictures[:2]), str(DIALOGUES[0]), "['The second.', 'A person.']"],
        [2, str(pictures[2:3]), str(DIALOGUES[1]), "['A cup.', 'It is red.', 'Nobody.']"],
    ]
    return write_table(folder / "MMDU.tsv", rows, ("index", "image", "question", "answer"))


def answers_letters(folder: Path, seed: int) -> Path:
    """Makes a tiny checkpoint whose first token is always one of A to D, depending on the picture."""
    tokens = load_processor(folder).tokenizer
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
    files = sorted(next((out / "work").glob(f"{role}-*")).glob("answers_*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["number"])


def damage(converted: Path, folder: Path) -> Path:
    """A copy with the heads of one k_proj swapped, as after a wrong conversion of grouped queries."""
    shutil.copytree(converted, folder)
    name = "model.layers.3.self_attn.k_proj.weight"
    file = next(file for file in folder.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    save_file(tensors | {name: torch.cat(tensors[name].chunk(2)[::-1])}, file, metadata={"format": "pt"})
    return folder


def write_video(path: Path, picture: Image.Image, frames: int) -> None:
    """Writes a video of a picture that moves to the left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = np.asarray(picture.convert("RGB").resize((96 + frames, 64)))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = 96
        stream.height = 64
        stream.pix_fmt = "yuv420p"
        for i in range(frames):
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(whole[:, i : i + 96])))
            )
        container.mux(stream.encode())


def video_row(i: int, name: str) -> list[object]:
    kind = [
        "short",
        "Knowledge",
        str(["A. a person", "B. a cat", "C. a cup", "D. a rocket"]),
        "Technology",
        "Counting Problem",
    ]

    return [
        i,
        name,
        f"./video/{name}.mp4",
        *kind,
        f"./subtitle/{name}.srt",
        f"What is in video {i}?",
        "ABCD"[i],
    ]


def video_mme(folder: Path, asked: Sequence[int] = range(4)) -> None:
    """Video-MME's form, as in its repository after VLMEvalKit has prepared it: a clip of each photograph.

    Args:
        asked: the clip of each question.
    """
    for i, picture in enumerate(photographs()):
        write_video(folder / "video" / f"clip{i}.mp4", picture, 24 + i)
    rows = [[index, *video_row(i, f"clip{i}")[1:]] for index, i in enumerate(asked)]
    write_table(folder / "Video-MME.tsv", rows, tuple(VIDEO_COLUMNS))
