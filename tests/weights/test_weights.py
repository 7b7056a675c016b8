"""The on-disk format: cuts and inverses, slices from any layout, a true manifest, the latest checkpoint."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import Layout, make_layout
from megatron_vl.spec.tensors import EMBEDDING_TENSOR, Sharding, TensorInfo, tensor_table
from megatron_vl.system.json_files import manifest_digest
from megatron_vl.weights.manifest import MANIFEST_FILE, write_manifest, write_rank_file
from megatron_vl.weights.matrix_blocks import cut_shard
from megatron_vl.weights.run_folder import (
    CheckpointError,
    SavedCheckpoint,
    find_latest_checkpoint,
    saved_checkpoints,
    step_dir_path,
)
from megatron_vl.weights.tensor_files import MatrixRegion, TensorReader, WeightsError, read_safetensors_header
from megatron_vl.weights.weight_reader import WeightReader

TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 8, "intermediate_size": 43, "out_hidden_size": 32}
TOWER |= {"patch_size": 4}
TEXT = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 8, "num_key_value_heads": 2}
TEXT |= {"num_hidden_layers": 4, "vocab_size": 40}
CONFIG = {
    "model_type": "qwen2_5_vl",
    **TEXT,
    "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 0, 1]},
    "vision_config": {**TOWER, "fullatt_block_indexes": [1]},
}
EXPERTS = {"moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
ROPE = {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}}
MOE_CONFIG = {
    "model_type": "qwen3_vl_moe",
    "text_config": {**TEXT, "head_dim": 8, **EXPERTS, **ROPE},
    "vision_config": {**TOWER, "num_position_embeddings": 9, "deepstack_visual_indexes": [0]},
}
CUTS = [Sharding(ep=1), Sharding(ep=8), Sharding(ep=2, etp=3), Sharding(ep=4, etp=2), Sharding(etp=4)]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_spec(CONFIG)


@pytest.fixture(scope="module")
def full(spec: ModelSpec) -> dict[str, Tensor]:
    return random_tensors(spec)


def random_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(info.shape, generator=generator).to(
            torch.float32 if "norm" in name else torch.bfloat16
        )
        for name, info in tensor_table(spec).items()
    }


def write_shards(folder: Path, spec: ModelSpec, full: dict[str, Tensor], layout: Layout) -> list[dict]:
    """Writes shards like a training run: each rank writes its file, one writes the manifest."""
    cut, entries = layout.sharding, []

    def write(is_experts: bool, **ranks: int) -> None:
        axes = {f"{axis}_rank": rank for axis, rank in ranks.items() if axis != "pp"}
        parts = {
            info.name: cut_shard(full[info.name], info, cut.shard_index(info, **axes), cut)
            for info in tensor_table(spec).values()
            if layout.owning_pipeline_rank(info) == ranks["pp"] and bool(info.num_experts) is is_experts
        }
        entries.append(write_rank_file(folder, parts, **ranks))

    for pp in range(layout.pp):
        for tp in range(layout.tp):
            write(False, tp=tp, pp=pp)
        for ep, etp in itertools.product(range(layout.ep if spec.language.moe else 0), range(layout.etp)):
            write(True, ep=ep, etp=etp, pp=pp)
    sent = json.loads(json.dumps(entries))  # they travel between ranks
    write_manifest(folder, spec, layout, sent)
    return sent


@pytest.fixture
def unsplit(tmp_path: Path, spec: ModelSpec, full: dict[str, Tensor]) -> Path:
    entry = write_rank_file(tmp_path, full, tp=0, pp=0)
    write_manifest(tmp_path, spec, None, [entry], {"hf": "somewhere"})
    return tmp_path


def test_cut_of_a_gated_tensor_has_its_part_of_both_halves() -> None:
    for style, expected in (("gated", [2, 3, 6, 7]), ("column", [4, 5, 6, 7])):
        info = TensorInfo("x", (8,), style, "vision")  # type: ignore[arg-type]
        assert cut_shard(torch.arange(8), info, 1, Sharding(2)).tolist() == expected


MODELS = {
    "dense": (CONFIG, [Sharding(tp) for tp in (1, 2, 4, 8)]),
    "experts": (MOE_CONFIG, [cut._replace(tp=1 + i % 2) for i, cut in enumerate(CUTS)]),
}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", {"tp": 1}),
        ("dense", {"tp": 2}),
        ("dense", {"tp": 8}),
        ("dense", {"tp": 4, "pp": 2, "layers": [0, 4]}),
        ("dense", {"tp": 2, "pp": 2, "vpp": 2}),
        ("experts", {}),
        ("experts", {"tp": 2, "pp": 2, "ep": 4, "etp": 2}),
        ("experts", {"tp": 4, "pp": 2, "vpp": 2, "ep": 2}),
        ("experts", {"tp": 1, "etp": 3}),
    ],
    ids=str,
)
def test_slices_are_read_out_of_any_layout(tmp_path: Path, model: str, layout: dict) -> None:
    config, cuts = MODELS[model]
    spec = read_spec(config)
    full = random_tensors(spec)
    write_shards(tmp_path, spec, full, make_layout(spec, **layout))
    reader = WeightReader(tmp_path)
    assert reader.spec == spec and reader.layout == make_layout(spec, **layout)
    assert reader.tensor_names() == list(full)
    for name, info in tensor_table(spec).items():
        assert reader.dtype(name) == full[name].dtype
        for cut in [*cuts, reader.sharding]:
            for part in range(cut.num_shards(info)):
                got, want = reader.read_shard(name, part, cut), cut_shard(full[name], info, part, cut)
                assert got.dtype == want.dtype and torch.equal(got, want), (name, part, cut)
                for expert in range(len(want) if info.num_experts else 0):
                    assert torch.equal(reader.read_shard(name, part, cut, expert_index=expert), want[expert])


def test_write_refuses_incomplete_entries_and_wrong_places(tmp_path) -> None:
    spec = read_spec(MOE_CONFIG)
    layout = make_layout(spec, tp=2, ep=2)
    entries = write_shards(tmp_path / "good", spec, random_tensors(spec), layout)
    layer = "language_model.decoder.layers.2.mlp"
    name, router = f"{layer}.experts.linear_fc1.weight", f"{layer}.router.weight"
    one = next(i for i, entry in enumerate(entries) if entry.get("ep") == 1)
    last = next(i for i, entry in enumerate(entries) if entry.get("tp") == 1)

    def move(name: str, source: int, target: int) -> Callable[[list[dict]], object]:
        return lambda e: e[target]["tensors"].update({name: e[source]["tensors"].pop(name)})

    cases: dict[str, Callable[[list[dict]], object]] = {
        "is missing on tensor rank 1, pipeline rank 0": lambda e: e.pop(last),
        f"'{router}' is missing on tensor rank 1": lambda e: e[last]["tensors"].pop(router),
        r"has shape \[1, 2\] on tensor rank 1": lambda e: e[last]["tensors"][router].update(shape=[1, 2]),
        f"'{router}' has different types": lambda e: e[last]["tensors"][router].update(dtype="float32"),
        "linear_fc1.weight' is missing on expert rank 1, pipeline": lambda e: e[one]["tensors"].pop(name),
        "does not belong in tp00_pp00": move(name, one, 0),
        "router.weight' does not belong in ep01": move(router, 0, one),
    }
    for message, change in cases.items():
        changed = json.loads(json.dumps(entries))
        change(changed)
        with pytest.raises(WeightsError, match=message):
            write_manifest(tmp_path, spec, layout, changed)
    assert not (tmp_path / MANIFEST_FILE).exists()

    files = json.loads((tmp_path / "good" / MANIFEST_FILE).read_text())["files"]
    files["ep00_etp00_pp00.safetensors"]["ep"] = 1
    edited(tmp_path / "good", files=files)
    with pytest.raises(WeightsError, match="of expert rank 1 is in two files"):
        WeightReader(tmp_path / "good")


def test_files_are_plain_safetensors(tmp_path: Path, spec: ModelSpec, full: dict[str, Tensor]) -> None:
    """Tensors are aligned although types are mixed; the manifest hashes the stored bytes."""
    layout = make_layout(spec, tp=2, pp=2)
    write_shards(tmp_path, spec, full, layout)
    manifest = json.loads((tmp_path / MANIFEST_FILE).read_text())
    for file, entry in manifest["files"].items():
        stored = load_file(tmp_path / file)
        assert stored.keys() == entry["tensors"].keys()
        for name, tensor in stored.items():
            data = tensor.view(torch.uint8).numpy().tobytes()
            assert hashlib.sha256(data).hexdigest() == entry["tensors"][name]
        header = read_safetensors_header(tmp_path / file)
        assert len(header) % 8 == 0
        for name, place in json.loads(header[8:]).items():
            if name != "__metadata__":
                assert place["data_offsets"][0] % stored[name].element_size() == 0


def test_file_with_unaligned_tensors(tmp_path: Path) -> None:
    """The format allows a header of any length, but torch cannot view data that starts at an odd byte."""
    tensor = torch.randn(5, 3)
    text = json.dumps({"x": {"dtype": "F32", "shape": [5, 3], "data_offsets": [0, 60]}}).encode()
    text += b" " * (3 - len(text) % 4)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + tensor.numpy().tobytes())
    assert len(text) % 4 == 3
    reader = TensorReader(path)
    assert torch.equal(reader.read_region("x", MatrixRegion(0, 5, 0, 3)), tensor)
    assert torch.equal(reader.read_region("x", MatrixRegion(2, 4, 1, 3)), tensor[2:4, 1:3])


def test_rank_reads_its_own_file_only(tmp_path: Path, spec: ModelSpec, full: dict[str, Tensor]) -> None:
    layout = make_layout(spec, tp=2, pp=2)
    write_shards(tmp_path, spec, full, layout)
    reader = WeightReader(tmp_path)
    # The other ranks' files may lie on another node's slow path: their content is not touched.
    for file in ("tp00_pp00", "tp00_pp01", "tp01_pp00"):
        (tmp_path / f"{file}.safetensors").write_bytes(b"")
    for name, info in tensor_table(spec).items():
        if layout.owning_pipeline_rank(info) == 1:
            expected = cut_shard(full[name], info, 1, Sharding(2))
            assert torch.equal(reader.read_shard(name, 1, Sharding(2)), expected)
    with pytest.raises(WeightsError, match="tp01_pp00.safetensors is not a whole safetensors file"):
        reader.read_shard(EMBEDDING_TENSOR, 1, Sharding(2))


def test_replicas_that_differ_are_reported(tmp_path: Path, spec: ModelSpec, full: dict[str, Tensor]) -> None:
    """Differences mean a fault in training; the weights are kept, with a warning that names the tensor."""
    layout = make_layout(spec, tp=2)
    name = "language_model.decoder.final_layernorm.weight"
    table = tensor_table(spec)
    entries = []
    for t in range(2):
        tensors = {n: cut_shard(full[n], info, t, Sharding(2)) for n, info in table.items()}
        tensors[name] = tensors[name] + t
        entries.append(write_rank_file(tmp_path, tensors, tp=t, pp=0))
    with pytest.warns(UserWarning, match=name):
        write_manifest(tmp_path, spec, layout, entries)
    assert torch.equal(WeightReader(tmp_path).read_shard(name), full[name])


def edited(folder: Path, **changes: object) -> None:
    """Changes fields of a manifest and makes the digest fit, so that the contents are what is refused."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text()) | changes
    if "digest" not in changes:
        manifest["digest"] = manifest_digest(manifest)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


LAYOUT = {"tp": 2, "pp": 1, "vpp": 1, "layers": [4], "ep": 1, "etp": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "is not a manifest of"),
        ({"version": 2}, "has version 2 of its format, and this program reads 1; convert again"),
        ({"digest": "0" * 64}, "manifest.json was changed after it was written"),
        ({"layout": LAYOUT}, "tensor .* is missing on tensor rank 1"),
        ({"layout": {"tp": 2}}, "is damaged: KeyError: 'pp'"),
        ({"layout": LAYOUT | {"tp": 3}}, "manifest.json: tp=3 does not divide"),
        ({"hf_config": {"model_type": "llama"}}, "model_type 'llama' is not supported"),
        ({"hf_config": CONFIG | {"num_hidden_layers": "4"}}, "manifest.json is damaged: "),
        ({"hf_config": []}, "manifest.json is damaged: "),
        ({"files": {}}, "tensor .* is missing on"),
        ({"files": {"../x.safetensors": {"tp": 0, "pp": 0, "tensors": {}}}}, "is not a file name of weights"),
        ({"files": {"x.safetensors": {"tp": 0, "pp": 0, "tensors": {}}}}, "x.safetensors is missing"),
    ],
)
def test_bad_manifests(unsplit: Path, changes: dict, message: str) -> None:
    edited(unsplit, **changes)
    with pytest.raises(WeightsError, match=message):
        WeightReader(unsplit)


def test_manifest_edits_are_noticed(unsplit, spec) -> None:
    """This includes fields that nothing else depends on; the order of keys and spaces do not count."""
    manifest = json.loads((unsplit / MANIFEST_FILE).read_text())
    for name in manifest:
        without = {key: value for key, value in manifest.items() if key != name}
        for changed in (manifest | {name: "other"}, without):
            (unsplit / MANIFEST_FILE).write_text(json.dumps(changed))
            with pytest.raises(WeightsError, match="manifest"):
                WeightReader(unsplit)
    (unsplit / MANIFEST_FILE).write_text(json.dumps(dict(reversed(manifest.items())), indent=7))
    assert WeightReader(unsplit).spec == spec


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_flipped_bit_is_refused_by_name(tmp_path, spec, full, tp: int) -> None:
    """Any slice makes the whole stored tensor be compared; other tensors and ranks stay usable."""
    layout = make_layout(spec, tp=2, pp=2)
    write_shards(tmp_path, spec, full, layout)
    file = tmp_path / "tp01_pp01.safetensors"
    name = "language_model.decoder.layers.3.mlp.linear_fc2.weight"
    header = read_safetensors_header(file)
    data = bytearray(file.read_bytes())
    data[len(header) + json.loads(header[8:])[name]["data_offsets"][1] - 1] ^= 16
    file.write_bytes(data)
    reader, refused = WeightReader(tmp_path), 0
    for rank in range(tp):
        try:
            got = reader.read_shard(name, rank, Sharding(tp))
        except WeightsError as error:
            assert f"{file} is damaged: tensor '{name}' is not what was written" in str(error)
            refused += 1
        else:
            assert torch.equal(got, cut_shard(full[name], reader.tensor_infos[name], rank, Sharding(tp)))
    assert refused == max(1, tp // 2)
    for other in set(full) - {name}:
        assert torch.equal(reader.read_shard(other), full[other])
    unverified = WeightReader(tmp_path, should_verify=False).read_shard(name)
    assert not torch.equal(unverified, full[name])  # who asks for it gets what is there


def test_latest_checkpoint_is_the_largest_step_wherever_the_folder_lies(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    for step in (2, 100_000_000, 4):
        step_dir_path(run, step).mkdir(parents=True)
    for name in ("step_900000000.partial", "step_x", "steps_3", "step_800000000.old.partial"):
        (run / name).mkdir()
    (run / "step_700000000").write_text("")
    shutil.move(run, moved)
    assert find_latest_checkpoint(moved) == SavedCheckpoint(moved / "step_100000000", 100_000_000)
    assert [saved.step for saved in saved_checkpoints(moved)] == [2, 4, 100_000_000]
    assert find_latest_checkpoint(run) is find_latest_checkpoint(moved / "step_700000000") is None


def test_interrupted_rollback_must_be_finished_first(tmp_path: Path) -> None:
    step_dir_path(tmp_path, 6).mkdir()
    (tmp_path / "abandoned" / "after_step_00000004").mkdir(parents=True)
    assert find_latest_checkpoint(tmp_path) == SavedCheckpoint(tmp_path / "step_00000006", 6)
    (tmp_path / "abandoned" / "after_step_00000002.partial").mkdir()
    command = f"finish it with `megatron-vl checkpoint rollback {tmp_path} 2`"
    with pytest.raises(CheckpointError, match=command):
        find_latest_checkpoint(tmp_path)
