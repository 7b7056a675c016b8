"""An export says which rotary positions training saw, in config.json and in megatron_vl.json."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from converters.convert import convert_adapter, convert_weights, export_weights
from megatron_vl.config import ModelConfig, RunConfigError, TrainConfig, parse_config
from megatron_vl.spec.families import read_spec
from megatron_vl.system.json_files import manifest_digest
from megatron_vl.training.lora import check_same_model, with_start_lora
from megatron_vl.weights.weight_reader import WeightReader
from tests.converters.peft_models import peft_folder
from tests.tiny import tiny_checkpoint, with_yarn

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_export_to_the_plain_folder_has_yarn(tmp_path: Path, family: str) -> None:
    hf = tiny_checkpoint(family)
    convert_weights(with_yarn(hf, tmp_path / "hf", YARN), tmp_path / "weights")
    export_weights(tmp_path / "weights", hf, tmp_path / "out")

    trained = read_spec(tmp_path / "hf").language
    facts = json.loads((tmp_path / "out" / "megatron_vl.json").read_text())
    assert facts["rope"] == trained.rope_fields and facts["rope"].items() >= YARN.items()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    text = config.get("text_config", config)
    [place] = [name for name in ("rope_scaling", "rope_parameters") if name in text]
    assert text[place].items() >= YARN.items() and "type" not in text[place]
    assert read_spec(tmp_path / "out").language == trained

    served = AutoConfig.from_pretrained(tmp_path / "out").get_text_config().rope_parameters
    assert (served["rope_type"], served["factor"]) == ("yarn", 4.0)
    # All but the rotary fields is as it was.
    plain = json.loads((hf / "config.json").read_text())
    for each in (plain.get("text_config", plain), text):
        for name in ("rope_scaling", "rope_parameters"):
            each.pop(name, None)
    assert config == plain


def test_export_without_yarn_to_a_folder_with_it_has_none(tmp_path: Path) -> None:
    """As after a run with ``model.rope_scaling: {rope_type: default}``, whose checkpoint knows its facts."""
    hf = tiny_checkpoint("qwen3_5")
    convert_weights(hf, tmp_path / "weights")
    manifest_path = tmp_path / "weights" / "manifest.json"
    manifest = json.loads(manifest_path.read_text())
    manifest["origin"] |= {"media": {"min_pixels": 4, "max_pixels": 8}}
    manifest_path.write_text(json.dumps(manifest | {"digest": manifest_digest(manifest)}))
    export_weights(tmp_path / "weights", with_yarn(hf, tmp_path / "hf", YARN), tmp_path / "out")
    assert read_spec(tmp_path / "out").language == read_spec(hf).language
    assert json.loads((tmp_path / "out" / "megatron_vl.json").read_text())["rope"]["rope_type"] == "default"


def test_untrained_weights_leave_the_config_as_it_is(tmp_path: Path) -> None:
    hf = with_yarn(tiny_checkpoint("qwen2_5_vl"), tmp_path / "hf", YARN)
    convert_weights(hf, tmp_path / "weights")
    export_weights(tmp_path / "weights", hf, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (hf / "config.json").read_bytes()


def test_weights_trained_with_yarn_start_no_run_without_it(tmp_path: Path) -> None:
    hf = tiny_checkpoint("qwen3_vl")
    convert_weights(with_yarn(hf, tmp_path / "hf", YARN), tmp_path / "weights")
    weights_spec = WeightReader(tmp_path / "weights").spec
    with pytest.raises(
        RunConfigError, match="trained with YaRN.* lacks .*--model.rope_scaling '{\"rope_type"
    ):
        check_same_model("weights", weights_spec, TrainConfig(model=ModelConfig(hf=str(hf))), read_spec(hf))
    for rope_scaling in (YARN, {"rope_type": "default"}):
        config = TrainConfig(model=ModelConfig(hf=str(hf), rope_scaling=rope_scaling))
        check_same_model("weights", weights_spec, config, read_spec(hf, rope_scaling))


def test_peft_folder_trained_with_yarn_starts_no_run_without_it(tmp_path: Path) -> None:
    """Also after conversion: PEFT's own files do not name the rotary positions, megatron_vl.json does."""
    hf = tiny_checkpoint("qwen3_vl")
    adapter = peft_folder(tmp_path / "adapter", hf, target_modules=["q_proj"])
    facts = {"rope": read_spec(hf, YARN).language.rope_fields}
    (adapter / "megatron_vl.json").write_text(json.dumps(facts | {"digest": manifest_digest(facts)}))
    convert_adapter(adapter, hf, tmp_path / "converted")
    for path in (adapter, tmp_path / "converted"):
        config = parse_config(["--model.hf", str(hf), "--lora.adapter", str(path)])
        with pytest.raises(RunConfigError, match="lora.adapter .*trained with YaRN"):
            with_start_lora(config, read_spec(hf))
        config = replace(config, model=replace(config.model, rope_scaling=YARN))
        assert with_start_lora(config, read_spec(hf, YARN)).lora.rank
