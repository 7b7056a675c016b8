"""Every command's options have one spelling and an explanation; old spellings work; help is fast."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from megatron_vl.config import field_types
from megatron_vl.errors import UsageError, UserError
from toolkit.cli import main, read_command_line
from toolkit.commands import COMMANDS
from toolkit.options import CommandOptions, option, parse_command_line, require_exactly_one, to_command_line

ROOT = Path(__file__).resolve().parents[2]


@dataclass(kw_only=True)
class Example(CommandOptions):
    """Do something. Then say so."""

    run_fields: ClassVar[bool] = True

    out_dir: Path = option(metavar="DIR")
    """Folder to write."""
    kind: Literal["one", "two"] = option("one")
    """Which of the two."""
    media: list[Path] = option([], metavar="FILE", repeat=True)
    """A file."""
    keep_all: bool = False
    """Keep everything."""
    data: Path | None = option(None, metavar="DIR")
    """The command's own, beside the section of a run."""
    limit: int | None = option(None, metavar="N")
    """A number without a range."""
    share: float = option(0.5, metavar="F", minimum=0, maximum=1)
    """A part."""


def example(*line: str) -> Example:
    return parse_command_line(Example, list(line), "megatron-vl example")


def test_words_become_values_and_fields_of_a_run_are_kept_apart():
    line = "--out-dir a --media x --data.seq_len 8 --media=y --keep-all --data d --steps 3"
    got = example(*line.split())
    assert (got.out_dir, got.kind, got.keep_all, got.data) == (Path("a"), "one", True, Path("d"))
    assert got.media == [Path("x"), Path("y")]
    assert got.fields == ["--data.seq_len", "8", "--steps", "3"]


def test_fields_of_a_run_may_follow_two_hyphens():
    assert example("--out-dir", "a", "--", "--data.seq_len", "8").fields == ["--data.seq_len", "8"]


def test_no_two_parses_share_a_list():
    example("--out-dir", "a", "--media", "x")
    assert example("--out-dir", "a").media == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "^--out-dir must be given; see"),
        (["--out-dir", "a", "--kind", "three"], "invalid choice: 'three'"),
        (["--out-dir", "a", "--share", "2"], "'2' is not a number from 0 to 1"),
        (["--out-dir", "a", "--share", "nan"], "'nan' is not a number from 0 to 1"),
        (["--out-dir", "a", "--limit", "x"], "^--limit: expected a whole number, got x; see"),
        (["--out-dir"], "--out-dir: expected one argument"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_exit_code_2(line, message):
    with pytest.raises(UsageError, match=message) as caught:
        example(*line)
    assert "\n" not in str(caught.value) and "megatron-vl example --help" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("word", "near"),
    [("--nprocs", "--nproc-per-node"), ("--nproc-per-nodes=2", "--nproc-per-node"), ("--jobid", "--job-id")],
)
def test_a_misspelled_option_is_no_field_of_a_run(word, near, capsys):
    assert main(["train", word, "2", "--steps", "3"]) == 2
    assert f"unknown; did you mean {near}? See" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--seq_len", "--step", "--lr"])
def test_a_misspelled_field_of_a_run_is_left_to_its_parser(word):
    assert read_command_line("train", [word, "2"])[1].fields == [word, "2"]


def test_options_become_words_again():
    given = example("--out-dir", "a b", "--keep-all", "--share", "0.25")
    line = to_command_line(given, leave_out=("media",))
    assert line == ["--out-dir", "a b", "--keep-all", "--share", "0.25"]
    assert example(*line) == given


def test_one_of_two_is_asked_for():
    both = dataclasses.replace(example("--out-dir", "a"), media=[Path("x")], data=Path("y"))
    with pytest.raises(UsageError, match="give --media or --data, not both"):
        require_exactly_one(both, "media", "data")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_is_explained(name, capsys):
    """Help texts are in words, with a capital and not empty; options have hyphens; the fields of a
    run are listed."""
    from toolkit.options import field_docstrings, shown_options

    options = COMMANDS[name].load_options_class()
    texts = field_docstrings(options)
    with pytest.raises(SystemExit) as end:
        main([*name.split(), "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    for field in shown_options(options):
        assert len(texts[field.name]) > 5, f"{name}: {field.name} is not explained"
        spelled = field.name if field.metadata.get("positional") else "--" + field.name.replace("_", "-")
        assert spelled in shown or field.metadata["metavar"] in shown
    for field in field_types() if options.run_fields else []:
        assert f"--{field} " in shown, f"{name} --help lacks the run's field {field}"
    assert callable(COMMANDS[name].load_function())


def test_help_and_overview_import_no_torch():
    code = """
import sys, time
start = time.perf_counter()
from toolkit.cli import main, read_command_line
for words in (["--help"], ["train", "--help"], ["bench", "--help"], ["data", "--help"], ["parity", "--help"]):
    try:
        main(words)
    except SystemExit as end:
        assert end.code == 0
assert "torch" not in sys.modules and "numpy" not in sys.modules
print(time.process_time(), file=sys.stderr)
"""

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (
        float(done.stderr) < 10
    )  # seconds of this process for five helps, on any machine; importing torch alone takes two
    assert "--data.seq_len" in done.stdout and "--even-routing" in done.stdout


def test_a_bug_is_not_shown_as_the_users_fault(monkeypatch, capsys, tmp_path):
    """A user's error is one line; anything else keeps its traceback and asks for a report."""

    def broken(path):
        raise KeyError("a bug")

    def refused(path):
        raise UserError("say it otherwise")

    monkeypatch.setattr("toolkit.checkpoint.command.find_step_dir", broken)
    assert main(["checkpoint", "show", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("megatron-vl checkpoint show: KeyError: 'a bug'")
    assert "Traceback" in said
    assert "please report" in said

    monkeypatch.setattr("toolkit.checkpoint.command.find_step_dir", refused)
    assert main(["checkpoint", "show", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "megatron-vl checkpoint show: say it otherwise\n"

    monkeypatch.setenv("MEGATRON_VL_TRACEBACK", "1")
    assert main(["checkpoint", "show", str(tmp_path)]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_number_of_zero_reaches_the_ranks() -> None:
    """0 equals False in Python, and a switch that is off is left out."""
    from toolkit.bench.options import BenchOptions

    words = to_command_line(BenchOptions(fields=[], part_steps=0, gpus=1), leave_out=("gpus",))
    assert words == ["--part-steps", "0"]
