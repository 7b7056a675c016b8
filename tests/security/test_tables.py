"""A table of questions from anybody on its way through `megatron-vl evaluate`."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.media import encoded, write
from tests.data_tools.test_convert import bomb
from toolkit.evaluate.model import Checkpoint
from toolkit.evaluate.table import TableError, check_own, check_rows, check_video_rows

ROOT = Path(__file__).resolve().parents[2]
LARGEST = 10**6
GOOD = base64.b64encode(encoded(40, 40)).decode()


def row(**fields: object) -> dict[str, object]:
    return {"index": "1", "image": GOOD} | fields


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"index": 12},
        {"index": "physics_3-a"},
        {"image": [GOOD, GOOD], "image_path": ["a/1.png", "a/2.png"]},
        {"image": f"['{GOOD}']"},
        {"image": "1"},
        {"image": None, "image_path": "inside.png"},
        {"image": float("nan"), "image_path": "sub/inside.png"},
    ],
)
def test_tables_as_they_are_published_are_used(tmp_path, fields):
    for name in ("inside.png", "sub/inside.png"):
        write(tmp_path / name, encoded(40, 40))
    check_rows([row(**fields)], tmp_path, LARGEST)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"index": "../../escape"}, "index"),
        ({"index": "__import__('os').system('true')"}, "index"),
        ({"index": "/tmp/x"}, "index"),
        ({"index": ""}, "index"),
        ({"image_path": "../../escape.png"}, "image_path"),
        ({"image_path": "/tmp/escape.png"}, "image_path"),
        ({"image_path": ["a.png", "a/../../escape.png"]}, "image_path"),
        ({"image": None, "image_path": "../secret.png"}, "image_path"),
        ({"image": None, "image_path": "link.png"}, "image_path"),
        ({"image": None, "image_path": "/etc/passwd"}, "image_path"),
        ({"image": None, "image_path": "https://example.com/a.png"}, "image_path"),
        ({"image": "[__import__('os').getcwd()]"}, "list of strings"),
        ({"image": "[" * 100_000}, "list of strings"),
        ({"image": [1, 2]}, "strings"),
        ({"image": "x" * 100}, "column image"),
        ({"image": base64.b64encode(bomb(60_000, 60_000)).decode()}, "pixels"),
        ({"image": base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n" + b" " * 99).decode()}, "column image"),
    ],
)
def test_cells_that_lead_away_or_explode_are_refused(tmp_path, fields, said):
    write(tmp_path / "root/in.png", encoded(40, 40))
    write(tmp_path / "secret.png", encoded(40, 40))
    (tmp_path / "root/link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(TableError, match=said):
        check_rows([row(index="0"), row(**fields)], tmp_path / "root", LARGEST)


def test_two_rows_of_one_index_are_refused(tmp_path):
    with pytest.raises(TableError, match="^mine.tsv: row 2: index '1' is there twice"):
        check_rows([row(), row()], tmp_path, LARGEST, "mine")


def test_a_table_of_ones_own_that_lacks_what_is_needed_is_refused():
    """VLMEvalKit ends with "KeyError: 'answer'" behind the last answer, and with an empty AssertionError at the picture."""
    good = row(question="What?", A="a cat", B="a cup", answer="A")
    check_own([good, good | {"index": 2, "image": "1"}], "mine", scored=True)
    unanswered = {name: cell for name, cell in good.items() if name != "answer"}
    check_own([unanswered], "mine", scored=False)
    with pytest.raises(TableError, match="^mine.tsv: no column answer; it has index, image, question, A, B$"):
        check_own([unanswered], "mine", scored=True)
    with pytest.raises(TableError, match="no column index, question; it has id"):
        check_own([{"id": "1", "prompt": "What?"}], "mine", scored=True)
    with pytest.raises(TableError, match="row 2: column image: 'photo.jpg' is neither"):
        check_own([good, good | {"index": "2", "image": "photo.jpg"}], "mine", scored=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"video": "abc-1.2", "video_path": "./video/abc-1.2.mp4", "prefix": "video/star/", "video_category": "Sports / 1..2"},
        {"video_paths": "a.mp4;b.mp4", "media": "['a.mp4', {'video': 'b.mp4'}]", "question": "../../?", "frames": 8},
        {"image_path": "DATA/repositories/set/1.jpg", "image": "/9j/4AAQ"},
    ],
)
def test_video_tables_as_they_are_published_are_used(tmp_path, fields):
    check_video_rows([{"index": 0} | {k: str(v).replace("DATA", str(tmp_path)) for k, v in fields.items()}], tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"video": "../../escape"},
        {"video": "/tmp/escape"},
        {"video_path": "./video/../../escape.mp4"},
        {"video_paths": "a.mp4;/etc/passwd"},
        {"prefix": ".."},
        {"media": "['a.mp4', ['../b.mp4']]"},
        {"media": "{'video': '/b.mp4'}"},
        {"video": "a\0b"},
        {"index": "../x"},
        {"original_index": "__import__('os').getcwd()"},
    ],
)
def test_cells_of_video_tables_that_lead_away_are_refused(tmp_path, fields):
    with pytest.raises(TableError, match="row 2"):
        check_video_rows([{"index": 0, "video": "a"}, {"index": 1, "video": "a"} | fields], tmp_path)


def test_the_adapter_reads_pictures_of_the_data_set_only(hf, tmp_path):
    settings = {"dtype": "float32", "device": "cpu", "min_pixels": None, "max_pixels": None, "max_new_tokens": 1}
    write(tmp_path / "set/a.png", encoded(40, 40))
    write(tmp_path / "secret.png", encoded(40, 40))
    (tmp_path / "set/link.png").symlink_to(tmp_path / "secret.png")
    model = Checkpoint(hf, settings | {"largest_picture": LARGEST}, [tmp_path / "set"])
    assert model.inputs([{"type": "image", "value": str(tmp_path / "set/a.png")}])["pixel_values"].shape[0] > 0
    for name in ("secret.png", "set/link.png", "set/../secret.png"):
        with pytest.raises(ValueError, match="is not inside"):
            model.inputs([{"type": "image", "value": str(tmp_path / name)}])


GUARDED = """
import pathlib, socket, sys
from toolkit.evaluate.worker import guard
import collections, io, pickle, tempfile
own, other = tempfile.mkdtemp(), tempfile.mkdtemp()
guard(pathlib.Path(own))
for folder in (own, other):
    with open(folder + "/a.pkl", "wb") as file:
        pickle.dump({"a": 1}, file)
assert pickle.load(open(own + "/a.pkl", "rb")) == pickle.load(io.BytesIO(pickle.dumps({"a": 1}))) == {"a": 1}
try:
    pickle.load(open(other + "/a.pkl", "rb"))
except PermissionError:
    pass
else:
    sys.exit("a pickle of others was read")
assert eval("1 + 1") == 2 and collections.namedtuple("P", "x")(3).x == 3
y = 4
assert (lambda: eval("y"))() == 4
for reach in (lambda: socket.create_connection(("192.0.2.1", 80), 1), lambda: socket.getaddrinfo("example.com", 443)):
    try:
        reach()
    except PermissionError:
        pass
    else:
        sys.exit("the network was asked")
a, b = socket.socketpair()  # processes may still talk to each other
"""


def test_a_worker_has_no_network_and_reads_no_pickle_of_others():
    subprocess.run([sys.executable, "-c", GUARDED], check=True, cwd=ROOT)


VLMEVAL = pytest.mark.skipif(importlib.util.find_spec("vlmeval") is None, reason="VLMEvalKit is not installed: make eval")


CONTROLLED = """
import os, sys
from vlmeval.smp import istype
mark, expression, job = sys.argv[1:]
istype(expression, int)  # VLMEvalKit by itself: it executes the cell
assert os.path.exists(mark), "the control failed"
os.remove(mark)
from toolkit.evaluate.worker import main
main(job, "0")
"""


@VLMEVAL
def test_vlmevalkit_executes_no_cell(tmp_path, mark):
    """Its `istype` and `toliststr` evaluate cells as Python; a worker refuses the table before a model is loaded."""
    (tmp_path / "table.tsv").write_text(f"index\timage\tquestion\tA\tB\tanswer\n{mark.expression}\t{GOOD}\t?\ta\tb\tA\n")
    job = {"data": "table", "root": str(tmp_path), "limit": None, "settings": {"largest_picture": LARGEST}, "processes": 2}
    (tmp_path / "job.json").write_text(json.dumps(job | {"checkpoints": {}, "work": str(tmp_path)}))
    command = [sys.executable, "-c", CONTROLLED, str(mark.path), mark.expression, str(tmp_path / "job.json")]
    environment = os.environ | {"LMUData": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 3 and "index" in done.stdout.splitlines()[-1], done.stdout[-1500:] + done.stderr[-1500:]
