"""A folder exported from a run names the rule for videos that it was trained under; commands follow it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from converters.convert import convert_weights, export_weights, reshard_weights
from megatron_vl.config import DataConfig, ModelConfig, TrainConfig
from megatron_vl.errors import UsageError, UserError
from megatron_vl.spec.families import read_spec
from megatron_vl.training.preflight import check_start_weights
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from megatron_vl.weights.video_rule import exported_video_rule
from megatron_vl.weights.weight_reader import WeightReader
from tests.support.run_json import write_run_json
from tests.toolkit.evaluation import photographs, write_video
from toolkit.evaluate.evaluation import video_rules_by_folder as rules_of_evaluate
from toolkit.evaluate.options import EvaluateOptions

RULES = [
    ("qwen2_5_vl", "video_positions", "transformers_5_3"),
    ("qwen3_vl", "video_prompt", "transformers_5_10"),
]
both_rules = pytest.mark.parametrize(("family", "name", "former"), RULES)


def write_run(step: Path, rule: dict[str, str]) -> None:
    """Writes the rule to ``run.json``, as far as readers of weights look at it."""
    write_run_json(step, {"video_rule": rule})


def start_from(weights: Path, rule: dict[str, str]) -> TrainConfig:
    return TrainConfig(model=ModelConfig(checkpoint=str(weights)), data=DataConfig(**rule))


class Exported:
    """A run's checkpoint, and what was exported from it and from its weights alone."""

    def __init__(self, hf: Path, folder: Path, rule: dict[str, str]) -> None:
        self.hf, self.folder = hf, folder
        self.step = folder / "run" / "step_00000004"
        convert_weights(hf, self.step / "weights", {"tp": 1, "pp": 1})
        write_run(self.step, rule)
        (folder / "run" / "latest.json").write_text(json.dumps({"step": 4, "serial": 0}))

        self.of_run = folder / "of_run"
        export_weights(folder / "run", hf, self.of_run)

    def alone(self, origin: Path, name: str) -> Path:
        """Weights outside of a run, exported again."""
        weights = self.folder / f"{name}_weights"
        convert_weights(origin, weights, {"tp": 1, "pp": 1})
        out = self.folder / name
        export_weights(weights, origin, out)
        return out


@pytest.fixture
def exported(tiny_checkpoint, tmp_path: Path):
    def make(family: str, rule: dict[str, str]) -> Exported:
        return Exported(Path(tiny_checkpoint(family, dtype=torch.float32)), tmp_path, rule)

    return make


@both_rules
@pytest.mark.parametrize("value", ["former", "released"])
def test_an_export_names_the_rule_of_its_run(exported, family, name, former, value) -> None:
    rule = {name: former if value == "former" else "released"}
    made = exported(family, rule)
    assert json.loads((made.of_run / EXPORT_FACTS_FILE).read_text()) == {"video_rule": rule}
    assert exported_video_rule(made.of_run, read_spec(made.of_run)) == rule

    # A conversion of it and back keeps the rule; a released folder has none to keep.
    assert json.loads((made.alone(made.of_run, "again") / EXPORT_FACTS_FILE).read_text()) == {
        "video_rule": rule
    }
    assert not (made.alone(made.hf, "untrained") / EXPORT_FACTS_FILE).exists()

    # What an earlier export noted in the folder does not stay.
    export_weights(made.folder / "untrained_weights", made.hf, made.of_run, force=True)
    assert not (made.of_run / EXPORT_FACTS_FILE).exists()


def test_a_rule_that_damage_has_made_unknown_is_not_left_out(exported, tmp_path: Path) -> None:
    """Of a changed run.json nothing is believed. The loader's state may still name the rule."""
    made = exported("qwen3_vl", {"video_prompt": "transformers_5_10"})
    (made.step / "run.json").write_text('{"video_rule": {"video_prompt": "released"}, "digest": "0"}')
    with pytest.raises(UserError, match=r"run.json is damaged .* under which rule for videos"):
        export_weights(made.folder / "run", made.hf, tmp_path / "out")
    assert not (tmp_path / "out").exists()

    (made.step / "loader").mkdir()
    identity = {"identity": {"video_prompt": "transformers_5_10"}}
    (made.step / "loader" / "dp_00000.json").write_text(json.dumps(identity))
    for name in ("changed", "missing"):
        export_weights(made.folder / "run", made.hf, tmp_path / name)
        rule = exported_video_rule(tmp_path / name, read_spec(made.hf))
        assert rule == {"video_prompt": "transformers_5_10"}
        (made.step / "run.json").unlink(missing_ok=True)


@both_rules
def test_weights_split_and_merged_from_a_run_keep_its_rule(exported, family, name, former) -> None:
    """The export's ``--hf`` is the released folder, which names no rule."""
    made = exported(family, {name: former})
    split = made.folder / "split"
    merged = made.folder / "merged"
    reshard_weights(made.folder / "run", split, {"tp": 2, "pp": 1})
    reshard_weights(split, merged)

    out = made.folder / "out"
    export_weights(merged, made.hf, out)
    assert json.loads((out / EXPORT_FACTS_FILE).read_text()) == {"video_rule": {name: former}}

    # A new run from them is told where it departs from the rule, and only there.
    weights = WeightReader(split)
    for value, differs in ((former, False), ("released", True)):
        config = start_from(split, {name: value})
        note = check_start_weights(config, weights.spec)
        assert bool(note) == differs
    assert f"--data.{name} {former} keeps the rule" in note

    # Released weights have no rule to keep.
    reshard_weights(
        convert_weights(made.hf, made.folder / "released").out,
        made.folder / "released_split",
        {"tp": 2, "pp": 1},
    )
    released = WeightReader(made.folder / "released_split")
    assert "video_rule" not in released.manifest["origin"]
    assert not check_start_weights(start_from(released.path, {name: former}), released.spec)


@both_rules
def test_evaluate_follows_the_rule_of_each_folder(exported, family, name, former) -> None:
    """A rule that the original or the converted folder names holds for both; the trained one has its own."""
    made = exported(family, {name: former})
    plain = made.folder / "plain"
    shutil.copytree(made.hf, plain)

    def rules(original: Path, converted: Path, trained: Path, **asked: str) -> list[dict[str, str]]:
        folders = {"original": original, "converted": converted, "trained": trained}
        options = EvaluateOptions(**folders, data="set", out=made.folder, **asked)
        found = rules_of_evaluate(options, said.append)
        return [found[str(folder.resolve())] for folder in folders.values()]

    said: list[str] = []
    assert rules(made.hf, plain, made.of_run) == [{}, {}, {name: former}]
    assert len(said) == 1 and str(made.of_run) in said[0]
    assert rules(made.of_run, plain, made.hf) == [{name: former}, {name: former}, {}]
    assert rules(made.hf, plain, made.of_run, **{name: former}) == [{name: former}] * 3
    with pytest.raises(UsageError, match="leave the option out"):
        rules(made.hf, plain, made.of_run, **{name: "released"})

    (plain / EXPORT_FACTS_FILE).write_text(json.dumps({"video_rule": {name: "released"}}))
    with pytest.raises(UsageError, match="not one model"):
        rules(made.of_run, plain, made.hf)
    (plain / EXPORT_FACTS_FILE).write_text(json.dumps({"video_rule": {name: "transformers_9"}}))
    with pytest.raises(UserError, match="does not know"):
        rules(made.hf, plain, made.hf)


@both_rules
def test_the_model_of_evaluate_is_given_the_rule(exported, family, name, former, tmp_path: Path) -> None:
    """The settings for a folder change what the model gets at a video: its positions, or its text."""
    from toolkit.evaluate.checkpoint_model import CheckpointModel

    made = exported(family, {name: former})
    clip = tmp_path / "clip.mp4"
    write_video(clip, photographs()[0], 24)
    prompt = [{"type": "video", "value": str(clip)}, {"type": "text", "value": "Who?"}]
    settings = {"dtype": "float32", "device": "cpu", "largest_picture": 10**6, "max_new_tokens": 1}
    settings |= {"min_pixels": None, "max_pixels": None, "video_max_frames": 20}
    options = EvaluateOptions(
        original=made.hf, converted=made.hf, trained=made.of_run, data="set", out=tmp_path
    )
    rules = rules_of_evaluate(options, lambda line: None)

    def given(folder: Path) -> torch.Tensor:
        model = CheckpointModel(folder, settings | rules[str(folder.resolve())], [tmp_path])
        inputs = model.model_inputs(prompt)
        if name == "video_prompt":
            return inputs["input_ids"]
        grids = {key: inputs[key] for key in ("video_grid_thw", "second_per_grid_ts")}
        return model.model.model.get_rope_index(inputs["input_ids"], **grids)[0]

    released, trained = given(made.hf), given(made.of_run)
    if name == "video_prompt":  # a second pair of tokens around the whole video
        assert trained.shape[1] == released.shape[1] + 2
    else:  # the text after the video continues earlier
        assert trained.shape == released.shape and int(trained.max()) < int(released.max())
