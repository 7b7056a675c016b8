"""Records of documents: each form by hand, and what is refused."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_tools.convert import ConversionOptions, convert_dataset
from data_tools.formats import FORMATS, RecordError, detect_format, read_conversation
from data_tools.records import ConvertError
from megatron_vl.config import DataConfig
from tests.data.datasets import open_loader
from tests.data.media import encoded, write
from tests.tiny import tiny_checkpoint

IMAGE = {"type": "image"}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


MMC4 = [("b.png", 2), ("a.png", 0), ("c.png", 2)]
FORMS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("document", {"text": "One.\n"}, ["One.\n"]),
    ("document", {"text": "As <image> in <video> of HTML"}, ["As <image> in <video> of HTML"]),
    ("document", {"image": "a.png", "caption": "A thing."}, ["a.png", "A thing."]),
    ("document", {"images": ["a.png", "b.png"], "text": "Two."}, ["a.png", "b.png", "Two."]),
    ("document", {"images": ["a.png"], "text": "See <image>here"}, ["See ", "a.png", "here"]),
    (
        "document",
        {"images": ["a.png"], "text": "Of <image> tags", "markers": "text"},
        ["a.png", "Of <image> tags"],
    ),
    ("document", {"text": "x", "label": True, "bbox": [1]}, ["x"]),
    (
        "interleaved",
        {"texts": ["1", None, "two", "3", None, None], "images": [None, "a.png", None, None, None, "b.png"]},
        ["1", "a.png", "two\n\n3", "b.png"],
    ),
    ("interleaved", {"text": None, "texts": ["One"]}, ["One"]),
    ("interleaved", {"texts": ["One ", "two", "\nthree"], "images": None}, ["One two\nthree"]),
    ("interleaved", {"texts": [None, "A clip"], "videos": ["a.mp4", None]}, ["a.mp4", "A clip"]),
    (
        "mmc4",
        {
            "text_list": ["A.", "B.", "C."],
            "image_info": [
                *({"image_name": n, "matched_text_index": i, "raw_url": "x"} for n, i in MMC4),
                None,
            ],
        },
        ["a.png", "A. B. ", "b.png", "c.png", "C."],
    ),
    ("mmc4", {"text_list": ["A.", "B."], "image_info": None}, ["A. B."]),
]
"""Format, record, texts and media in the order of the text."""


@pytest.mark.parametrize(("name", "record", "parts"), FORMS)
def test_document_forms_by_hand(name, record, parts):
    media = {"a.png": IMAGE, "b.png": IMAGE, "c.png": IMAGE, "a.mp4": {"type": "video"}}
    assert detect_format(record).name == name and FORMATS[name].is_document
    document = read_conversation(record)
    assert document.document == [media.get(part, text(part)) for part in parts] and not document.messages
    assert [reference for _, reference in document.media_references] == [p for p in parts if p in media]


def test_conversations_are_no_documents():
    record = {
        "text": "x",
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    }
    assert not read_conversation(record).document
    assert not read_conversation({"instruction": "a", "output": "b", "text": "a b"}).document


def mmc4(**image: Any) -> dict[str, Any]:
    return {"text_list": ["a"], "image_info": [image]}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"text": " \n"}, "no text", "text"),
    ({"image": "a.png", "caption": None}, "no text", "caption"),
    ({"text": "a", "caption": "b"}, "two conversations", "caption"),
    ({"text": "a<|image_pad|>b"}, "placeholder token in text", "text"),
    ({"text": "<image>a<image>", "image": "a.png"}, "markers and media differ", "text"),
    ({"texts": [None], "images": ["a.png"]}, "no text", "texts"),
    ({"texts": ["a", None], "images": ["a.png"]}, "bad document", "images"),
    ({"texts": ["a"], "images": ["a.png"]}, "bad document", "texts[0]"),
    ({"texts": ["a", None], "images": [None, ["a.png", "b.png"]]}, "bad media reference", "images[1]"),
    (mmc4(image_name="a.png", matched_text_index=1), "bad document", "image_info[0].matched_text_index"),
    (mmc4(image_name="a.png", matched_text_index=True), "bad document", "image_info[0].matched_text_index"),
    (mmc4(matched_text_index=0), "bad media reference", "image_info[0].image_name"),
    ({"text_list": ["a"], "image_info": ["a.png"]}, "bad document", "image_info[0].matched_text_index"),
    ({"text_list": [], "image_info": []}, "no text", "text_list"),
    ({"text": "a", "loss_weight": 0}, "no loss", "loss_weight"),
    ({"text": "a", "image": "a.png", "boxes": [[1, 2]]}, "part of a medium", "boxes"),
    ({"text": "a", "audio": "a.wav"}, "audio not supported", "audio"),
]


@pytest.mark.parametrize(("record", "reason", "field_path"), REFUSED)
def test_document_refusals_name_reason_and_field(record, reason, field_path):
    with pytest.raises(RecordError) as caught:
        read_conversation(record)
    assert (caught.value.reason, caught.value.field_path) == (reason, field_path)


def test_caption_prompt_makes_a_conversation_of_a_caption_alone():
    caption = {"image": "a.png", "caption": "A thing.", "loss_weight": 0.5}
    asked = read_conversation(caption, caption_prompt="What is it?")
    assert asked.messages == [
        {"role": "user", "content": [IMAGE, text("What is it?")]},
        {"role": "assistant", "content": "A thing.", "loss_weight": 0.5},
    ]
    assert asked.media_references == [("image", "a.png")] and not asked.document
    others = [record for name, record, *_ in FORMS if name != "document"]
    for record in ({"text": "no image"}, {"images": ["a.png"], "text": "See <image> here"}, *others):
        assert read_conversation(record, caption_prompt="What is it?").document
    talk = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    assert read_conversation(talk, caption_prompt="What is it?") == read_conversation(talk)


def convert(root: Path, input_path: Path, **options: Any) -> Any:
    (root / "media").mkdir(exist_ok=True)
    return convert_dataset([input_path], ConversionOptions(root / "media", root / "out", **options))


def test_columns_name_captions_and_texts(tmp_path):
    write(tmp_path / "media/a.png", encoded(56, 84, "png"))
    (tmp_path / "in.csv").write_text("url,alt,text\na.png,A thing.,noise\n,No image.,noise\n")
    report = convert(tmp_path, tmp_path / "in.csv", columns="url=image,alt=caption")
    assert (report.samples, report.images, report.refused) == (2, 1, {})
    [row] = open_loader(DataConfig(path=str(tmp_path / "out"), seq_len=64), tiny_checkpoint(), epochs=1)
    assert row.num_samples == 2
    for columns in ("url=image", "alt=caption,text=text", "alt=caption,text=assistant"):
        with pytest.raises(ConvertError, match="--columns"):
            convert(tmp_path, tmp_path / "in.csv", columns=columns)


def test_interleaved_parquet_with_bytes_and_nulls(tmp_path):
    image = encoded(56, 84, "png")
    images = [None, {"bytes": image, "path": None}, None]
    table = pa.Table.from_pylist([{"texts": ["One ", None, "two."], "images": images, "url": "x"}])
    pq.write_table(table, tmp_path / "in.parquet")
    report = convert(tmp_path, tmp_path / "in.parquet")
    assert (report.samples, report.images, report.ignored) == (1, 1, {"records": {"url": 1}})
