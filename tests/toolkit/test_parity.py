"""In the parity command, all layouts agree with transformers, and a damaged checkpoint's layer is named."""

import shutil
from pathlib import Path

import pytest
import torch

from converters.convert import convert_weights
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.families.hf_folder import write_rope_fields
from megatron_vl.system.errors import UsageError, UserError
from tests.converters.peft_models import SAVED, peft_folder
from tests.support import ranks
from tests.tiny import replace_tensor
from toolkit.cli import main
from toolkit.common.layouts import parse_layout, parse_layouts
from toolkit.common.options import parse_command_line
from toolkit.parity import compare
from toolkit.parity.options import ParityOptions


def run(*arguments: object) -> dict:
    """The report that the command prints. Its ranks are forks of the tests' server."""
    options = parse_command_line(ParityOptions, list(map(str, arguments)), "megatron-vl parity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "run_group", ranks.run_group)
        return compare.run_parity(options, print)


def steps(report: dict) -> list[dict]:
    """The one step of each layout, whose loss and gradients are those of the reference."""
    assert report["ok"], report
    found = [step for result in report["layouts"].values() for step in result["steps"]]
    for step in found:
        assert step["departs"] == "" and not step["unexpected"] and 0 < step["gradient_error"] < 1e-4
        assert 0 < max(step["activations"].values()) < 1e-5
        assert step["loss"] == pytest.approx(step["reference"], rel=1e-5)
    return found


@pytest.mark.ranks
def test_layouts_agree_with_transformers():
    places = {"patch embedding", "DeepStack merger 2", "merger", "embeddings", "decoder layer 3", "logits"}
    first, second = steps(run("--hf", "qwen3_vl", "--layouts", "pp2:layers=1-3,cp2"))
    assert places <= set(first["activations"]) & set(second["activations"])


LORA_LAYOUTS = {
    "qwen3_vl": "tp2sp",
    "qwen2_5_vl": "1,tp2,pp2",
    "qwen3_vl_moe": "1,tp2spep2,etp2tp2sp",
    "qwen3_5": "1,tp2sp,pp2",
    "qwen3_5_moe": "1,tp2spep2,pp2",
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name == "qwen3_vl" else pytest.mark.full) for name in LORA_LAYOUTS],
)
def test_adapters_agree_with_peft(family: str):
    for step in steps(run("--hf", family, "--layouts", LORA_LAYOUTS[family], "--lora", "4")):
        assert all("adapter" in name for name in step["worst"])


@pytest.mark.ranks
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.full)])
def test_modules_trained_whole_agree_with_peft(monkeypatch: pytest.MonkeyPatch, family: str):
    """Mergers, norms, patch embedding, embedding and output layer, beside adapters."""
    prepare_samples = compare.prepare_samples

    def prepare_with_adapter(hf: Path, work: Path, count: int) -> list:
        (work / "reference").mkdir()
        peft_folder(work / "reference" / "adapter", hf, **SAVED)
        return prepare_samples(hf, work, count)

    monkeypatch.setattr(compare, "prepare_samples", prepare_with_adapter)
    assert len(steps(run("--hf", family, "--layouts", "tp2sp,pp2", "--lora", "4"))) == 2


@pytest.mark.full
@pytest.mark.ranks
def test_parity_names_the_layer_of_a_damaged_checkpoint(tiny_checkpoint, tmp_path: Path):
    """The rows of one k_proj are permuted: shapes and norms are right, but the loss is not."""
    hf = tiny_checkpoint("qwen2_5_vl", dtype=torch.float32)
    shutil.copytree(hf, tmp_path / "damaged")
    name = "model.layers.2.self_attn.k_proj.weight"
    replace_tensor(tmp_path / "damaged", name, lambda weight: weight.flip(0).contiguous())
    convert_weights(tmp_path / "damaged", tmp_path / "weights", {"tp": 2, "pp": 1})
    report = run("--hf", hf, "--checkpoint", tmp_path / "weights", "--layouts", "1")
    result = report["layouts"]["1"]
    assert not report["ok"] and result["steps"][0]["departs"] == "decoder layer 2"


def test_reference_has_the_rotary_positions_of_the_weights(tiny_checkpoint, tmp_path, monkeypatch):
    """Of weights that were trained with YaRN, which the folder of --hf lacks."""
    hf, yarn = tiny_checkpoint("qwen3_vl", dtype=torch.float32), tmp_path / "yarn"
    shutil.copytree(hf, yarn)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    write_rope_fields(yarn, rope)
    convert_weights(yarn, tmp_path / "weights")

    def only_look(options, hf_dir: Path, work_dir: Path, device: str) -> None:
        raise UserError(f"factor {read_spec(hf_dir).language.yarn.factor}")

    monkeypatch.setattr(compare, "_run_reference", only_look)
    assert read_spec(hf).language.yarn is None
    with pytest.raises(UserError, match=r"factor 4\.0"):
        run("--hf", hf, "--checkpoint", tmp_path / "weights", "--layouts", "1")


def test_layouts_are_read_as_written():
    layout = parse_layout("tp2pp2vpp2sp:layers=0-2-1-1")
    assert (layout.tp, layout.pp, layout.vpp, layout.dp, layout.layers) == (2, 2, 2, 1, [0, 2, 1, 1])
    assert layout.sequence_parallel and (layout.world_size, layout.row_multiple) == (4, 2)
    assert [each.world_size for each in parse_layouts("1, tp2,dp2pp2")] == [1, 2, 4]
    assert (parse_layout("ep4").dp, parse_layout("tp2ep4etp1").dp, parse_layout("dp8ep2etp2").dp) == (4, 2, 8)
    assert (parse_layout("cp2ep4").dp, parse_layout("cp2tp2sp").world_size) == (2, 4)
    for wrong in ("tp", "2", "tp2x", "tp2tp4", "pp2:layers=", "sp", "tp0", ""):
        with pytest.raises(UsageError, match="layout"):
            parse_layouts(wrong)


@pytest.mark.parametrize(
    ("family", "layouts", "message"),
    [
        ("qwen3_vl_moe", "1,tp2", "--layouts tp2: with experts, tensor parallelism needs sequence "),
        ("qwen3_vl_moe", "tp2pp2:layers=1-3", "write tp2pp2sp:layers=1-3"),
        ("qwen3_5", "1,cp32", "--layouts cp32: cp=32: qwen3_5 has linear attention"),
        ("qwen2_5_vl", "1,pp2:layers=1-2", "--layouts pp2:layers=1-2: layers [1, 2] add up to 3"),
    ],
)
def test_parity_names_an_impossible_layout(capsys, family, layouts, message):
    assert main(["parity", "--hf", family, "--layouts", layouts]) == 1
    said = capsys.readouterr().err
    assert message in said and "parallel." not in said
