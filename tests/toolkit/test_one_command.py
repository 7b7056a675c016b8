"""`megatron-vl train` on records as they are, and on a model's name."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from unittest.mock import create_autospec

import huggingface_hub
import pytest

from data_tools.input_files import find_input_files
from megatron_vl.config import RunConfigError, TrainConfig, parse_config, validate_config
from megatron_vl.data.source.location import LoaderError
from tests.data.media import encoded, write
from tests.data_tools.test_formats import WITH_TOOLS
from tests.support.ranks import python_path, run_module
from toolkit.cli import main
from toolkit.train import prepare
from toolkit.train.options import TrainOptions
from toolkit.train.prepare import (
    convert_once,
    download_model,
    is_hub_name,
    is_records,
    prepare_run,
    with_run_dir,
)


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def questions(folder: Path, count: int = 6, image: str = "dot.png") -> Path:
    write(folder / "media" / "dot.png", encoded(56, 84))
    records = folder / "conversations.json"
    content = [
        {"id": str(i), "query": f"<image>Question {i}?", "response": f"Answer {i}.", "images": [image]}
        for i in range(count)
    ]
    records.write_text(json.dumps(content))
    return records


def prepared(records: Path, model: Path, *words: str, **options: object) -> TrainConfig:
    run_args = [f"--model.hf={model}", f"--data.path={records}", *words]
    run_args = with_run_dir(run_args, parse_config(run_args))
    options = TrainOptions(fields=[], **options)
    config = parse_config(run_args)
    added = prepare_run(run_args, config, options, is_first_node=True)
    assert prepare_run(run_args, config, options, is_first_node=False) == added  # another node finds all
    return parse_config(added)


@pytest.mark.ranks
def test_train_converts_records_and_finds_them_again(tmp_path, tiny_checkpoint):
    records = questions(tmp_path / "raw")
    command = ["train", "--model.hf", tiny_checkpoint("qwen2_5_vl"), "--data.path", records]
    command += ["--media-root", tmp_path / "raw/media", "--global_batch_size", "2", "--log.samples", "true"]
    done = run_module("toolkit", command, cwd=tmp_path, is_group=False)
    assert "6 of 6 records converted" in done.stderr
    lines = (tmp_path / "runs/conversations/samples.jsonl").read_text().splitlines()
    keys = [key for line in lines for row in json.loads(line)["rows"] for key in row]
    assert sorted(keys) == [f"{i:09d}" for i in range(6)]  # each exactly once
    assert "1 step: 1 pass over the data, at most 4,096 tokens" in done.stdout
    command += ["--steps", "1"]
    again = run_module("toolkit", command, cwd=tmp_path, is_group=False)
    assert "converted from" in again.stderr and "nothing to do" in again.stdout
    assert re.search(r"^1 step: about \d\d\.\d passes over the data", again.stdout, re.MULTILINE)
    refused = run_module("toolkit", [*command, "--data.seq_len", "9"], cwd=tmp_path, is_group=False)
    assert refused.returncode == 1 and refused.stdout == "", refused
    assert "data.seq_len 9: 6 of 6, the longest of 51 tokens. Raise data.seq_len, or" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_preparation_chooses_what_the_user_leaves_out(tmp_path, tiny_checkpoint):
    records, model = questions(tmp_path / "raw", image="media/dot.png"), tiny_checkpoint("qwen2_5_vl")
    config = prepared(records, model)
    assert config.checkpoint.dir == "runs/conversations" and config.data.path == "runs/conversations/data"
    assert config.data.seq_len == prepare.ROW_TOKENS[0]
    stated = prepared(records, model, "--data.seq_len=512", "--checkpoint.dir=runs/mine")
    assert (stated.data.seq_len, stated.checkpoint.dir) == (512, "runs/mine")
    words = [f"--data.path={records}", "--checkpoint.export_hf=last"]  # of a run in the default folder
    validate_config(parse_config(with_run_dir(words, parse_config(words))), 1)
    blend = json.dumps([{"path": "a/train", "weight": 1}, {"path": "b/charts", "weight": 2}])
    named = {"a/train": "runs/train", "b.yaml": "runs/b", blend: "runs/train+charts"}
    for path, run_dir in {**named, "synthetic:text": "", "": ""}.items():
        words = [f"--data.path={path}"]
        assert parse_config(with_run_dir(words, parse_config(words))).checkpoint.dir == run_dir


@pytest.mark.full
def test_limit_of_64_open_files_loses_no_record_and_is_named(tmp_path, tiny_checkpoint) -> None:
    words = ["train", "--platform", "cpu", "--model.hf", tiny_checkpoint("qwen2_5_vl")]
    words += ["--data.path", questions(tmp_path / "raw"), "--media-root", tmp_path / "raw" / "media"]
    limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", sys.executable, "-m", "megatron_vl", *words]
    environment = os.environ | {"PYTHONPATH": python_path()}
    done = subprocess.run(limited, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "6 of 6 records converted" in done.stderr and "quarantine.jsonl" not in done.stderr
    assert done.returncode == 0 or "raise the limit of open files (`ulimit -n`) where" in done.stderr


@pytest.mark.parametrize(
    "record,options,texts",
    [
        ({"q": "Which?", "a": "That.", "pic": "dot.png"},
         {"columns": "q=user,a=assistant,pic=image", "missing_markers": "first"}, ["Which?", "That."]),
        ({"image": "dot.png", "caption": "A dot."},
         {"caption_prompt": "What is it?"}, ["What is it?", "A dot."]),
    ],
)  # fmt: skip
def test_options_for_records_reach_the_samples(record, options, texts, tmp_path, tiny_checkpoint):
    records = questions(tmp_path / "raw", count=0)
    records.write_text(json.dumps([record]))
    roots = [tmp_path / "raw" / "media"]
    config = prepared(records, tiny_checkpoint("qwen2_5_vl"), media_root=roots, **options)
    with tarfile.open(next(Path(str(config.data.path)).glob("*.tar"))) as shard:
        sample = next(shard.extractfile(member).read() for member in shard if member.name.endswith(".json"))
    user, assistant = json.loads(sample)["messages"]
    image, question = user["content"]
    assert image["type"] == "image" and [question["text"], assistant["content"]] == texts


def test_validation_split_is_part_of_what_was_converted(tmp_path, tiny_checkpoint, capsys):
    records, model = questions(tmp_path / "raw", image="media/dot.png"), tiny_checkpoint("qwen2_5_vl")
    prepared(records, model, val_fraction=0.5)
    assert "6 of 6 records converted, 3 of them for validation" in capsys.readouterr().err
    with pytest.raises(RunConfigError, match="was converted with --val-fraction 0.5, not unset"):
        prepared(records, model)
    other = questions(tmp_path / "other", image="media/dot.png", count=5)
    known = rf"was converted from other records \({records}\) than {other} holds now"
    with pytest.raises(RunConfigError, match=known):
        prepared(other, model, val_fraction=0.5)


def test_dry_run_answers_for_unconverted_records(tmp_path, tiny_checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    records = questions(tmp_path / "raw", count=300)
    words = ["train", "--dry-run", f"--model.hf={tiny_checkpoint('qwen2_5_vl')}", f"--data.path={records}"]
    assert main(words) == 1
    refusal = f"256 of 256 records cannot be used.*give another folder than {tmp_path}/raw with --media-root"
    assert re.search(refusal, capsys.readouterr().err)
    assert main([*words, "--media-root", str(tmp_path / "raw" / "media")]) == 0
    shown = capsys.readouterr()
    assert re.search(r"one pass over the data is about [1-7] rows?, 1 step at", shown.out)
    assert "fits: " in shown.out and "8 rows, 16,384 tokens" in shown.out  # rows of 2,048
    note = f"{records} is not converted yet; what follows holds for its first 256 records"
    assert note in shown.err and not (tmp_path / "runs").exists()


def test_records_that_change_are_refused_and_unusable_ones_are_converted_again(tmp_path, tiny_checkpoint):
    records, model = questions(tmp_path / "raw"), tiny_checkpoint("qwen2_5_vl")
    unusable = "6 of 6 records cannot be used.*dot.png does not exist.*--media-root"
    with pytest.raises(RunConfigError, match=unusable):
        prepared(records, model)
    media = [tmp_path / "raw" / "media"]
    prepared(records, model, media_root=media)

    # The records are read otherwise, so the data set is another one.
    with pytest.raises(RunConfigError, match="was converted with --missing-markers refuse, not first"):
        prepared(records, model, media_root=media, missing_markers="first")

    text = records.read_text()
    records.write_text(text)  # another time, the same records
    prepared(records, model, media_root=media)
    records.write_text(text.replace("Answer 3", "Answer 4"))
    with pytest.raises(RunConfigError, match="was converted from other records"):
        prepared(records, model, media_root=media)
    (tmp_path / "runs/conversations/data/source.json").unlink()
    with pytest.raises(RunConfigError, match="was not converted from"):
        convert_once(records, Path("runs/conversations/data"), TrainOptions(fields=[]))
    records.unlink()
    os.mkfifo(records)  # read twice, the second time without end
    with pytest.raises(RunConfigError, match="is a named pipe.*data convert --input"):
        prepared(records, model, media_root=media)


def test_records_without_samples_are_refused_with_the_template_that_writes_them(tiny_checkpoint, capsys):
    model = tiny_checkpoint("qwen2_vl")
    dry_run = ["train", "--dry-run", "--model.hf", str(model), "--data.path", "tools.json"]
    Path("tools.json").write_text(json.dumps([WITH_TOOLS["openai"]] * 3))
    with pytest.raises(LoaderError, match="no sample.*3 not written by the chat template.*qwen2_vl_tools"):
        prepared(Path("tools.json"), model)
    assert main(["data", "show", "--data.path", "runs/tools/data", "--model.hf", str(model)]) == 1
    assert "no sample of runs/tools/data can be used" in capsys.readouterr().err
    shutil.rmtree("runs")
    assert main(dry_run) == 1 and "qwen2_vl_tools writes tools" in capsys.readouterr().err

    template = "--data.chat_template=qwen2_vl_tools"
    assert prepared(Path("tools.json"), model, template).data.seq_len == prepare.ROW_TOKENS[0]
    assert main([*dry_run, template]) == 0 and "8 rows, 16,384 tokens" in capsys.readouterr().out


def test_nodes_wait_for_the_conversion_of_the_first(tmp_path, capsys):
    # What an earlier start left is not taken: the first node is about to replace it.
    source_file = write(tmp_path / "data" / prepare.SOURCE_FILE, b'{"usable": false}')

    def convert() -> None:
        source_file.write_text('{"usable": true}')
        prepare.note_row_length(tmp_path / "data", 512)

    threading.Timer(0.5, convert).start()
    prepare.wait_for_dataset(tmp_path / "data", ["usable", "seq_len"])
    assert "waiting for the first node" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a.jsonl", True), ("a.csv", True), ("a.tsv", True), ("b.parquet", True), ("a.json.gz", True),
     ("blend.yaml", False), ("synthetic:images", False), ("msc://p/a.json", False), ("", False)],
)  # fmt: skip
def test_files_of_records_are_recognised(path: str, expected: bool):
    assert is_records(path) is expected


def test_folders_of_records_are_no_data_sets(tmp_path):
    assert not is_records(str(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    assert is_records(str(tmp_path)) and is_records(f"{tmp_path}/dataset_info.json:a,b")
    (tmp_path / ".nv-meta").mkdir()
    assert not is_records(str(tmp_path))

    # Records may lie in folders of the folder, but not among those of a data set, nor in hidden ones.
    (tmp_path / "set/part-0/.nv-meta").mkdir(parents=True)
    for name in ("set/part-0/report.json", "set/.cache/a.json", "deep/a/b.jsonl"):
        write(tmp_path / name, b"{}")
    assert not is_records(f"{tmp_path}/set") and is_records(f"{tmp_path}/deep")
    (tmp_path / "set/x.json").write_text("{}")
    assert [file.path.name for file in find_input_files([tmp_path / "set"])] == ["x.json"]


def test_model_is_downloaded_by_its_name(monkeypatch):
    Path("tests").mkdir()
    assert is_hub_name("Qwen/Qwen2.5-VL-7B-Instruct")
    assert not any(map(is_hub_name, ("checkpoints/a", "checkpoints/a/b", "", "/abs/dir", "tests/data")))
    wanted = "Org/Other does not exist; give .*hf download Org/Other --local-dir checkpoints/Other"
    with pytest.raises(RunConfigError, match=f"{wanted}.*; --dry-run downloads nothing"):
        download_model("Org/Other", local_files_only=True)
    with pytest.raises(RunConfigError, match=f"{wanted}.*; it cannot be downloaded: "):
        download_model("Org/Other")

    download = create_autospec(huggingface_hub.snapshot_download, return_value="/cache/Org/Model")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert download_model("Org/Model") == "/cache/Org/Model"
    [name], options = download.call_args
    assert name == "Org/Model" and "*.bin" in options["ignore_patterns"] and not options["local_files_only"]
