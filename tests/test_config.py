"""A wrong field is refused before anything starts, with its name and valid values; --help explains all."""

import dataclasses
import math
import re
import typing
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_vl import config
from megatron_vl.config import (
    DataConfig,
    Fp8Config,
    ParallelConfig,
    RunConfigError,
    TrainConfig,
    field_types,
    parse_config,
    parse_or_exit,
    validate_config,
)
from megatron_vl.config.options import valid_range
from megatron_vl.config.removed import REMOVED


def test_yaml_and_overrides(tmp_path):
    (run := tmp_path / "run.yaml").write_text("parallel: {tp: 2, layers: [1, 3]}\noptimizer: {lr: 1.0e-4}\n")
    parsed = parse_config(["--config", str(run), "--optimizer.lr", "2e-5", "--parallel.pp", "2"])
    assert parsed.parallel == ParallelConfig(tp=2, pp=2, layers=[1, 3])
    assert parsed.optimizer.lr == 2e-5 and parsed.data == TrainConfig().data


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("q_proj, v_proj", ["q_proj", "v_proj"]),
        ("[language,experts]", ["language", "experts"]),
        ("all-linear,experts", ["language", "vision", "merger", "experts"]),
        (r".*layers\.\d{1,2}\..*(q|k)_proj,v_proj", [r".*layers\.\d{1,2}\..*(q|k)_proj", "v_proj"]),
    ],
)
def test_targets_are_a_list_or_a_text_with_commas(tmp_path, text: str, targets: list[str]) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(f"lora: {{targets: '{text}'}}\n".replace("'[", "[").replace("]'", "]"))
    for words in (["--config", str(run)], ["--lora.targets", text]):
        assert parse_config(words).lora.targets == targets
    assert parse_config(["--lora.modules_to_save", "norm,merger"]).lora.modules_to_save == ["norm", "merger"]


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        parse_or_exit(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    parser = config.build_parser()
    explained = {action.dest: action.help for action in parser._actions}
    for name in field_types():
        assert f"--{name} " in shown and len(explained[name]) > 10, f"{name} has no docstring"
    for group in parser._action_groups:  # the heading is the first line of a docstring
        assert not re.search(r"\b(and|the|of|with)$", group.title or ""), group.title
    assert "Tensor parallel size (ranks)." in shown
    assert "selective (what language_modules lists)" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optimizer.lrx 3", r"optimizer.lrx is unknown; did you mean optimizer.lr"),
        ("--optimizer.offload_fraction most", r"expected a number or 'auto', got most"),
        ("--lr 3", r"^lr is unknown; did you mean optimizer.lr\?"),
        ("--step 3", r"^step is unknown; did you mean steps"),  # no abbreviations
        ("--optimizer.schedule step", r"'optimizer.schedule': expected one of 'cosine', .*, got step"),
        ("--stop_after soon", r"'stop_after': expected a whole number or nothing \(null\), got soon$"),
        ("--model.attention flash", r"model.attention.*'reference'"),
        ("--optimizer.lr nan", r"optimizer.lr.*nan"),
        ("--config no_such.yaml", r"no_such.yaml"),
        ("run.yaml", r"^unexpected word run.yaml; did you mean --config run.yaml\?$"),
        ("--model.freeze_vision", r"--model.freeze_vision needs a value after it.*true or false"),
    ],
)
def test_unknown_fields_and_wrong_types_are_refused(words: str, message: str) -> None:
    with pytest.raises(RunConfigError, match=message):
        parse_config(words.split())


def test_list_is_written_with_and_without_brackets(tmp_path: Path) -> None:
    for words in (["--parallel.layers", "3,1"], ["--parallel.layers=[3,1]"]):
        assert parse_config(words).parallel.layers == [3, 1]
    assert parse_config(["--recompute.language_modules", "mlp"]).recompute.language_modules == ["mlp"]
    run = tmp_path / "run.yaml"
    run.write_text("parallel: {layers: '3,1'}\nprofile: {steps: [5, 7]}\n")
    parsed = parse_config(["--config", str(run)])
    assert (parsed.parallel.layers, parsed.profile.steps) == ([3, 1], [5, 7])


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("steps: 3\noptimizer:\n  offload: true", 3, r"optimizer.offload is unknown; did you mean"),
        ("seed: 3\noptimiser:\n  lr: 3", 3, r"optimiser.lr is unknown; did you mean"),
        ("seed: 3\nsteps: five", 2, r"field 'steps': expected a whole number, got five$"),
        ("parallel:\n  tp: 2\n  layers: [1, x]", 3, "field 'parallel.layers': .* list of whole .* or 'auto'"),
        ("seed: 3\nparallel: 2", 2, r"parallel is a section; give its fields, such as parallel.tp or "),
        ("seed: 3\nmodel: a/b", 2, r"there is no model: set model.hf"),
        ("steps: 3\nseed: 3\nsteps: 4", 3, r"field 'steps' is in line 1 already"),
        ("parallel: {tp: 2\nsteps: 3", 2, r"column 6: broken YAML: expected ',' or '}'.*from line 1"),
        ("model: &a {hf: *a}", 1, r"field 'model.hf': expected text, got "),
        ("seed: 3\nmodel: {hf: !!python/name:os.system ''}", 2, r"column 13: broken YAML: .*os.system"),
        ("- steps", None, r"the file has no fields"),
        ("steps: \udcff", None, r"not UTF-8 text"),
    ],
)
def test_wrong_yaml_is_reported_with_file_and_line(tmp_path, text, line, message):
    run = tmp_path / "run.yaml"
    run.write_text(text, errors="surrogateescape")
    place = re.escape(f"{run}, line {line}" if line else f"{run}: ")
    with pytest.raises(RunConfigError, match=rf"^{place}[:,]? ?{message}") as found:
        parse_config([f"--config={run}", "--steps", "3"])
    assert "\n" not in str(found.value)


def test_right_yaml_is_not_blamed_for_the_command_line(tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text("model: &all {hf: here}\nparallel: {<<: {tp: 2}, pp: 3}\nsteps: 3\n")
    assert parse_config(["--config", str(run)]).steps == 3
    with pytest.raises(RunConfigError, match=r"^field 'steps': expected a whole number, got five$"):
        parse_config(["--config", str(run), "--steps", "five"])


def test_entry_point_exits_and_only_the_first_rank_speaks(capsys, monkeypatch):
    for rank, speaks in (("0", True), ("3", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="^2$"):
            parse_or_exit(["--stepz", "3"])
        assert ("stepz" in capsys.readouterr().err) == speaks


WSD = "--optimizer.schedule wsd --optimizer.warmup_steps 8"
NORMS_AGAIN = "--recompute.language selective --recompute.language_modules [layernorm]"
IMPOSSIBLE = [
    (f"--steps 10 {WSD} --optimizer.decay_steps 3", 1, "decay_steps 3 and 8 steps of warm-up"),
    ("--steps 10 --optimizer.decay_steps 3", 1, "decay_steps 3 needs optimizer.schedule wsd"),
    ("--parallel.tp 3", 4, "do not divide the world size 4; start a multiple of 3 processes"),
    ("--global_batch_size 3", 2, r"the data-parallel size 2 \(2 ranks / \(tp 1 x pp 1\)\); take 2 or 4$"),
    ("--parallel.vpp 2", 1, "parallel.vpp 2 needs pp of at least 2"),
    ("--parallel.vpp 2 --parallel.pp 4 --global_batch_size 6", 4, r"multiple of pp \(4\)"),
    ("--parallel.sequence_parallel true", 1, "needs parallel.tp of at least 2"),
    ("--parallel.sequence_parallel true --parallel.tp 2 --data.seq_len 33", 2, "data.seq_len 33"),
    ("--parallel.layers [1,3]", 1, "has 2 entries; pp 1 x vpp 1 needs 1"),
    ("--optimizer.lr -1", 1, "optimizer.lr -1.0 must be at least 0"),
    ("--optimizer.min_lr_ratio 2", 1, "between 0 and 1"),
    ("--steps 100 --optimizer.warmup_steps 100", 1, "must be below steps 100"),
    ("--stop_after 9 --steps 8 --optimizer.warmup_steps 0", 1, "stop_after 9 must not be above steps 8"),
    ("--data.min_pixels 9 --data.max_pixels 8", 1, "data.min_pixels 9"),
    ('--recompute.language_modules ["attn"]', 1, "expected one of 'core_attn', 'mlp', 'layernorm'"),
    (" ".join(f"--model.freeze_{p} true" for p in ("vision", "merger", "language")), 1, "nothing to train"),
    ("--fp8.recipe delayed --dtype float32", 1, "fp8.recipe delayed needs a GPU and dtype bfloat16"),
    ("--fp8.recipe delayed --platform cpu", 1, "fp8.recipe delayed needs a GPU and dtype bfloat16"),
    (f"--fp8.recipe delayed {NORMS_AGAIN}", 1, "delayed, .* outputs of norms .* leave out layernorm"),
    ("--parallel.ep 2", 1, r"start a multiple of 2 processes \(on one node: --nproc-per-node 2\)$"),
    ("--recompute.keep [attention]", 1, "needs recompute.language full and fp8.recipe none"),
    ("--recompute.language full --recompute.keep [experts] --parallel.etp 2", 2, "parallel.etp 1; change"),
    ("--recompute.offload_inputs true", 1, "set recompute.language to full, or recompute.vision"),
    ("--data.seq_len 4096 --parallel.cp 3", 3, r"of 3 \(parallel.cp 3\); take 4095 or 4098"),
    ("--checkpoint.export_hf last", 1, "export_hf last needs checkpoint.dir"),
    ("--checkpoint.dir r --checkpoint.export_hf 4 --checkpoint.interval 3", 1, "a multiple of .*interval 3"),
    ("--profile.steps [5,7]", 4, "profile.steps needs checkpoint.dir"),
    ("--checkpoint.dir r --profile.steps [5]", 4, r"profile.steps \[5\] must be the first and the last"),
    ("--checkpoint.dir r --profile.steps [0,2]", 4, "between 1 and the last step"),
    ("--checkpoint.dir r --profile.steps [99,101] --steps 100", 4, "between 1 and steps 100"),
    ("--checkpoint.dir r --profile.steps [5,7] --profile.ranks [0,4]", 4, "ranks of this run, 0 to 3"),
]


@pytest.mark.parametrize(("words", "world_size", "message"), IMPOSSIBLE)
def test_impossible_values_are_refused_by_name(words: str, world_size: int, message: str) -> None:
    with pytest.raises(RunConfigError, match=message):
        validate_config(parse_config(words.split()), world_size)


@given(
    recipe=st.sampled_from(["none", "tensorwise", "delayed", "blockwise"]),
    sizes=st.sampled_from([(1, 1), (2, 1), (4, 2), (1, 4), (16, 1)]),
    sequence_parallel=st.booleans(),
    rows=st.integers(1, 600),
)
def test_rows_that_fp8_cannot_multiply_are_refused(recipe, sizes, sequence_parallel, rows) -> None:
    """Layers of Transformer Engine assert 8 rows in what a rank passes in; Tensor Cores need 16 in the
    products of a weight's gradient, blockwise scaling a block of 128."""
    tp, cp = sizes
    sequence_parallel &= tp > 1
    seq_len = cp * (tp if sequence_parallel else 1) * rows
    block = 128 if recipe == "blockwise" else 16
    is_refused = recipe != "none" and bool(rows % 8 or seq_len // cp % block)
    parallel = ParallelConfig(tp=tp, cp=cp, sequence_parallel=sequence_parallel)
    config = TrainConfig(parallel=parallel, fp8=Fp8Config(recipe=recipe), data=DataConfig(seq_len=seq_len))
    refusal = pytest.raises(RunConfigError, match="data.seq_len .* with fp8.recipe")
    with refusal if is_refused else nullcontext():
        validate_config(config, tp * cp)


NUMBERS_CHECKED_WITH_OTHERS = {"checkpoint.export_hf", "profile.ranks", "profile.steps", "parallel.layers"}


def test_every_number_has_a_range():
    numbers = {name for name, hint in field_types().items() if {int, float} & {hint, *typing.get_args(hint)}}
    assert {"steps", "optimizer.eps", "checkpoint.keep", "data.video_fps"} <= numbers
    for name in numbers - NUMBERS_CHECKED_WITH_OTHERS:
        section, _, leaf = name.rpartition(".")
        config = getattr(TrainConfig(), section) if section else TrainConfig()
        facts = next(field.metadata for field in dataclasses.fields(config) if field.name == leaf)
        assert facts and valid_range(-math.inf, facts), f"{name} has no range"


@pytest.mark.parametrize("name", [name for name in REMOVED if " " not in name and name != "card"])
def test_removed_field_and_those_of_other_programs_are_answered(name: str, tmp_path: Path) -> None:
    section, _, leaf = name.rpartition(".")
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"{section}:\n  {leaf}: 1\n" if section else f"{leaf}: 1\n")
    for words in (["--config", str(run_file)], [f"--{name}", "1"], [f"--{name}=1"]):
        with pytest.raises(RunConfigError) as refusal:
            parse_config(words)
        assert f"there is no {name}: {REMOVED[name]}" in str(refusal.value)
