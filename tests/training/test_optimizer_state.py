"""Optimizer state on disk: written beside the next step, and read back into other layouts from the files that
hold it.
"""

import hashlib
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vl.spec.tensors import UNSHARDED, Sharding, TensorInfo
from megatron_vl.training.state import optimizer_state
from megatron_vl.training.state.host_copies import HostBlocks, HostCopies
from megatron_vl.training.state.optimizer_state import (
    INDEX_FILE,
    STATE_KINDS,
    OptimizerStateReader,
    list_index_entries,
    write_hashed_safetensors,
    write_slice_index,
)
from megatron_vl.training.state.save import CheckpointSaver, take_snapshot
from megatron_vl.weights.matrix_blocks import cut_shard
from megatron_vl.weights.run_folder import CheckpointError
from tests.support.ranks import in_ranks
from tests.support.tiny_trainer import as_saved, load, state_of, tiny_trainer
from toolkit.checkpoint.contents import verify_checkpoint

INFOS = [
    TensorInfo("column", (24, 6), "column", "layer"),
    TensorInfo("row", (5, 24), "row", "layer"),
    TensorInfo("gated", (48, 3), "gated", "layer"),
    TensorInfo("bias", (24,), "column", "layer"),
    TensorInfo("norm", (7,), "replicated", "layer"),
]
DP = 3


def full(info: TensorInfo, kind: str) -> Tensor:
    """Each element encodes its position and its kind."""
    return torch.arange(torch.Size(info.shape).numel(), dtype=torch.float32).view(info.shape) + 1000 * (
        1 + STATE_KINDS.index(kind)
    )


def write_state(folder: Path, tensors_by_rank: list[tuple[int, dict[str, Tensor]]]) -> dict[str, Any]:
    """Writes a file for each (TP rank, tensors), and the index. Returns what ``run.json`` says of them."""
    folder.mkdir(parents=True, exist_ok=True)
    files, slices = {}, {}
    for rank, (tp, tensors) in enumerate(tensors_by_rank):
        name = f"rank_{rank:05d}.safetensors"
        files[name] = write_hashed_safetensors(folder / name, as_saved(tensors), {"tp": str(tp)})
        slices[name] = list_index_entries(as_saved(tensors), tp, 0)
    return files | {INDEX_FILE: write_slice_index(folder, slices)}


def saved(folder: Path, cut: Sharding, kinds: tuple[str, ...] = STATE_KINDS) -> dict[str, Any]:
    """Saves it like ranks of ``cut`` x DP3: one buffer of all tensors, a third for each DP rank."""
    tensors_by_rank = []
    for dp, tp in itertools.product(range(DP), range(cut.tp)):
        parts = {
            info: {kind: cut_shard(full(info, kind), info, tp, cut).reshape(-1) for kind in STATE_KINDS}
            for info in INFOS
        }
        total, at = sum(held["main"].numel() for held in parts.values()), 0
        low, high = total * dp // DP, total * (dp + 1) // DP
        tensors: dict[str, Tensor] = {}
        for info, held in parts.items():
            count = held["main"].numel()
            start, end = max(low - at, 0), min(high - at, count)
            if start < end:
                tensors |= {f"{info.name}[{start}:{end}]/{kind}": held[kind][start:end] for kind in kinds}
                tensors[f"{info.name}[{start}:{end}]/step"] = torch.tensor([7])
            at += count
        tensors_by_rank.append((tp, tensors))
    return write_state(folder, tensors_by_rank)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are opened as tensors or hashed."""
    names: list[str] = []
    for function in (optimizer_state.safe_open, optimizer_state.check_file_hash):

        def noted(path: Path, *args: Any, function: Any = function, **options: Any) -> Any:
            names.append(Path(path).name)
            return function(path, *args, **options)

        monkeypatch.setattr(optimizer_state, function.__name__, noted)
    return names


@pytest.mark.parametrize("written", [UNSHARDED, Sharding(2), Sharding(4)], ids=str)
@pytest.mark.parametrize("cut", [UNSHARDED, Sharding(2), Sharding(4)], ids=str)
def test_range_under_any_cut_is_that_of_the_full_tensor(tmp_path, written, cut) -> None:
    reader = OptimizerStateReader(tmp_path / "o", saved(tmp_path / "o", written), written)
    for info in INFOS:
        for kind, part in itertools.product(STATE_KINDS, range(cut.tp)):
            want = cut_shard(full(info, kind), info, part, cut).reshape(-1)
            for start, end in ((0, len(want)), (1, len(want) - 1), (len(want) // 2, len(want) // 2 + 1)):
                got = reader.read_range(info, kind, part, cut, start, end)
                assert got is not None and torch.equal(got, want[start:end]), (info, kind, part, start)
        assert reader.adam_step_count(info.name) == 7


def test_reader_opens_only_files_that_hold_the_range(tmp_path: Path, opened: list[str]) -> None:
    files = saved(tmp_path / "o", Sharding(2))
    reader = OptimizerStateReader(tmp_path / "o", files, Sharding(2))
    assert opened == [INDEX_FILE]
    column = INFOS[0]
    # Of 12 x 6 elements a rank: all in the first third of the buffer (5 tensors, 223 elements, 74 each).
    reader.read_range(column, "main", 1, Sharding(2), 0, 72)
    assert set(opened[1:]) == {"rank_00001.safetensors"}
    opened.clear()
    # The first rows of part 2 of 4 are the first rows of part 1 of 2: the same file, open already.
    reader.read_range(column, "main", 2, Sharding(4), 6, 24)
    assert reader.adam_step_count("column") == 7 and opened == []
    reader.read_range(column, "main", 0, Sharding(4), 0, 36)
    assert set(opened) == {"rank_00000.safetensors"}


def test_ranks_read_their_own_file_where_several_hold_the_same(tmp_path: Path, opened: list[str]) -> None:
    """The state is not spread over replicas; thousands of ranks must not read the first one's file."""
    tensors = {f"column[0:144]/{kind}": full(INFOS[0], kind).reshape(-1) for kind in STATE_KINDS}
    files = write_state(tmp_path, [(0, tensors | {"column[0:144]/step": torch.tensor([7])})] * 3)
    reader = OptimizerStateReader(tmp_path, files, UNSHARDED, own_file="rank_00002.safetensors")
    opened.clear()
    reader.read_range(INFOS[0], "main", 0, UNSHARDED, 10, 20)
    assert set(opened) == {"rank_00002.safetensors"}


def test_moments_before_the_first_step_are_none(tmp_path: Path) -> None:
    files = saved(tmp_path / "o", Sharding(2), kinds=("main",))
    reader = OptimizerStateReader(tmp_path / "o", files, Sharding(2))
    for cut in (Sharding(2), UNSHARDED):
        assert reader.read_range(INFOS[0], "exp_avg", 0, cut, 0, 6) is None
        assert reader.read_range(INFOS[0], "main", 0, cut, 0, 6) is not None


@pytest.mark.parametrize("damage", ["flip", "remove", "other", "unnamed"])
def test_damaged_index_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    files = saved(tmp_path, Sharding(2))
    path = tmp_path / INDEX_FILE
    text = path.read_text()
    path.unlink()
    if damage == "flip":
        path.write_text(text.replace("72", "73", 1))
    if damage == "other":
        elsewhere = text.replace("rank_00000", "../ank_0000").encode()
        path.write_bytes(elsewhere)
        files[INDEX_FILE] = {"bytes": len(elsewhere), "sha256": hashlib.sha256(elsewhere).hexdigest()}
    if damage == "unnamed":
        del files[INDEX_FILE]
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        OptimizerStateReader(tmp_path, files, Sharding(2))


def test_state_that_the_index_lacks_is_named_without_opening_files(tmp_path: Path, opened: list[str]) -> None:
    reader = OptimizerStateReader(tmp_path / "o", saved(tmp_path / "o", Sharding(2)), Sharding(2))
    opened.clear()
    with pytest.raises(CheckpointError, match="has no optimizer state for other"):
        reader.read_range(TensorInfo("other", (4, 4), "column", "layer"), "main", 0, Sharding(2), 0, 8)
    assert opened == []


CHUNKS = {"dtype": "bfloat16", "moments_dtype": "bfloat16", "offload_fraction": 0.4}


@pytest.mark.parametrize("fields", [{}, CHUNKS])
@in_ranks()
def test_files_hold_the_state_from_before_the_next_update(hf, fields: dict[str, Any], tmp_path: Path) -> None:
    """Copies and files take longer than the next passes; the state is in several files and slices."""
    optimizer_state._SLICE_ELEMENTS = 1000
    trainer = tiny_trainer(hf, **fields)
    trainer.run_step(0)
    saver = trainer.checkpoint_saver = CheckpointSaver(
        tmp_path, trainer.spec, trainer.layout, trainer.grid, 0
    )
    before, copy, order = state_of(trainer), HostCopies.copy, []

    def copy_slowly(self: HostCopies, memory: HostBlocks) -> None:
        time.sleep(1)
        copy(self, memory)
        order.append("copied")

    HostCopies.copy, optimizer_state._FILE_BYTES = copy_slowly, 1 << 16
    trainer.step = 2
    saver.start_save(lambda: take_snapshot(trainer, None, {"dp": 1}), 2)
    order.append("returned")
    assert trainer.run_step(1).is_updated
    order.append("updated")
    saver.wait_until_saved()
    assert order == ["returned", "copied", "updated"]
    assert len(list(tmp_path.glob("step_00000002/optimizer/rank_00000*"))) > 3
    assert verify_checkpoint(tmp_path / "step_00000002") == []

    HostCopies.copy, after = copy, state_of(trainer)
    resumed = trainer.again()
    load(resumed, tmp_path)
    for name, tensor in state_of(resumed).items():
        assert torch.equal(tensor, before[name]), name
    assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) / 2


def test_memory_of_a_save_is_used_by_the_next() -> None:
    blocks = HostBlocks()
    first = blocks.regions([100, 300, 1 << 20], is_pinned=False)
    assert [len(region) for region in first] == [100, 300, 1 << 20]
    starts = [region.data_ptr() for region in first]
    assert starts[1] - starts[0] == 128 and starts[2] - starts[1] == 320  # aligned to 64 bytes
    assert [region.data_ptr() for region in blocks.regions([100, 300], False)] == starts[:2]
    assert len(blocks.regions([100, 300, 2 << 20], False)[2]) == 2 << 20  # too large for the block
