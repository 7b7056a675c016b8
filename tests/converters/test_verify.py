"""verify compares bit for bit and names what differs."""

import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from converters.compare import compare_weights, verify_checkpoint_hashes
from converters.convert import convert_weights
from converters.tensor_folder import SINGLE_FILE
from toolkit.cli import main

from .helpers import flip_a_bit, released_folder, released_tensors, small_config, write_hf

SIZE = "Qwen2.5-VL-3B-Instruct"


def folder_of(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir()
    save_file(tensors, path / SINGLE_FILE)
    return path


def test_verify_names_every_kind_of_difference(tmp_path: Path) -> None:
    nan, zeros = torch.tensor([float("nan")]), torch.zeros
    first = {"kind": zeros(2), "shape": zeros(2), "sign": zeros(3), "scalar": torch.tensor(1)}
    second = {"kind": zeros(2).half(), "shape": zeros(1, 2), "sign": -zeros(3), "scalar": torch.tensor(2)}
    a = folder_of(tmp_path / "a", same=nan, **first, only=torch.ones(1))
    b = folder_of(tmp_path / "b", same=nan, **second, new=torch.ones(1))
    found = {difference.name: difference.how for difference in compare_weights(a, b).differences}
    assert found == {
        "kind": "type F32 against F16",
        "new": "missing in the first folder",
        "only": "missing in the second folder",
        "scalar": "1 of 1 elements differ, the first at 0, by at most 1",
        "shape": "shape [2] against [1, 2]",
        "sign": "3 of 3 elements differ, the first at 0, by at most 0",
    }


def present_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As ``save_pretrained(save_original_format=False)`` names the tensors of a released Qwen2.5-VL."""
    return {
        re.sub("^visual", "model.visual", re.sub("^model", "model.language_model", name)): tensor
        for name, tensor in tensors.items()
    }


def test_verify_reads_both_naming_styles(tmp_path: Path, capsys) -> None:
    """The same tensors under other names are identical; a differing bit is found under any name."""
    tensors = released_tensors(SIZE)
    a = write_hf(tmp_path / "a", tensors, small_config(SIZE))
    b = write_hf(tmp_path / "b", present_names(tensors), small_config(SIZE), files=2)
    assert main(["verify", str(a), str(b)]) == 0

    said = capsys.readouterr().out
    assert f"identical: {len(tensors)} tensors" in said
    assert f"{len(tensors)} names differ only in naming style" in said
    assert "model.embed_tokens.weight is model.language_model.embed_tokens.weight in the second" in said

    changed = {name: tensor.clone() for name, tensor in present_names(tensors).items()}
    damaged = sorted(name for name in changed if ".attn." in name or ".self_attn." in name)[:11]
    for name in damaged:
        changed[name].view(torch.int16).flatten()[7] ^= 1
    c = write_hf(tmp_path / "c", changed, small_config(SIZE))
    assert main(["verify", str(a), str(c)]) == 1
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith("different: 11 of ") and "1 of" in lines[1] and "the first at 7" in lines[1]
    assert lines[11] == "  ... and 1 more"
    assert said.err == ""  # no progress and no escape codes off a terminal
    assert [found.name for found in compare_weights(c, a).differences] == damaged


def test_verify_does_not_guess_a_tensor_under_both_names(tmp_path: Path) -> None:
    ones = lambda *names: {name: torch.ones(1) for name in names}  # noqa: E731
    a = folder_of(tmp_path / "a", **ones("visual.x", "model.visual.x", "visual.y", "lm_head.weight"))
    b = folder_of(tmp_path / "b", **ones("visual.x", "model.visual.y", "lm_head.weight"))
    result = compare_weights(a, b)
    assert [found.name for found in result.differences] == ["model.visual.x"] and result.renamed == 1


def test_verify_compares_two_layouts(tmp_path: Path) -> None:
    hf = released_folder(tmp_path / "hf", SIZE)
    convert_weights(hf, tmp_path / "a", {"tp": 8, "pp": 2})
    convert_weights(hf, tmp_path / "b")
    assert compare_weights(tmp_path / "a", tmp_path / "b").differences == []
    assert verify_checkpoint_hashes(tmp_path / "a").differences == []
    flip_a_bit(tmp_path / "a" / "tp03_pp01.safetensors")
    (damaged,) = verify_checkpoint_hashes(tmp_path / "a").differences
    (other,) = compare_weights(tmp_path / "a", tmp_path / "b").differences
    assert damaged.name == other.name and "tp03_pp01.safetensors" in damaged.how
