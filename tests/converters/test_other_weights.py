"""Models of one shape are told apart: the digest of a model, and the base that adapters record."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from converters.convert import convert_adapter, convert_weights, export_adapter, reshard_weights
from converters.hf_checkpoint import HfCheckpoint
from converters.peft_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from megatron_vl.spec.tensors import tensor_table
from megatron_vl.weights.model_digest import DIGEST_ROWS, LoraBase, model_digest
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from megatron_vl.weights.weight_reader import WeightReader
from tests.tiny import tiny_checkpoint
from toolkit.weights.export_step import ExportJob, export_step

from .helpers import read_tensors, run, write_hf
from .peft_models import peft_folder

ATTENTION = {"target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl_moe", "qwen3_5_moe"])
def test_digest_is_that_of_the_converted_weights(tmp_path: Path, family: str) -> None:
    hf = tiny_checkpoint(family)
    digest = model_digest(HfCheckpoint(hf))
    layout = {"tp": 2, "pp": 2} | ({"ep": 2, "etp": 2} if family.endswith("moe") else {})
    convert_weights(hf, tmp_path / "full")
    reshard_weights(tmp_path / "full", tmp_path / "shards", layout)
    for folder in ("full", "shards"):
        assert model_digest(WeightReader(tmp_path / folder)) == digest

    wide_tensors = {name: tensor.float() for name, tensor in read_tensors(hf).items()}
    wide = write_hf(tmp_path / "wide", wide_tensors, json.loads((hf / "config.json").read_text()))
    assert model_digest(HfCheckpoint(wide)) == digest
    assert model_digest(HfCheckpoint(tiny_checkpoint(family, seed=7))) != digest


def test_digest_reads_each_part_of_a_tensor_and_every_expert(tmp_path: Path) -> None:
    convert_weights(tiny_checkpoint("qwen3_5_moe"), tmp_path / "full")
    [file] = (tmp_path / "full").glob("*.safetensors")
    reader = WeightReader(tmp_path / "full", should_verify=False)
    digest, tensors = model_digest(reader), load_file(file)
    infos = tensor_table(reader.spec)
    embedding = "language_model.embedding.word_embeddings.weight"
    rows = len(tensors[embedding])
    stretch = (rows - 1) // (DIGEST_ROWS - 1) + 1  # so many rows in a row hold one that is read
    changes: list[tuple[str, Any]] = [(embedding, (0, 17)), (embedding, (-1, -1))]
    changes += [(embedding, slice(at, at + stretch)) for at in (rows // 3, rows // 2, rows - 2 * stretch)]
    stack_name = next(name for name, info in infos.items() if info.num_experts)
    changes += [(stack_name, expert) for expert in range(infos[stack_name].num_experts)]
    for tensor_name, index in changes:
        changed = tensors | {tensor_name: tensors[tensor_name].clone()}
        changed[tensor_name][index] += 1
        save_file(changed, file, {"format": "pt"})
        found = model_digest(WeightReader(tmp_path / "full", should_verify=False))
        assert found != digest, (tensor_name, index)


def test_base_of_an_older_digest_is_not_compared() -> None:
    digest = model_digest(HfCheckpoint(tiny_checkpoint("qwen2_vl")))
    assert not LoraBase("", "").differs_from(digest)
    assert not LoraBase("0" * 64, "base").differs_from(digest)
    assert LoraBase(digest[:-1] + "x", "base").differs_from(digest)


def adapters_of(folder: Path, base: Path) -> Path:
    """Megatron weights of adapters that record ``base``, as a run that was trained on it saves them."""
    peft = peft_folder(folder / "peft", base, **ATTENTION)
    facts = LoraBase(model_digest(HfCheckpoint(base)), str(base)).entry()
    (peft / EXPORT_FACTS_FILE).write_text(json.dumps(facts))
    convert_adapter(peft, base, folder / "adapters", {"tp": 2})
    return folder / "adapters"


def test_adapters_meet_only_the_weights_that_they_were_trained_on(tmp_path: Path, capsys) -> None:
    original, tuned = tiny_checkpoint("qwen2_vl"), tiny_checkpoint("qwen2_vl", seed=5)
    split = adapters_of(tmp_path, tuned)
    reshard_weights(split, tmp_path / "merged adapters")
    assert run("export", "--adapter", "--checkpoint", split, "--hf", tuned, "--out", tmp_path / "out") == 0
    for adapters in (split, tmp_path / "merged adapters", tmp_path / "out"):
        words = ("export", "--checkpoint", adapters, "--out", tmp_path / "whole", "--force")
        for way in ("--merge", "--adapter"):
            assert run(*words, way, "--hf", original) == 1
            shown = capsys.readouterr().err
            assert f"the adapters in {adapters} were trained on other weights ({tuned})" in shown
            assert f"than those in {original}" in shown
            assert not (tmp_path / "whole").exists()
        assert run(*words, "--merge", "--hf", tuned) == 0
        assert "does not record" not in capsys.readouterr().out
        shutil.rmtree(tmp_path / "whole")


def test_damaged_record_of_the_base_is_refused_by_name(tmp_path: Path, capsys) -> None:
    """Not read as a folder from elsewhere, which may be merged into any weights of its shape."""
    original, tuned = tiny_checkpoint("qwen2_vl"), tiny_checkpoint("qwen2_vl", seed=5)
    out = tmp_path / "out"
    export_adapter(adapters_of(tmp_path, tuned), tuned, out)
    good = (out / EXPORT_FACTS_FILE).read_text()
    digest = model_digest(HfCheckpoint(tuned))
    words = ("export", "--merge", "--checkpoint", out, "--out", tmp_path / "whole")
    for damaged in ("", good[:-9], "[]", good.replace("base", "bass"), good.replace(digest, digest[:-1])):
        (out / EXPORT_FACTS_FILE).write_text(damaged)
        assert run(*words, "--hf", original) == 1
        assert f"{out / EXPORT_FACTS_FILE} is damaged" in capsys.readouterr().err
    (out / EXPORT_FACTS_FILE).write_text(good)
    assert run(*words, "--hf", tuned) == 0


def test_adapters_from_elsewhere_are_accepted_with_a_note(tmp_path: Path, capsys) -> None:
    hf = tiny_checkpoint("qwen2_vl")
    peft = peft_folder(tmp_path / "peft", hf, **ATTENTION)
    assert run("export", "--merge", "--checkpoint", peft, "--hf", hf, "--out", tmp_path / "whole") == 0
    assert "does not record which weights its adapters were trained on" in capsys.readouterr().out


def test_export_of_a_run_names_the_base_of_its_adapters(tmp_path: Path) -> None:
    """``model.hf`` gives config and tokenizer; the run may have begun with other weights."""
    original, tuned = tiny_checkpoint("qwen2_vl"), tiny_checkpoint("qwen2_vl", seed=5)
    step = tmp_path / "step_00000001"
    shutil.copytree(adapters_of(tmp_path, tuned), step / "weights")
    for hf, base in ((original, tuned), (tuned, tuned)):
        out = tmp_path / f"out {hf.name}"
        export_step(ExportJob(str(step), str(hf), str(out), 0, True, {"step": 1}))
        config = json.loads((out / ADAPTER_CONFIG_FILE).read_text())
        facts = json.loads((out / EXPORT_FACTS_FILE).read_text())
        assert config["base_model_name_or_path"] == str(base) and facts["base"]["path"] == str(tuned)
        with safe_open(out / ADAPTER_FILE, "pt") as file:
            assert list(file.keys())
    export_adapter(step, tuned, tmp_path / "by command")
