"""HF -> Megatron -> HF gives back every byte, for all sizes, layouts and naming styles."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from converters.convert import WeightsReport, convert_weights, export_weights, reshard_weights
from converters.tensor_folder import TensorFolder
from tests.data.media import write

from .helpers import (
    SIZES,
    assert_same_folder,
    experts_apart,
    hf_model,
    released_folder,
    released_tensors,
    run,
    small_config,
    tp_sizes,
    write_hf,
)

PIPELINES = {
    "pp1": {},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "uneven": {"pp": 2, "layers": [1, 3]},
    "vpp2": {"pp": 2, "vpp": 2},
    "empty_first_stage": {"pp": 4, "layers": [0, 2, 1, 1]},
    "uneven_vpp": {"pp": 2, "vpp": 2, "layers": [0, 2, 2, 0]},
}
FIRST = {size.split("-VL-")[0] + ("-A" * ("-A" in size)): size for size in reversed(SIZES)}.values()
"""One size of each family."""
EXPERTS = ({"ep": 8}, {"ep": 2}, {}, {"ep": 4, "etp": 2}, {"ep": 2, "etp": 4}, {"etp": 2})
"""What a model with experts adds to a layout, used in turn."""


def in_make_test(is_chosen: bool) -> list[pytest.MarkDecorator]:
    return [] if is_chosen else [pytest.mark.full]


def layouts() -> Iterator[Any]:
    """Every size with every pipeline and TP size. `make test` has one TP size in turn for each family and
    pipeline, and all of :data:`EXPERTS` for those with experts."""
    for (i, size), (j, pipeline) in itertools.product(enumerate(SIZES), enumerate(PIPELINES)):
        tp_sizes_of_model = tp_sizes(size)
        for k, tp in enumerate(tp_sizes_of_model):
            turn = (i + j + k) % len(tp_sizes_of_model)
            experts = EXPERTS[(i + j + turn) % len(EXPERTS)] if "-A" in size else {}
            is_chosen = size in FIRST and turn == len(tp_sizes_of_model) - 1
            layout = {"tp": tp, **PIPELINES[pipeline], **experts}
            yield pytest.param(size, layout, id=f"{size}-{tp}-{pipeline}", marks=in_make_test(is_chosen))


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("released")
    return cache(lambda size: released_folder(root / size, size))


def assert_round_trip(origin: Path, layout: dict[str, Any]) -> WeightsReport:
    """HF -> shards -> HF gives the same bytes, in folders beside ``origin``."""
    convert_weights(origin, origin.with_name("shards"), layout)
    report = export_weights(origin.with_name("shards"), origin, origin.with_name("back"))
    assert_same_folder(origin, origin.with_name("back"))
    return report


@pytest.mark.parametrize(("size", "layout"), layouts())
def test_round_trip_of_every_layout(tmp_path: Path, origins, size: str, layout: dict[str, Any]) -> None:
    (tmp_path / "hf").symlink_to(origins(size))
    assert_round_trip(tmp_path / "hf", layout)


@pytest.mark.parametrize("size", [pytest.param(size, marks=in_make_test(size in FIRST)) for size in SIZES])
def test_round_trip_through_two_layouts(tmp_path: Path, origins, size: str) -> None:
    origin, tp = origins(size), tp_sizes(size)[-1]
    a: dict[str, Any] = {"tp": tp, "pp": 2, "vpp": 2} | ({"ep": 4, "etp": 2} if "-A" in size else {})
    b: dict[str, Any] = {"tp": 2, "pp": 4, "layers": [0, 1, 1, 2]} | (
        {"ep": 2, "etp": 4} if "-A" in size else {}
    )
    convert_weights(origin, tmp_path / "full")
    reshard_weights(tmp_path / "full", tmp_path / "a", a)
    reshard_weights(tmp_path / "a", tmp_path / "b", b)
    reshard_weights(tmp_path / "b", tmp_path / "full_again")
    export_weights(tmp_path / "b", origin, tmp_path / "back")
    assert_same_folder(tmp_path / "full", tmp_path / "full_again")
    assert_same_folder(origin, tmp_path / "back")
    convert_weights(origin, tmp_path / "direct", a)
    assert_same_folder(tmp_path / "a", tmp_path / "direct")


SAVED = [
    pytest.param(size, original, id=f"{size}-{name}", marks=in_make_test(size in FIRST))
    for size in SIZES
    for name, original in (("released_names", True), ("names_in_memory", False))
    if original or not size.startswith("Qwen3") or "-VL-" in size and "-A" in size
]
"""Other families are released as they are in memory."""


@pytest.mark.parametrize(("size", "original_format"), SAVED)
def test_round_trip_of_save_pretrained(tmp_path: Path, size: str, original_format: bool) -> None:
    """Folders of transformers 5 have a nested config; loaded again they are equal."""
    model = hf_model(size)
    model.save_pretrained(tmp_path / "hf", max_shard_size="2MB", save_original_format=original_format)
    assert "text_config" in json.loads((tmp_path / "hf" / "config.json").read_text())
    names = TensorFolder(tmp_path / "hf").file_by_tensor
    # Qwen3-VL is released with the names in memory.
    assert ("visual.patch_embed.proj.weight" in names) is (original_format and not size.startswith("Qwen3"))
    assert_round_trip(tmp_path / "hf", {"tp": 2, "pp": 2} | ({"ep": 4, "etp": 2} if "-A" in size else {}))
    back = type(model).from_pretrained(tmp_path / "back", dtype=torch.bfloat16).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, back[name]), name


def with_mixed_types(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Norms have their own data types, and so has one tensor of those that Megatron fuses."""
    wide = re.compile("norm|merger|k_proj|up_proj")
    # 1.0001 is a value that only the wide type can hold, so that a round trip through a narrow one shows.
    return {n: t.float() * 1.0001 if wide.search(n) else t.half() for n, t in tensors.items()}


def with_tied_output(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some tools write the tied output layer: it is read if it equals the embedding."""
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


@pytest.mark.parametrize(
    ("size", "change"),
    [
        ("Qwen2.5-VL-7B-Instruct", with_mixed_types),
        ("Qwen3-VL-30B-A3B-Instruct", with_mixed_types),
        ("Qwen2-VL-2B-Instruct", with_tied_output),
    ],
)
def test_round_trip_of_unusual_folders(tmp_path: Path, size: str, change: Callable[..., Any]) -> None:
    origin = write_hf(tmp_path / "hf", change(released_tensors(size)), small_config(size), files=3)
    assert not assert_round_trip(origin, {"tp": 4, "pp": 2, "layers": [1, 3]}).cast


@pytest.mark.parametrize("style", ["input_first", "output_first", "apart"])
def test_round_trip_of_experts_in_every_style(tmp_path: Path, style: str) -> None:
    """With dense layers in between, and another type of one of the two stacks, or of a part of one."""
    size = "Qwen3-VL-30B-A3B-Instruct"
    config, tensors = small_config(size), released_tensors(size)
    config["text_config"]["mlp_only_layers"] = [1]
    dense = released_tensors("Qwen3-VL-8B-Instruct")
    for name in [name for name in tensors if ".layers.1.mlp." in name]:
        del tensors[name]
    for name in (name for name in dense if ".layers.1.mlp." in name):
        tensors[name] = dense[name][:192] if "down" in name else dense[name][..., :192]
    if style == "apart":
        tensors = experts_apart(tensors)
    elif style == "output_first":
        tensors = {name: t.transpose(1, 2) if ".mlp.experts." in name else t for name, t in tensors.items()}
    for name in (name for name in tensors if "experts" in name and "up_proj" in name):
        tensors[name] = tensors[name].float() * 1.0001
    origin = write_hf(tmp_path / "hf", tensors, config, files=3)
    convert_weights(origin, tmp_path / "full")
    reshard_weights(tmp_path / "full", tmp_path / "shards", {"tp": 4, "pp": 2, "vpp": 2, "ep": 2, "etp": 2})
    reshard_weights(tmp_path / "shards", tmp_path / "other", {"tp": 1, "pp": 3, "ep": 8})
    for source in ("full", "shards", "other"):
        export_weights(tmp_path / source, origin, tmp_path / "back", force=True)
        assert_same_folder(origin, tmp_path / "back")


@pytest.mark.parametrize(("experts", "mtp"), [("stacked", "stacked"), ("apart", "apart"), ("apart", "none")])
def test_experts_and_prediction_in_every_style(tmp_path: Path, experts: str, mtp: str) -> None:
    """Qwen3.5 stacks the model's experts but not MTP's, Qwen3.6 both; ``transformers`` neither, no MTP."""
    size = "Qwen3.5-35B-A3B"
    tensors = {name: t for name, t in released_tensors(size).items() if not name.startswith("mtp.")}
    tensors = experts_apart(tensors, input_first=False) if experts == "apart" else tensors
    other = {"apart": size, "stacked": "Qwen3.6-35B-A3B", "none": "Qwen3.6-27B"}[mtp]
    beside = {name: t for name, t in released_tensors(other).items() if name.startswith("mtp.")}
    beside = {} if mtp == "none" else beside
    origin = write_hf(tmp_path / "hf", tensors | beside, small_config(size), files=3)

    report = convert_weights(origin, tmp_path / "shards", {"tp": 2, "pp": 2, "ep": 4, "etp": 2})
    assert report.carried == len(beside) and (mtp == "none" or len(beside) > 4)
    report = export_weights(tmp_path / "shards", origin, tmp_path / "back")
    assert report.carried == len(beside) and report.tensors == len(tensors) + len(beside)
    assert_same_folder(origin, tmp_path / "back")


@pytest.mark.parametrize("place", ["", "model.", "language_model.", "model.language_model."])
def test_prediction_is_left_where_it_is(tmp_path: Path, place: str, capsys) -> None:
    """As released, and in the places of other tools, where transformers ignores it too."""
    from transformers import AutoModelForImageTextToText

    size, origin, full, back = "Qwen3.5-0.8B", tmp_path / "hf", tmp_path / "full", tmp_path / "back"
    tensors = {place * name.startswith("mtp.") + name: t for name, t in released_tensors(size).items()}
    write_hf(origin, tensors, small_config(size))
    assert run("convert", "--hf", origin, "--out", full, "--parallel.tp", 2) == 0
    note = "note: 3 tensors of multi-token prediction (mtp.*) were not converted"
    assert note in capsys.readouterr().out
    assert run("export", "--checkpoint", full, "--hf", origin, "--out", back) == 0
    note = "(mtp.*) were copied from the original folder as they are: they were not"
    assert note in capsys.readouterr().out
    assert_same_folder(origin, back)
    theirs = AutoModelForImageTextToText.from_pretrained(origin, output_loading_info=True)[1]
    assert not theirs["missing_keys"] and all("mtp." in name for name in theirs["unexpected_keys"])


def test_conversion_copies_other_files(tmp_path: Path) -> None:
    origin = released_folder(tmp_path / "cache" / "snapshots" / "1a2b", "Qwen2.5-VL-3B-Instruct")
    write(origin / "additional_chat_templates" / "tool.jinja", b"{{ messages }}")
    write(tmp_path / "cache" / "blobs" / "3c4d", b"vocabulary")
    (origin / "merges.txt").symlink_to("../../blobs/3c4d")
    write(origin / ".git" / "HEAD", b"ref")
    (origin / "pytorch_model.bin").write_bytes(b"other weights")
    convert_weights(origin, tmp_path / "full")
    report = export_weights(tmp_path / "full", origin, tmp_path / "back")
    assert report.skipped == ["pytorch_model.bin"]
    assert (tmp_path / "back" / "merges.txt").read_text() == "vocabulary"
    assert not (tmp_path / "back" / "merges.txt").is_symlink()
    assert (tmp_path / "back" / "additional_chat_templates" / "tool.jinja").is_file()
    assert not (tmp_path / "back" / "pytorch_model.bin").exists()
    assert not (tmp_path / "back" / ".git").exists()
