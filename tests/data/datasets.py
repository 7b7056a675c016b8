"""Data sets for the tests: records with drawn media, converted by the data tool itself."""

import json
from pathlib import Path
from typing import Any

from data_tools.convert import ConversionOptions, DataReport, convert_dataset
from data_tools.sample_sizes import index_datasets
from megatron_vl.config import DataConfig
from megatron_vl.data.loader import RowLoader, build_loader
from megatron_vl.data.source.dataset_description import read_description
from megatron_vl.data.source.sample_sizes import find_datasets_without_sizes
from megatron_vl.spec.families import read_spec

from .media import encoded, video, write

KINDS = ["jpeg", "png", "rgba", "exif", "grey"]


def turns(words: int) -> list[dict[str, str]]:
    """A question of so many words, and its answer."""
    return [{"from": "human", "value": "x " * words}, {"from": "gpt", "value": "y"}]


def asked(number: int, *questions: str) -> list[dict[str, str]]:
    answer = {"from": "gpt", "value": f"Answer number {number}."}
    return [turn for text in questions for turn in ({"from": "human", "value": text}, answer)]


def mixed_records(root: Path, count: int) -> list[dict[str, Any]]:
    """Conversations of each kind: an image, text, two images, a video, OpenAI parts with all of them."""
    records: list[dict[str, Any]] = []
    for i in range(count):
        write(root / f"images/{i}.img", encoded(40 + 11 * (i % 7), 60 + 17 * (i % 5), KINDS[i % 5], seed=i))
        write(root / "clips/a.mp4", video(12, 56, 84))
        one = f"images/{i}.img"
        two = "images/0.img"
        parts = [
            {"type": "text", "text": "Compare "},
            {"type": "video", "video": "clips/a.mp4"},
            {"type": "image_url", "image_url": {"url": one}},
        ]
        both = {"role": "assistant", "content": f"Both show {i}."}
        kinds: list[dict[str, Any]] = [
            {"image": one, "conversations": asked(i, "<image>\nWhat is this?")},
            {"conversations": asked(i, f"Say {i}"), "system": "Be brief."},
            {"images": [one, two], "conversations": asked(i, "First <image> then <image>?", "And?")},
            {"video": ["clips/a.mp4"], "conversations": asked(i, "<video>Describe.")},
            {"messages": [{"role": "user", "content": parts}, both]},
        ]
        records.append(kinds[i % 5])

    return records


def converted(folder: Path, records: list[Any], **options: Any) -> tuple[Path, DataReport]:
    """Runs the data tool on ``records``, whose media are in ``folder/media``."""
    (folder / "media").mkdir(parents=True, exist_ok=True)
    (folder / "in.json").write_text(json.dumps(records))
    conversion = ConversionOptions(folder / "media", folder / "out", **options)
    report = convert_dataset([folder / "in.json"], conversion)
    return folder / "out", report


def open_loader(data: DataConfig, hf: Path, **place: Any) -> RowLoader:
    """The loader of a data set, whose sizes are written first if they are missing."""
    if find_datasets_without_sizes(read_description(data.path), hf, data):
        index_datasets(data, read_spec(hf), hf)
    return build_loader(data, read_spec(hf), hf, **place)
