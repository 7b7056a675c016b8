"""Answers under tensor and pipeline parallelism equal those of transformers' ``generate``,
token for token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.convert import convert_adapter, convert_weights, export_weights
from data_tools.formats import RecordError, read_prompt
from megatron_vl.errors import UserError
from megatron_vl.weights.run_folder import Lineage, write_lineage
from megatron_vl.weights.weight_reader import WeightReader
from tests.converters.peft_models import all_targets, peft_folder
from tests.support.run_json import write_run_json
from toolkit.cli import main
from toolkit.demo.demo_data import write_raw_data
from toolkit.demo.reference import DemoReference, read_sharegpt_sample
from toolkit.generate.answers import checkpoint_video_rules
from toolkit.generate.command import answer_lines, answer_text

TOKENS = 12
IDS = ("astronaut", "two_images", "text_only", "video")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("qwen2_5_vl", ("--tp", "2"), marks=pytest.mark.full),
        ("qwen3_vl", ("--pp", "2", "--layers", "1,3")),
        ("qwen3_vl_moe", ("--ep", "2", "--batch", "3")),
        ("qwen3_vl_moe", ("--tp", "2", "--etp", "2", "--batch", "3")),
        ("qwen3_5", ("--tp", "2", "--thinking", "off")),
        pytest.param("qwen3_5", ("--pp", "2", "--layers", "1,3", "--thinking", "on"), marks=pytest.mark.full),
        pytest.param("qwen3_5_moe", ("--ep", "2", "--batch", "3"), marks=pytest.mark.full),
    ],
    ids=["TP2", "PP2", "EP2", "TP2-ETP2", "TP2-linear", "PP2-linear", "EP2-linear"],
)
def test_greedy_answers_are_those_of_transformers(
    family, layout, tiny_checkpoint, tmp_path: Path, capsys, request
):
    """Answers a picture, two pictures, text alone and a video together; with experts, three at a time from
    two files, and on two replicas, one of which has one prompt less in each round. Qwen3.5 has its released
    chat template, which writes the block of thinking into the prompt, closed or open."""
    if family != "qwen3_vl":  # its ranks are started as a user's are
        request.getfixturevalue("forked_groups")
    hf = tiny_checkpoint(family, dtype=torch.float32, max_pixels=252 * 252)
    asked, begun = {}, False
    if family.startswith("qwen3_5"):
        hf = with_template(hf, tmp_path / "hf")
        asked = {"enable_thinking": False} if "off" in layout else {}
        begun = "off" not in layout
    experts = {"ep": 4} if family.endswith("_moe") else {}
    convert_weights(hf, tmp_path / "weights", {"tp": 1, "pp": 4} | experts)
    conversations = json.loads(write_raw_data(tmp_path / "raw").read_text())
    records = [next(record for record in conversations if record["id"] == name) for name in IDS]
    for record in records:
        record["conversations"] = record["conversations"][:2]
    files = [tmp_path / "raw" / "media" / "first.jsonl", tmp_path / "raw" / "media" / "second.jsonl"]

    for file, some in zip(files, (records[:2], records[2:]), strict=True):  # media are sought beside the file
        file.write_text("".join(json.dumps(record) + "\n" for record in some))
    common = [
        "--checkpoint",
        tmp_path / "weights",
        "--hf",
        hf,
        "--prompt-file",
        files[0],
        "--prompt-file",
        files[1],
    ]

    sampling = ["--video-max-frames", 8, "--max-new-tokens", TOKENS, "--json", "--platform", "cpu"]
    assert main(["generate", *map(str, (*common, *sampling, *layout))]) == 0
    said = capsys.readouterr()
    answers = json.loads(said.out)
    for number, answer in enumerate(answers, 1):
        cut = f"answer {number} was cut after {TOKENS} tokens; raise --max-new-tokens" in said.err
        assert cut == (answer["thinking"] is None and not answer["finished"])

    reference = DemoReference(hf, video_fps=2.0, video_max_frames=8)
    for record, answer in zip(records, answers, strict=True):
        first = record | {"conversations": record["conversations"][:1]}
        messages, images, videos = read_sharegpt_sample(first, tmp_path / "raw" / "media")
        text = reference.processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **asked
        )
        assert text.endswith("<think>\n") == begun, record["id"]
        batch = reference._processor_batch(text, images, videos)
        tokens = reference.model.generate(
            **batch, do_sample=False, repetition_penalty=1.0, max_new_tokens=TOKENS
        )
        assert answer["prompt_tokens"] == batch["input_ids"].shape[1], record["id"]
        assert answer["tokens"] == tokens[0, batch["input_ids"].shape[1] :].tolist(), record["id"]
        said = reference.processor.decode(tokens[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        # No tiny model closes the block within a few tokens.
        assert (answer["text"], answer["thinking"]) == (("", said.strip()) if begun else (said, None))

    assert len({tuple(answer["tokens"]) for answer in answers}) == len(answers)


def with_template(hf: Path, folder: Path) -> Path:
    """A copy of a checkpoint with the chat template of Qwen3.5-9B, as released."""
    shutil.copytree(hf, folder)
    (folder / "chat_template.json").unlink()
    template = Path(__file__).resolve().parents[1] / "hf_configs" / "Qwen3.5-9B.chat_template.jinja"
    shutil.copy(template, folder / "chat_template.jinja")
    return folder


@pytest.mark.ranks
def test_adapters_answer_like_the_merged_model(forked_groups, tiny_checkpoint, tmp_path: Path, capsys):
    """Those of a PEFT folder and those of Megatron weights, split."""
    hf = tiny_checkpoint("qwen3_vl", dtype=torch.float32)
    peft_folder(tmp_path / "adapter", hf, lora_alpha=40, **all_targets(hf))
    convert_weights(hf, tmp_path / "base")
    convert_adapter(tmp_path / "adapter", hf, tmp_path / "factors", {"tp": 2})
    export_weights(tmp_path / "adapter", hf, tmp_path / "merged", merges_adapter=True)
    convert_weights(tmp_path / "merged", tmp_path / "whole")

    answers = {}
    prompt = ("--hf", hf, "--prompt", "What is in this picture?", "--max-new-tokens", TOKENS, "--json")
    for name, words in {
        "base": ("base",),
        "merged": ("whole",),
        "peft": ("base", "--adapter", tmp_path / "adapter"),
        "factors": ("base", "--adapter", tmp_path / "factors", "--tp", 2),
    }.items():
        checkpoint = ("--checkpoint", tmp_path / words[0], *words[1:])
        assert main(["generate", *map(str, (*checkpoint, *prompt)), "--platform", "cpu"]) == 0
        answers[name] = json.loads(capsys.readouterr().out)[0]["tokens"]
    assert answers["peft"] == answers["factors"] == answers["merged"] != answers["base"]

    words = ("generate", "--checkpoint", tmp_path / "base", "--adapter", tmp_path / "whole", *prompt)
    assert main([*map(str, words), "--platform", "cpu"]) == 1
    assert "holds a whole model and no adapters; give it as --checkpoint alone" in capsys.readouterr().err
    words = ("generate", "--checkpoint", tmp_path / "factors", *prompt)
    assert main([*map(str, words), "--platform", "cpu"]) == 1
    assert "no whole model; give it as --adapter (lora.adapter of a run)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("thinking", "shown"), [(None, "Rain."), ("Clouds.", "<think>\nClouds.\n</think>\n\nRain.")]
)
def test_thinking_is_printed_if_asked_for(thinking, shown):
    answer = {"text": "Rain.", "thinking": thinking}
    assert answer_text(answer, show_thinking=True) == shown
    assert answer_text(answer, show_thinking=False) == "Rain."


def test_answers_alone_are_printed_and_cut_ones_are_marked():
    whole = {"text": "Rain.", "thinking": None, "finished": True}
    cut = whole | {"text": "Rain and", "finished": False}
    assert answer_lines([whole, cut], show_thinking=False) == ["[1] Rain.", "[2, cut] Rain and"]
    assert answer_lines([cut], show_thinking=False) == ["Rain and"]


def test_a_prompt_is_what_comes_before_the_answer():
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert (
        read_prompt({"messages": turns}).messages
        == turns[:1]
        == read_prompt({"messages": turns[:1]}).messages
    )
    pictures = {
        "role": "user",
        "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}],
    }
    assert read_prompt({"messages": [pictures, turns[1]]}).media_references == [("image", "a.png")]
    for wrong in ([turns[1]], [{"role": "system", "content": "Be brief."}], []):
        with pytest.raises(RecordError):
            read_prompt({"messages": wrong})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "Hi", "--image", "nowhere.png"], "nowhere.png does not exist"),
        (["--prompt", "Hi", "--checkpoint", "nowhere"], "nowhere"),
    ],
)
def test_what_is_missing_is_named(options, message, tiny_checkpoint, capsys):
    hf = str(tiny_checkpoint("qwen2_5_vl", dtype=torch.float32))
    assert (
        main(
            [
                "generate",
                "--hf",
                hf,
                *(["--checkpoint", hf] if "--checkpoint" not in options else []),
                *options,
            ]
        )
        == 1
    )
    assert message in capsys.readouterr().err


def test_all_unusable_records_are_reported(tiny_checkpoint, tmp_path: Path, capsys):
    """All files are named with the line, ten at most; media that do not decode are reported in
    the same way."""
    hf = str(tiny_checkpoint("qwen2_5_vl", dtype=torch.float32))
    first, second, third = (tmp_path / name for name in ("first.jsonl", "second.json", "third.jsonl"))

    def told(*files: Path) -> list[str]:
        options = [word for file in files for word in ("--prompt-file", str(file))]
        assert main(["generate", "--hf", hf, "--checkpoint", hf, *options]) == 1
        return capsys.readouterr().err.splitlines()

    def asked(name: str) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": [{"type": "image", "image": name}]}]}

    good = {"messages": [{"role": "user", "content": "Hi"}]}
    first.write_text(
        "\n".join(["{", json.dumps(good), json.dumps({"messages": []}), "", json.dumps(asked("gone.png"))])
    )
    second.write_text(json.dumps([good, {}]))
    lines = told(first, second)
    assert lines[0] == "megatron-vl generate: 4 records cannot be used:" and len(lines) == 5
    places = [f"{first} line 1", f"{first} line 3", f"{first} line 5", f"{second} record 2"]
    for line, place in zip(lines[1:], places, strict=True):
        assert line.startswith(f"  {place}: "), line
    assert "gone.png does not exist" in lines[3]

    third.write_text("{\n" * 12)
    lines = told(third, second)
    assert lines[0].endswith("13 records cannot be used:") and lines[10].startswith(f"  {third} line 10: ")
    assert lines[11:] == ["  and 3 more"]

    (tmp_path / "no.png").write_text("no picture")
    third.write_text("\n".join(map(json.dumps, (good, asked("no.png")))))
    convert_weights(Path(hf), tmp_path / "weights", {"tp": 1, "pp": 1})
    hf_options = ["--hf", hf, "--checkpoint", str(tmp_path / "weights")]
    assert main(["generate", *hf_options, "--prompt-file", str(third)]) == 1
    assert f"generate: {third} line 2: image does not decode: no.png" in capsys.readouterr().err


RULES = [
    ("qwen2_5_vl", "video_positions", "transformers_5_3"),
    ("qwen3_vl", "video_prompt", "transformers_5_10"),
]


@pytest.mark.parametrize(("family", "name", "former"), RULES)
@pytest.mark.parametrize("told_by", ["run.json", "loader"])
def test_a_runs_checkpoint_brings_its_rule_for_videos(
    family, name, former, told_by, tiny_checkpoint, tmp_path
):
    """From its folder or a step's; of weights alone the option counts."""
    hf = tiny_checkpoint(family, dtype=torch.float32)
    step = tmp_path / "run" / "step_00000004"
    convert_weights(Path(hf), step / "weights", {"tp": 1, "pp": 1})
    (step / "loader").mkdir()
    run: dict[str, Any] = {"video_rule": {name: former}} if told_by == "run.json" else {}
    write_run_json(step, run)
    if told_by == "loader":  # run.json is damaged
        path = step / "run.json"
        path.write_text(path.read_text().replace('"step": 4', '"step": 5'))
        write_lineage(step, 4, Lineage(1, "0"))
    identity = {name: former if told_by == "loader" else "wrong"}
    (step / "loader" / "dp_00000.json").write_text(json.dumps({"identity": identity}))
    write_latest(tmp_path / "run")

    said: list[str] = []
    for path in (tmp_path / "run", step, step / "weights"):
        reader = WeightReader(path)
        for asked in ({}, {name: former}):
            said.clear()
            assert checkpoint_video_rules(reader, Path(hf), asked, said.append) == {name: former}
            assert len(said) == 1 and former in said[0] and str(step) in said[0]
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} released contradicts .*{former}"):
            checkpoint_video_rules(reader, Path(hf), {name: "released"}, said.append)

    # The other family's rule means nothing here, and a rule of a later version nothing to this one.
    other = next(each for _, each, _ in RULES if each != name)
    assert checkpoint_video_rules(reader, Path(hf), {other: "released"}, said.append)[name] == former
    write_run_json(step, {"video_rule": {name: "transformers_9"}})
    with pytest.raises(UserError, match="does not know"):
        checkpoint_video_rules(reader, Path(hf), {}, said.append)

    (step / "weights").rename(tmp_path / "alone")
    said.clear()
    for asked in ({}, {name: former}):
        assert checkpoint_video_rules(WeightReader(tmp_path / "alone"), Path(hf), asked, said.append) == asked
    assert not said


def write_latest(run: Path) -> None:
    (run / "latest.json").write_text(json.dumps({"step": 4, "serial": 0}))
