"""What `megatron-vl evaluate` keeps VLMEvalKit and untrusted tables from."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.media import encoded, write
from tests.support.ranks import python_path
from toolkit.evaluate.checkpoint_model import CheckpointModel
from toolkit.evaluate.sandbox import choose_sandbox, copy_data

CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)"


def test_adapter_reads_images_of_the_data_set_only(hf, tmp_path):
    settings = {"dtype": "float32", "min_pixels": None, "max_pixels": None, "max_new_tokens": (1, 1)}
    write(tmp_path / "set/a.png", encoded(40, 40))
    write(tmp_path / "secret.png", encoded(40, 40))
    (tmp_path / "set/link.png").symlink_to(tmp_path / "secret.png")
    model = CheckpointModel(hf, settings, [tmp_path / "set"])

    assert model.encode([{"type": "image", "value": str(tmp_path / "set/a.png")}]).media_items
    for name in ("secret.png", "set/link.png", "set/../secret.png"):
        with pytest.raises(ValueError, match="is not inside"):
            model.encode([{"type": "image", "value": str(tmp_path / name)}])


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


def words_of(program: str, work: Path, network: bool = False) -> list[str]:
    """The sandbox that ``program`` makes; skips the test where it does not work."""
    words, _ = choose_sandbox(work, network)
    if words[:1] != [program]:
        pytest.skip(f"{program} is missing, does not work here, or is not the best sandbox")
    return words


def code_of(*words: object) -> int:
    return subprocess.run(list(map(str, words)), capture_output=True).returncode


def test_sandbox_without_bubblewrap_has_no_network(work, port, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "bwrap" else name)
    words = words_of("unshare", work)
    assert code_of(sys.executable, "-c", CONNECT, port) == 0, "the control failed"
    assert code_of(*words, sys.executable, "-c", CONNECT, port) == 1
    assert choose_sandbox(work, with_network=True)[0] == []


def test_bubblewrap_leaves_the_work_folder_and_a_judges_network(work, port, tmp_path):
    for network in (False, True):
        words = words_of("bwrap", work, network)
        assert code_of(*words, sys.executable, "-c", CONNECT, port) == (0 if network else 1)
        assert code_of(*words, "touch", work / "inside") == 0 and (work / "inside").exists()
        assert code_of(*words, "touch", tmp_path / "outside") != 0
    assert code_of("touch", tmp_path / "outside") == 0, "the control failed"


def test_system_without_a_sandbox_is_named(work, monkeypatch):
    monkeypatch.setenv("PATH", str(work))
    words, what = choose_sandbox(work, with_network=False)
    assert words == [] and what.startswith("WITHOUT A SANDBOX")


@pytest.mark.eval
@pytest.mark.ranks
def test_cell_that_vlmevalkit_executes_changes_nothing_outside(work, tmp_path):
    """VLMEvalKit's `istype` evaluates cells of tables as Python."""
    words = words_of("bwrap", work)
    cell = "[open(sys.argv[1], 'w'), open(sys.argv[2], 'w')]".replace("sys", "__import__('sys')")
    code = f"from vlmeval.smp import istype; istype({cell!r}, list)"
    outside = tmp_path / "outside"
    variables = ["env", f"PYTHONPATH={python_path()}", f"TMPDIR={work}", f"LMUData={work}"]
    code_of(*variables, *words, sys.executable, "-c", code, work / "inside", outside)
    assert (work / "inside").exists(), "the control failed: VLMEvalKit does not execute cells any more"
    assert not outside.exists()


def test_tables_of_a_user_are_copied_and_all_else_is_linked(work, tmp_path, monkeypatch):
    for name in "set.tsv set_cn.tsv other.tsv photos/1.png images/mine/1.png images/set/1.png".split():
        write(tmp_path / "lmu" / name, b"x")
    tables = copy_data("set", tmp_path / "lmu", work)
    data = work / "data"
    assert sorted(path.name for path in tables) == ["set.tsv", "set_cn.tsv"]
    assert not any(path.is_symlink() for path in tables)
    assert (data / "photos").is_symlink() and (data / "images" / "mine").is_symlink()
    assert not (data / "images" / "set").exists(), "images of an earlier table of that name"
