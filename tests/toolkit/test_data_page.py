"""``megatron-vl data show`` on records that try to get into the page."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_vl.data.sample.grids import image_grid
from megatron_vl.data.sample.images import image_planes
from megatron_vl.data.sample.pixel_settings import read_pixel_settings
from megatron_vl.spec.families import read_spec
from tests.data.datasets import converted, mixed_records
from tests.data.media import encoded
from tests.tiny import tiny_checkpoint
from toolkit.cli import main
from toolkit.data.page import histogram_bars
from toolkit.data.sample_view import planes_to_pixels
from toolkit.data.statistics import escape_unprintable, read_quarantine

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


def _words(out: Path, *more: str) -> list[str]:
    pixels = ["--data.min_pixels", "3136", "--data.max_pixels", str(28 * 28 * 24)]
    folder = str(tiny_checkpoint("qwen2_5_vl"))
    named = ["--data.path", str(out), "--model.hf", folder, "--data.seq_len", "512", *pixels]
    return ["data", "show", *named, *more]


class Tags(HTMLParser):
    """The tags, attributes and text of a page, whose tags must be closed in order."""

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
    assert main(_words(out, "--html", str(page))) == 0
    capsys.readouterr()
    text = page.read_text()
    tags = Tags(text)

    assert not {"script", "link", "iframe", "object", "base", "form"} & {tag for tag, _ in tags.tags}
    assert not [name for _, attributes in tags.tags for name in attributes if name.startswith("on")]
    named = [
        attributes[name] for _, attributes in tags.tags for name in ("src", "href") if name in attributes
    ]
    assert named and all(source.startswith("data:image/jpeg;base64,") for source in named)
    sizes = {Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))).size for source in named}
    assert len(sizes) > 2
    policy = next(a["content"] for tag, a in tags.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "\x1b" not in text and "\u202e" not in text

    # The attack is there to be read in the text of a sample, and a missing image is counted.
    assert "alert(1)" in tags.text and "<script>alert(1)</script>" in tags.text
    assert "medium missing" in tags.text and CHINESE in tags.text
    # Who speaks, what is trained on, original names and sizes.
    assert {"b", "mark", "svg"} <= {tag for tag, _ in tags.tags}
    assert "assistant" in tags.text and "images/2.img: 94 x 62 in the file, 84 x 56 as seen" in tags.text
    assert re.search("<mark>[^<]*Answer number 2.", text)


def test_show_writes_the_sizes_that_are_missing(out, tmp_path, capsys):
    bare = shutil.copytree(out, tmp_path / "bare", ignore=shutil.ignore_patterns("sizes"))
    assert main(_words(bare, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["samples"] == 10
    assert list((bare / ".nv-meta/sizes").iterdir())


def test_show_counts_all_samples_as_json_and_as_a_table(out, capsys):
    assert main(_words(out, "--json", "--global_batch_size", "1")) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["quarantined"] == {str(out): {"medium missing": 1}} and list(whole["splits"]) == ["train"]
    found = whole["splits"]["train"]
    (source,) = found["sources"].values()
    # Ten records: of each five, one has an image, one text, one two images, one a video, one both.
    assert (found["samples"], source["usable"], source["images"], source["videos"]) == (10, 10, 8, 4)
    described = found["distributions"]
    assert described["images of a sample"]["mean"] == 0.8 and described["videos of a sample"]["p95"] == 1
    assert source["turns"] == 12 and found["left_out"] == {}
    assert described["tokens of a sample"]["mean"] == source["tokens"] / 10
    rows = -(-source["tokens"] // 512)
    assert found["pass"]["rows"] == found["pass"]["steps"]["1"] == rows
    assert described["samples of a row"]["mean"] == pytest.approx(10 / rows)

    assert main(_words(out, "--data.seq_len", "80", "--data.too_long", "drop")) == 0
    printed = capsys.readouterr().out
    longer = 0
    for index in range(10):
        assert main(_words(out, "--sample", f"{index:09d}", "--json")) == 0
        longer += len(json.loads(capsys.readouterr().out)["token_ids"]) > 80
    assert longer and f"10 samples of train, {10 - longer} usable" in printed
    assert f"left out: {longer} ({longer}0.00%) longer than seq_len" in printed
    rows = int(re.search(r"one pass over the data is about (\d+) rows;", printed)[1])
    assert f"; a step of 8 rows reads the data about {8 / rows:.1f} times" in printed


def test_page_that_cannot_be_written_is_refused(out, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(_words(out, "--sample", "000000001", "--html", str(tmp_path / "file/page.html"))) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_dry_run_says_how_many_steps_a_pass_takes(out, tmp_path, capsys):
    words = ["train", "--dry-run", "--data.path", str(out), "--model.hf", str(tiny_checkpoint("qwen2_5_vl"))]
    words += ["--data.pack", "false", "--data.seq_len", "700", "--nproc-per-node", "1"]
    assert main(words) == 0
    line = "one pass over the data is about 10 rows, 2 steps at global_batch_size 8 ("
    assert line in capsys.readouterr().out
    assert main([*words, "--data.path", str(out / "nowhere")]) == 1
    assert "nowhere does not exist; give a folder" in capsys.readouterr().err

    bare = shutil.copytree(out, tmp_path / "bare", ignore=shutil.ignore_patterns("sizes"))
    assert main([*words, "--data.path", str(bare)]) == 0
    printed = capsys.readouterr().out
    assert "the steps of a pass over the data are not known" in printed
    assert "megatron-vl data index" in printed


def test_shown_sample_is_what_the_model_gets(out, capsys):
    assert main(_words(out, "--sample", "000000002", "--json")) == 0
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

    assert main(_words(out, "--sample", "train-000000.tar[0]")) == 0
    printed = capsys.readouterr().out
    assert "\x1b[31m" not in printed and "\u202e" not in printed and "images/0.img: 60 x 40" in printed


def test_show_explains_a_sample_that_is_left_out(out, capsys):
    assert main(_words(out, "--sample", "000000001", "--data.seq_len", "16")) == 1
    assert "longer than seq_len" in capsys.readouterr().out
    for wrong in ("nothing", "train-000000.tar[10]"):
        assert main(_words(out, "--sample", wrong)) == 1
        assert f"has no single sample {wrong}, but none" in capsys.readouterr().err
    assert main(["data", "show", "--data.path", str(out)]) == 2
    assert "give --model.hf, or a run with --config" in capsys.readouterr().err


def test_show_takes_data_set_and_processor_of_a_run(out, tmp_path, capsys):
    run = tmp_path / "run.yaml"
    folder = tiny_checkpoint("qwen2_5_vl")
    run.write_text(f"model: {{hf: {folder}}}\ndata: {{path: {out}, seq_len: 700}}\n")
    assert main(["data", "show", "--config", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seq_len"] == 700


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_images_on_the_page_are_the_pixels_of_the_row(family):
    """Planes are put together again; an own resize with Pillow differs by rounding only."""
    settings = read_pixel_settings(tiny_checkpoint(family))
    data = encoded(75, 130, "png", seed=1)
    grid = image_grid(75, 130, settings)
    seen = planes_to_pixels(image_planes(data, grid, settings), grid, settings)
    side = settings.patch_size
    assert seen.shape == (1, 3, grid.h * side, grid.w * side)
    with Image.open(io.BytesIO(data)) as image:
        own = image.convert("RGB").resize((grid.w * side, grid.h * side), Image.Resampling.BICUBIC)
    apart = (
        seen[0].permute(1, 2, 0).int() - torch.tensor(list(own.getdata())).view(grid.h * side, -1, 3)
    ).abs()
    assert apart.max() <= 4 and apart.float().mean() < 0.6


def test_bars_of_a_histogram_add_up():
    values, equal = np.array([1] * 60 + [2] * 39 + [900]), np.full(100, 0.01)
    shares, labels = zip(*histogram_bars(values, equal), strict=True)
    assert labels == ("1: 60.00%", "2 or more: 40.00%") and shares == pytest.approx((0.6, 0.4))
    assert histogram_bars(np.zeros(100, int), equal) == []
    spread = histogram_bars(np.arange(100, 200), equal)
    assert sum(share for share, _ in spread) == pytest.approx(1) and len(spread) == 30
    assert spread[0][1] == "100 to 102: 3.00%" and spread[-1][1] == "195 to 198 or more: 5.00%"


def test_damaged_quarantine_is_read_as_far_as_it_goes(out, tmp_path):
    run = tmp_path / "quarantine.jsonl"
    line = {"file": "in.json", "record": 1, "id": "", "reason": "r", "detail": "d"}
    run.write_bytes(b"\xff\n[]\n{}\n" + json.dumps(line).encode() + b"\n" + b'{"reason": "cut')
    assert read_quarantine(tmp_path) == {"r": 1}
    assert read_quarantine(tmp_path / "nowhere") == {}
    assert read_quarantine(out) == {"medium missing": 1}


def test_unprintable_characters_are_spelled_out():
    assert escape_unprintable("a\x1b\u202e") == "a\\u001b\\u202e"
