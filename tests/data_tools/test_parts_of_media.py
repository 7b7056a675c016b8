"""Keys that name a part of a medium are refused; those of its cost or origin are counted."""

import json
from pathlib import Path

import pytest

from data_tools.formats import RecordError, read_conversation
from tests.data.media import video, write
from toolkit.cli import main

ANSWER = {"role": "assistant", "content": "It gets brighter."}


def in_part(kind: str = "video", **keys: object) -> dict:
    """A record whose medium is a content part with these keys."""
    part = {"type": kind, kind: "a.mp4", **keys}
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}, ANSWER]}


def in_address(**keys: object) -> dict:
    part = {"type": "video_url", "video_url": {"url": "a.mp4", **keys}}
    return {"messages": [{"role": "user", "content": [part]}, ANSWER]}


def listed(turn: dict | None = None, entry: object = "a.mp4", **keys: object) -> dict:
    """A record with a listed video, and keys beside the turn or the record."""
    question = {"role": "user", "content": "<video>What?", **(turn or {})}
    return {"videos": [entry], "messages": [question, ANSWER], **keys}


REFUSED = [
    (in_part(start=5, end=8), "messages[0].content[0].start"),
    (in_part(frames_indices=[0, 5]), "messages[0].content[0].frames_indices"),
    (in_part("image", boxes=[[1, 2, 3, 4]]), "messages[0].content[0].boxes"),
    (in_address(start_time=3.5), "messages[0].content[0].video_url.start_time"),
    (listed(entry={"path": "a.mp4", "end": 8}), "videos[0].end"),
    (listed(turn={"video_end": 8}), "messages[0].video_end"),
    (listed(video_start=5, video_end=8), "video_start"),
    (listed(grounding="<box>"), "grounding"),
]


@pytest.mark.parametrize(("record", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_parts_of_a_medium_are_refused(record, field):
    with pytest.raises(RecordError, match="is not read") as caught:
        read_conversation(record)
    assert (caught.value.reason, caught.value.field_path) == ("part of a medium", field)


@pytest.mark.parametrize(
    ("record", "ignored"),
    [
        (in_part("image", nframes=4, fps=2), {"nframes", "fps"}),
        (in_part(video_start=None, video_end=None, frames_indices=[], video_metadata={}), set()),
        (in_part(video_start=0, start=0.0), {"start"}),
        (in_part("image", boxes=[], grounding=False), {"grounding"}),
        (in_address(detail="low"), {"detail"}),
        (listed(turn={"start": 5, "end": 8}), {"start", "end"}),
        ({"messages": [{"role": "user", "content": "Hi"}, ANSWER], "grounding": "web"}, {"grounding"}),
    ],
)
def test_cost_origin_and_empty_values_are_not_refused(record, ignored):
    assert {key for _, key in read_conversation(record).ignored_keys} == ignored


def test_clip_is_not_converted_as_the_whole_video(tmp_path: Path):
    write(tmp_path / "m/a.mp4", video(8))
    records = [
        in_part(video_start=0.2, video_end=0.5),
        in_part(video_start=0.7),
        in_part(start=5, end=8),
        listed(video_start=5),
        in_part(nframes=4),
    ]
    (tmp_path / "in.json").write_text(json.dumps(records))
    inputs = ["--input", str(tmp_path / "in.json"), "--media-root", str(tmp_path / "m"), "--workers", "1"]
    assert main(["data", "convert", *inputs, "--out", str(tmp_path / "out")]) == 3
    report = json.loads((tmp_path / "out/report.json").read_text())
    refused = {"part of a medium": 2, "clip outside of its video": 1}
    assert report["samples"] == 2 and list(report["refused"].values()) == [refused]
    assert not report["ignored"]
