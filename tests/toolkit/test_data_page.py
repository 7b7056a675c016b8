"""``megatron-vl data show`` on records that try to get into the page."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from megatron_vl.spec.families import read_spec
from tests.data.datasets import converted, mixed_records
from tests.tiny import tiny_checkpoint
from toolkit.cli import main
from toolkit.data.statistics import read_quarantine

ATTACK = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e"
"""HTML, a colour of the terminal, and a mark that turns the direction of writing."""

CHINESE = "图片里有一只猫，龘。"
"""Each character takes several tokens of the small tokenizer."""


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    records = mixed_records(folder / "media", 10)
    records[0]["conversations"][1]["value"] = ATTACK
    records[1]["conversations"][1]["value"] = CHINESE
    missing = {"id": 7, "image": f"{ATTACK}.png", "conversations": records[0]["conversations"]}
    return converted(folder, [*records, missing])[0]


def show(out: Path, *more: str) -> int:
    words = ["--data.path", str(out), "--model.hf", str(tiny_checkpoint("qwen2_5_vl"))]
    words += ["--data.seq_len", "512", "--data.min_pixels", "3136", "--data.max_pixels", str(28 * 28 * 24)]
    return main(["data", "show", *words, *more])


class Tags(HTMLParser):
    """Tags, attributes and text of a page, whose tags must be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open.pop() != tag:
            pass

    def handle_data(self, data):
        self.text += data


def test_page_shows_the_data_and_runs_none_of_it(out, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert show(out, "--html", str(page)) == 0
    capsys.readouterr()
    text = page.read_text()
    tags = Tags(text)

    assert not {"script", "link", "iframe", "object", "base", "form"} & {tag for tag, _ in tags.tags}
    attributes = [item for _, found in tags.tags for item in found.items()]
    assert not [name for name, _ in attributes if name.startswith("on")]
    named = [value for name, value in attributes if name in ("src", "href")]
    assert named and all(source.startswith("data:image/jpeg;base64,") for source in named)
    sizes = {Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))).size for source in named}
    assert len(sizes) > 2
    policy = next(a["content"] for tag, a in tags.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "\x1b" not in text and "\u202e" not in text

    # The attack is there to be read in the text of a sample, and a missing image is counted.
    assert "alert(1)" in tags.text and "<script>alert(1)</script>" in tags.text
    assert "medium missing" in tags.text and CHINESE in tags.text
    assert {"b", "mark", "svg"} <= {tag for tag, _ in tags.tags}
    assert "assistant" in tags.text and "images/2.img: 94 x 62 in the file, 84 x 56 as seen" in tags.text
    assert re.search("<mark>[^<]*Answer number 2.", text)


def test_show_counts_all_samples_as_json_and_as_a_table(out, capsys):
    assert show(out, "--json", "--global_batch_size", "1") == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["quarantined"] == {str(out): {"medium missing": 1}} and list(whole["splits"]) == ["train"]
    found = whole["splits"]["train"]
    (source,) = found["sources"].values()
    # Of each five records, one has an image, one text, one two images, one a video, one both.
    assert (found["samples"], source["usable"], source["images"], source["videos"]) == (10, 10, 8, 4)
    described = found["distributions"]
    assert described["images of a sample"]["mean"] == 0.8 and described["videos of a sample"]["p95"] == 1
    assert source["turns"] == 12 and found["left_out"] == {}
    assert described["tokens of a sample"]["mean"] == source["tokens"] / 10
    assert found["pass"]["rows"] == -(-source["tokens"] // 512)

    assert show(out, "--data.seq_len", "80", "--data.too_long", "drop") == 0
    printed = capsys.readouterr().out
    longer = 0
    for index in range(10):
        assert show(out, "--sample", f"{index:09d}", "--json") == 0
        longer += len(json.loads(capsys.readouterr().out)["token_ids"]) > 80
    assert longer and f"10 samples of train, {10 - longer} usable" in printed
    assert f"left out: {longer} ({longer}0.00%) longer than seq_len" in printed
    assert re.search(r"one pass over the data is about [2-7] rows, 1 step at global_batch_size 8", printed)


def test_shown_sample_is_what_the_model_gets(out, capsys):
    assert show(out, "--sample", "000000002", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["grid_thw"] for item in found["media"]] == [[1, 4, 6], [1, 4, 6]]
    # Files 2.img (62 x 94, rounded to 56 x 84) and 0.img (40 x 60, grown to the least area).
    assert [(item["height"], item["width"]) for item in found["media"]] == [(62, 94), (40, 60)]
    assert [item["resized"] for item in found["media"]] == [[56, 84], [56, 84]]
    assert [item["name"] for item in found["media"]] == ["images/2.img", "images/0.img"]
    assert found["token_ids"].count(read_spec(tiny_checkpoint("qwen2_5_vl")).image_token_id) == 12
    pieces = [piece for turn in found["turns"] for piece in turn["pieces"]]
    assert "".join(text for text, on in pieces if on) == "Answer number 2.<|im_end|>" * 2
    assert [text for text, on in pieces if text.startswith("[")] == ["[image: 6 tokens]"] * 2
    assert [turn["role"] for turn in found["turns"]] == ["system", *["user", "assistant"] * 2]

    assert show(out, "--sample", "train-000000.tar[0]") == 0
    printed = capsys.readouterr().out
    assert "\x1b[31m" not in printed and "\u202e" not in printed and "images/0.img: 60 x 40" in printed


def test_show_explains_a_sample_that_is_left_out(out, capsys):
    assert show(out, "--sample", "000000001", "--data.seq_len", "16") == 1
    assert "longer than seq_len" in capsys.readouterr().out
    for wrong in ("nothing", "train-000000.tar[10]"):
        assert show(out, "--sample", wrong) == 1
        assert f"has no single sample {wrong}, but none" in capsys.readouterr().err
    assert main(["data", "show", "--data.path", str(out)]) == 2
    assert "give --model.hf, or a run with --config" in capsys.readouterr().err


def test_damaged_quarantine_is_read_as_far_as_it_goes(tmp_path):
    (tmp_path / "quarantine.jsonl").write_bytes(b'\xff\n[]\n{}\n{"id": "", "reason": "r"}\n{"reason": "cut')
    assert read_quarantine(tmp_path) == {"r": 1}
    assert read_quarantine(tmp_path / "nowhere") == {}
