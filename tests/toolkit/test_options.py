"""Every command's options have one spelling and an explanation; old spellings work; help is fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from unittest.mock import Mock

import pytest

from megatron_vl.config import field_types
from megatron_vl.system.errors import UsageError, UserError
from toolkit.cli import main
from toolkit.commands import COMMANDS
from toolkit.common.options import CommandOptions, field_docstrings, option, parse_command_line, shown_options


@dataclass(kw_only=True)
class Example(CommandOptions):
    """Do something. Then say so."""

    run_fields: ClassVar[bool] = True

    out_dir: Path = option(metavar="DIR")
    """Folder to write."""
    kind: Literal["one", "two"] = option("one")
    """Which of the two."""
    media: list[Path] = option([], metavar="FILE", several=True)
    """A file."""
    keep_all: bool = False
    """Keep everything."""
    data: Path | None = option(None, metavar="DIR")
    """The command's own, beside the section of a run."""
    share: float = option(0.5, metavar="F", minimum=0, maximum=1)
    """A part."""


def example(*line: str) -> Example:
    return parse_command_line(Example, list(line), "megatron-vl example")


def test_words_become_values_and_fields_of_a_run_are_kept_apart():
    line = "--out-dir a --media x --data.seq_len 8 --media=y --keep-all --data d --steps 3"
    got = example(*line.split())
    assert (got.out_dir, got.kind, got.keep_all, got.data) == (Path("a"), "one", True, Path("d"))
    assert got.media == [Path("x"), Path("y")]
    assert got.fields == ["--data.seq_len", "8", "--steps", "3"] and got.words == line.split()
    assert example("--out-dir", "a").media == [], "no two parses share a list"
    for share in ("2", "nan"):
        with pytest.raises(UsageError, match=f"argument --share: {share} must be between 0 and 1"):
            example("--out-dir", "a", "--share", share)


SLIPS = {
    # misspelled fields, options and commands
    "train --seq_len 8": "--seq_len is unknown; did you mean --data.seq_len?",
    "train --nprocs 2 --steps 3": "--nprocs is unknown; did you mean --nproc-per-node?",
    "split --checkpoit a --out b": "--checkpoit is unknown; did you mean --checkpoint or ",
    "train": "no run is given: --model.hf DIR --data.path FILE, or --conf",
    "doctor --config run.yaml": "--config is unknown; ",
    "doctr": "doctr is unknown; did you mean doctor?",
    "zzz": "zzz is unknown; valid: train, plan, convert,",
    "data shw": "data shw is unknown; did you mean data show?",
    "checkpoint": "checkpoint needs a command after it; valid: checkpoint show, checkpoint verify, ",
    "train --data.path a.json b.json --steps 3": "takes one path, and b.json is another: make one data set",
    "train --data.path=a.json --steps 3 b.json": "unexpected word b.json: a value follows",
    # wrong types and forms
    "train --steps five": "field 'steps': expected a whole number, got five",
    "train --model d": "there is no --model: set model.hf; see",
    "export --model d": "there is no --model: give --hf; see",
    "train --zzz 1": "--zzz is unknown; see megatron-vl train --help",
    "train --log d": "--log is a section; give its fields, such as --log.interval or --log.tensorboard",
    "train --epochs 0 --steps 0": "epochs 0 trains nothing; leave it out for one pass over the data",
    "plan --hf Org/Name --gpus 8": "`hf download Org/Name config.json --local-dir checkpoints/Name`",
    "plan --config examples/qwen2_5_vl_7b.yaml --gpus 8": "`hf download Qwen/Qwen2.5-VL-7B-Instruct --local-",
    "generate --checkpoint Org/Name --prompt hi": "`hf download Org/Name --local-dir checkpoints/Name`",
    "generate --checkpoint a --thinking maybe": "argument --thinking: invalid choice: 'maybe' (choose from ",
    "convert": "the following arguments are required: --hf, --out",
    # names of other programs, and of earlier versions
    "train --learning-rate=1e-5": "there is no --learning-rate: set optimizer.lr",
    "train --per_device_train_batch_size 4": "--per_device_train_batch_size: set data.seq_len and global_",
    "split --checkpoint a --out b --tp 2": "--tp is unknown; did you mean --parallel.tp?",
    "card --hf a": "there is no card: run `python -m benchmarks.card` in a checkout",
}


@pytest.mark.parametrize("line", SLIPS)
def test_slip_is_answered_in_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) in (1, 2)
    printed = capsys.readouterr().err
    assert SLIPS[line] in printed and printed.count("\n") == 1


def test_options_are_at_most_91() -> None:
    assert sum(len(shown_options(command.load_options_class())) for command in COMMANDS.values()) <= 91


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_option_of_every_command(name, capsys):
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
    for field in field_types() if name == "train" else []:
        assert f"--{field} " in shown, f"{name} --help lacks the run's field {field}"
    if name != "train":
        assert len(shown.splitlines()) < 80
        assert options.run_fields == ("fields of a run, and --config RUN.yaml: `megatron-vl train" in shown)
    assert callable(COMMANDS[name].load_function())


def test_bug_is_not_shown_as_the_users_fault(monkeypatch, capsys, tmp_path):
    def printed_for(error: Exception) -> str:
        monkeypatch.setattr("toolkit.checkpoint.command.find_step_dir", Mock(side_effect=error))
        assert main(["checkpoint", "show", str(tmp_path)]) == 1
        return capsys.readouterr().err

    said = printed_for(KeyError("a bug"))
    assert said.startswith("megatron-vl checkpoint show: KeyError: 'a bug'")
    assert "Traceback" in said and "please report" in said
    assert printed_for(UserError("say it otherwise")) == "megatron-vl checkpoint show: say it otherwise\n"
    monkeypatch.setenv("MEGATRON_VL_TRACEBACK", "1")
    assert "Traceback" in printed_for(UserError("say it otherwise"))
