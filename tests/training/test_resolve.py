"""Problems that are refused or noted before anything starts, from fields and paths alone."""

import math
import os
from pathlib import Path

import pytest

from megatron_vl.config import LoraConfig, RunConfigError, parse_config
from megatron_vl.config.checks import check_output_dir, check_outputs, config_remarks
from megatron_vl.data.source.dataset_description import read_description
from megatron_vl.data.source.location import LoaderError
from megatron_vl.training.lora import with_stored_lora
from megatron_vl.training.resolve import MachineMemory, resolve_run

RUN = "--data.path synthetic:text --steps 1 --model.checkpoint random --model.hf".split()
RUN.append("tests/hf_configs/Qwen2.5-VL-3B-Instruct.json")


@pytest.mark.parametrize("field", ["log.tensorboard", "checkpoint.dir"])
@pytest.mark.parametrize("below", ["", "/board"])
def test_file_in_a_folders_place_is_reported_with_the_field(tmp_path: Path, field: str, below: str) -> None:
    check_output_dir(field, str(tmp_path / "new" / "folder"))
    (tmp_path / "file").write_text("")
    config = parse_config([*RUN, f"--{field}", f"{tmp_path / 'file'}{below}"])
    with pytest.raises(RunConfigError, match=rf"^{field} .*file{below}: .*file is a file; give a folder"):
        resolve_run(config, 1)


def test_folder_of_checkpoints_is_not_the_models(tmp_path: Path) -> None:
    config = parse_config([*RUN[:-1], str(tmp_path), "--checkpoint.dir", f"{tmp_path}/../{tmp_path.name}"])
    with pytest.raises(RunConfigError, match=r"^checkpoint.dir .* is the folder of model.hf"):
        check_outputs(config)


def test_type_of_computation_follows_the_machine() -> None:
    """However the ranks were started: the launcher is not asked."""

    def resolved_type(gpu_gib: float | None, *more: str) -> str:
        return resolve_run(parse_config([*RUN, *more]), 1, MachineMemory(gpu_gib, math.inf)).config.dtype

    assert (resolved_type(None), resolved_type(80.0)) == ("float32", "bfloat16")
    assert resolved_type(None, "--dtype", "bfloat16") == "bfloat16"
    assert resolved_type(80.0, "--dtype", "float32") == "float32"


def test_read_only_folder_is_reported_with_the_field(tmp_path: Path, monkeypatch) -> None:
    """For root, a read-only file system alone is read-only."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    run = tmp_path / "runs" / "mine"
    with pytest.raises(RunConfigError, match=f"checkpoint.dir {run} .* because {tmp_path} is read-only"):
        check_output_dir("checkpoint.dir", str(run))


def test_split_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    (meta := tmp_path / ".nv-meta").mkdir()
    (meta / "split.yaml").write_text("{split_parts: {train: [a.tar], val: [b.tar], test: []}, exclude: []}")
    (meta / ".info.json").write_text('{"shard_counts": {"a.tar": 1, "b.tar": 1}}')
    (meta / "dataset.yaml").write_text("{__module__: megatron.energon, __class__: CrudeWebdataset}")
    for split in ("vla", "test"):
        with pytest.raises(LoaderError, match=f"split '{split}' is empty; splits with samples: train, val."):
            read_description(tmp_path).split_facts(split)


NO_RANK = "lora.rank is 0: the whole model is trained, and other fields of lora have no effect"
LONG_STEP = "16,384 tokens are a long step on cpu; give a smaller --global_batch_size to try a run"


@pytest.mark.parametrize(
    ("words", "on_cpu", "remark", "is_remarked"),
    [
        ("", False, NO_RANK, False),
        ("--lora.rank 8 --lora.alpha 4", False, NO_RANK, False),
        ("--lora.adapter runs/first --lora.alpha 4", False, NO_RANK, False),  # their rank is read later
        ("--lora.alpha 4", False, NO_RANK, True),
        ("--fp8.vision true", False, "fp8.recipe is none: fp8.vision has no effect", True),
        # As those of the default, 8 rows of at least 2,048 tokens; not those of the pages, nor random rows.
        ("--data.path d", True, LONG_STEP, True),
        ("--data.path d", False, LONG_STEP, False),
        ("--data.path d --data.seq_len 1024 --global_batch_size 2", True, LONG_STEP, False),
        ("--data.path synthetic:text", True, LONG_STEP, False),
    ],
)
def test_fields_without_effect_and_long_steps_are_remarked(words, on_cpu, remark, is_remarked) -> None:
    config = parse_config(["--data.seq_len=2048", *words.split()])
    assert (remark in config_remarks(config, on_cpu)) == is_remarked


@pytest.mark.parametrize("is_in_file", [False, True])
def test_stated_default_beside_adapters_is_refused_if_they_differ(tmp_path: Path, is_in_file: bool) -> None:
    """A field that is left out takes the adapters' value; one that states its default is meant."""
    stored = LoraConfig(rank=4, alpha=8.0, use_rslora=True)
    adapter = ["--lora.adapter", "a run"]
    assert with_stored_lora(parse_config(adapter), stored, "a run").lora.alpha == 8
    for name, value in (("alpha", "32"), ("use_rslora", "false"), ("rank", "0")):
        words = [f"--lora.{name}", value]
        if is_in_file:
            (tmp_path / "run.yaml").write_text(f"lora:\n  {name}: {value}\n")
            words = ["--config", str(tmp_path / "run.yaml")]
        with pytest.raises(RunConfigError, match=rf"lora\.{name} is .*, but the adapters in a run have"):
            with_stored_lora(parse_config([*words, *adapter]), stored, "a run")
    same = parse_config([*adapter, "--lora.dropout", "0", "--lora.rank", "4"])
    assert with_stored_lora(same, stored, "a run").lora.use_rslora
