"""Keys that name a part of a medium are refused, those of its origin counted; videos may be images."""

import base64
import json
from pathlib import Path

import pytest

from data_tools.formats import RecordError, read_conversation
from data_tools.formats.medium_limits import FrameSequence
from tests.data.datasets import converted
from tests.data.media import encoded, video, write
from tests.tiny import tiny_checkpoint
from toolkit.cli import main

ANSWER = {"role": "assistant", "content": "It gets brighter."}


def in_part(kind: str = "video", **keys: object) -> dict:
    part = {"type": kind, kind: "a.mp4", **keys}
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}, ANSWER]}


def in_address(**keys: object) -> dict:
    part = {"type": "video_url", "video_url": {"url": "a.mp4", **keys}}
    return {"messages": [{"role": "user", "content": [part]}, ANSWER]}


def listed(turn: dict | None = None, entry: object = "a.mp4", **keys: object) -> dict:
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


def clips(videos: object, **more: object) -> dict:
    turns = [{"from": "human", "value": "<video>What happens?"}, {"from": "gpt", "value": "A cat sleeps."}]
    return {"videos": videos, "conversations": turns, **more}


def part(**fields: object) -> dict:
    asked = [{"type": "video", **fields}, {"type": "text", "text": "What happens?"}]
    return {"messages": [{"role": "user", "content": asked}, ANSWER]}


PAIR = ("a.jpg", "b.jpg")
FORMS = {
    "qwen-vl-utils": (part(video=[*PAIR], sample_fps="1"), FrameSequence(PAIR, 1.0)),
    "qwen-vl-utils before 0.0.12": (part(video=[*PAIR], fps=4), FrameSequence(PAIR, 4.0)),
    "no rate": (part(video=[*PAIR]), FrameSequence(PAIR)),
    "rate of the source": (
        part(video=[*PAIR], raw_fps=30),
        FrameSequence(PAIR),
        ("content parts", "raw_fps"),
    ),
    "llamafactory, ms-swift": (clips([[*PAIR]]), FrameSequence(PAIR)),
    "rate of the record": (clips([[*PAIR]], fps=0.5), FrameSequence(PAIR, 0.5)),
    "table": (clips([[{"path": "a.jpg", "bytes": b"1"}, {"path": "b.jpg"}]]), FrameSequence((b"1", "b.jpg"))),
    "qwen": (clips([[*PAIR]], data_path="x"), FrameSequence(("x/a.jpg", "x/b.jpg"))),
    "file": (part(video="a.mp4", fps=1), "a.mp4"),
    "file of a record": (clips(["a.mp4"], fps=1), "a.mp4", ("records", "fps")),
}


@pytest.mark.parametrize("form", FORMS)
def test_videos_as_images_in_every_form(form):
    record, video, *ignored = FORMS[form]
    read = read_conversation(record)
    assert read.media_references == [("video", video)] and read.ignored_keys == ignored


@pytest.mark.parametrize(
    ("record", "reason", "said"),
    [
        (part(video=[]), "bad media reference", "no frames"),
        (part(video=["a.jpg", 5]), "bad media reference", "is a int"),
        (part(video=[["a.jpg"]]), "bad media reference", "is a list"),
        (part(image=["a.jpg"], type="image"), "bad media reference", "is a list"),
        (part(video=[*PAIR], fps=0), "bad frame rate", "0 is no number of frames a second"),
        (part(video=[*PAIR], fps="fast"), "bad frame rate", "'fast'"),
        (part(video=[*PAIR], sample_fps=True), "bad frame rate", "True"),
        (part(video=[*PAIR], fps=10**400), "bad frame rate", "1000"),
        (clips([[*PAIR]], sample_fps=float("nan")), "bad frame rate", "nan"),
        (clips([*PAIR]), "markers and media differ", "1 <video> in the text, but 2 listed.*a list of them"),
    ],
)
def test_unusable_videos_are_refused(record, reason, said):
    with pytest.raises(RecordError, match=said) as caught:
        read_conversation(record)
    assert caught.value.reason == reason


@pytest.fixture
def media(tmp_path) -> Path:
    """Five images, which are frames 1 to 5 of one clip, an image of another size and one cut short."""
    for number, seed in ((1, 0), (2, 1), (3, 2), (4, 3), (10, 4)):
        write(tmp_path / f"media/clip/frame_{number}.png", encoded(70, 100, seed=seed))
    write(tmp_path / "media/wide.png", encoded(70, 128))
    write(tmp_path / "media/cut.jpg", encoded(70, 100, "jpeg")[:900])
    return tmp_path / "media"


def frames(*numbers: int) -> list[str]:
    return [f"clip/frame_{number}.png" for number in numbers]


def test_videos_as_images_reach_the_model(media, tmp_path, capsys):
    """The rates give Qwen2.5-VL's seconds of a group: 2 / 1 and 2 / 2; five images fill three groups."""
    uri = "data:image/png;base64," + base64.b64encode(encoded(70, 100, seed=2)).decode()
    records = [
        part(video=frames(1, 2, 3, 4, 10), sample_fps=1),
        part(video=frames(1, 2, 3, 4, 10)),
        part(video=[*frames(1, 2), uri, *frames(4, 10)], sample_fps=1),
    ]
    out, report = converted(tmp_path, records)
    assert (report.samples, report.videos, report.assumed_fps, report.quarantined_records) == (3, 3, 1, 0)

    seen = [inspected(out, index, capsys)["media"][0] for index in range(3)]
    found = [(each["frames"], each["fps"], each.get("sampling")) for each in seen]
    assert found == [(5, 1.0, "whole"), (5, 2.0, "whole"), (5, 1.0, "whole")]
    assert [each["grid_thw"][0] for each in seen] == [3, 3, 3]
    assert seen[2]["grid_thw"] == seen[0]["grid_thw"] and seen[2]["tokens"] == seen[0]["tokens"]
    assert [each["name"] for each in seen] == [*2 * ["clip/frame_1.png and 4 more"], ""]


def inspected(out: Path, index: int, capsys, family: str = "qwen2_5_vl") -> dict:
    capsys.readouterr()
    run = ["--data.path", str(out), "--model.hf", str(tiny_checkpoint(family)), "--data.seq_len", "2048"]
    assert main(["data", "show", *run, "--sample", f"{index:09d}", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_unusable_frames_are_named(media, tmp_path):
    write(tmp_path / "secret/1.png", encoded(70, 100))
    (media / "leads_out").mkdir()
    (media / "leads_out/1.png").symlink_to(tmp_path / "secret/1.png")
    write(media / "some.zip", b"PK\x03\x04 and more")
    records = [
        part(video=[*frames(1), "wide.png"]),
        part(video=[*frames(1), "cut.jpg"]),
        part(video=[*frames(1), "none.jpg"]),
        part(video=["leads_out/1.png"]),
        part(video=["../secret/1.png"]),
        part(video="clip"),
        part(video="some.zip"),
        part(image="clip", type="image"),
        part(video=frames(1)),
    ]
    out, report = converted(tmp_path, records)
    lines = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in lines] == [
        *("video does not decode", "video does not decode", "medium missing"),
        *("outside the media root", "outside the media root"),
        *("not a file", "video does not decode", "not a file"),
    ]
    assert {line["field"] for line in lines[:-1]} == {"messages[0].content[0].video"}
    assert lines[-1]["field"] == "messages[0].content[0].image"
    details = [line["detail"] for line in lines]
    assert "wide.png has 128 x 70 pixels (width x height), frame_1.png 100 x 70" in details[0]
    assert "cut.jpg" in details[1] and "none.jpg" in details[2]
    assert report.samples == 1
