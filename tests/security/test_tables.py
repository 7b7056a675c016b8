"""Untrusted tables of questions on their way through `megatron-vl evaluate`."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.media import encoded, write
from tests.data_tools.test_convert import bomb
from toolkit.evaluate.model import Checkpoint
from toolkit.evaluate.table import TableError, check_rows, check_video_rows
from toolkit.evaluate.worker import check_own

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
    check_rows([row(**fields)], tmp_path, LARGEST, "mine")


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
        (
            {
                "image": base64.b64encode(
                    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n" + b" " * 99
                ).decode()
            },
            "column image",
        ),
    ],
)
def test_cells_that_lead_away_or_explode_are_refused(tmp_path, fields, said):
    write(tmp_path / "root/in.png", encoded(40, 40))
    write(tmp_path / "secret.png", encoded(40, 40))
    (tmp_path / "root/link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(TableError, match=f"^mine.tsv: row 2: .*{said}"):
        check_rows([row(index="0"), row(**fields)], tmp_path / "root", LARGEST, "mine")


def test_two_rows_of_one_index_are_refused(tmp_path):
    with pytest.raises(TableError, match="^mine.tsv: row 2: index '1' occurs twice"):
        check_rows([row(), row()], tmp_path, LARGEST, "mine")


def test_a_table_of_ones_own_that_lacks_what_is_needed_is_refused():
    """VLMEvalKit would end with "KeyError: 'answer'" after the last answer, or an empty AssertionError
    at the picture."""
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
        {
            "video": "abc-1.2",
            "video_path": "./video/abc-1.2.mp4",
            "prefix": "video/star/",
            "video_category": "Sports / 1..2",
        },
        {
            "video_paths": "a.mp4;b.mp4",
            "media": "['a.mp4', {'video': 'b.mp4'}]",
            "question": "../../?",
            "frames": 8,
        },
        {"image_path": "DATA/repositories/set/1.jpg", "image": "/9j/4AAQ"},
    ],
)
def test_video_tables_as_they_are_published_are_used(tmp_path, fields):
    check_video_rows(
        [{"index": 0} | {k: str(v).replace("DATA", str(tmp_path)) for k, v in fields.items()}], tmp_path
    )


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
    settings = {
        "dtype": "float32",
        "device": "cpu",
        "min_pixels": None,
        "max_pixels": None,
        "max_new_tokens": 1,
    }
    write(tmp_path / "set/a.png", encoded(40, 40))
    write(tmp_path / "secret.png", encoded(40, 40))
    (tmp_path / "set/link.png").symlink_to(tmp_path / "secret.png")
    model = Checkpoint(hf, settings | {"largest_picture": LARGEST}, [tmp_path / "set"])

    assert (
        model.inputs([{"type": "image", "value": str(tmp_path / "set/a.png")}])["pixel_values"].shape[0] > 0
    )
    for name in ("secret.png", "set/link.png", "set/../secret.png"):
        with pytest.raises(ValueError, match="is not inside"):
            model.inputs([{"type": "image", "value": str(tmp_path / name)}])


GUARDED = """
import collections, io, pathlib, pickle, socket, sys, tempfile, types
from toolkit.evaluate.cage import DENIED, guard
own, other = tempfile.mkdtemp(), tempfile.mkdtemp()
guard(pathlib.Path(own))
for folder in (own, other):
    with open(folder + "/a.pkl", "wb") as file:
        pickle.dump({"a": 1}, file)
assert pickle.load(open(own + "/a.pkl", "rb")) == pickle.load(io.BytesIO(pickle.dumps({"a": 1}))) == {"a": 1}

def refused(what, kind):
    try:
        what()
    except kind:
        return True

assert refused(lambda: pickle.load(open(other + "/a.pkl", "rb")), PermissionError)
assert refused(lambda: socket.create_connection(("192.0.2.1", 80), 1), PermissionError)
assert refused(lambda: socket.getaddrinfo("example.com", 443), PermissionError)
assert DENIED == ["192.0.2.1", "example.com"]
a, b = socket.socketpair()  # processes may still talk to each other

assert eval("1 + 1") == 2 and collections.namedtuple("P", "x")(3).x == 3
y = 4
assert (lambda: eval("y"))() == 4
theirs = types.ModuleType("vlmeval.smp.misc")
exec(compile('''
def evaluate(text): return eval(text)
def execute(text): exec(text)
''', "misc.py", "exec"), vars(theirs))
long = str([(i, "a", -i, 1.5, None, True, {"k": {i}}) for i in range(100)])
literals = ("1", "-1", "'a'", "['a', 'b']", "{'a': [1, 2.5], 'b': (None, True)}", " [1]", "{1, 2}")
for literal in (*literals, "1+2j", "()", long):
    assert theirs.evaluate(literal) == eval(literal), literal
names = ("y", "len('a')", "(1).real", "[i for i in (1,)]", "__import__('os')")
for code in (*names, "lambda: 1", "f'{1:>9}'", "9**9**9"):
    assert refused(lambda: theirs.evaluate(code), ValueError), code
assert refused(lambda: theirs.execute("import os"), ValueError)
"""


def test_a_worker_has_no_network_reads_no_pickle_of_others_and_evaluates_only_literals():
    subprocess.run([sys.executable, "-c", GUARDED], check=True, cwd=ROOT)
