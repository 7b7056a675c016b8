"""Reads optimizer state back into other layouts and checks the numbers and the files that are opened."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vl.spec.tensors import WHOLE, Cut, TensorInfo
from megatron_vl.training import optimizer_state
from megatron_vl.training.optimizer_state import (
    INDEX,
    KINDS,
    OptimizerReader,
    slices_of,
    write_hashed,
    write_index,
)
from megatron_vl.weights.blocks import shard
from megatron_vl.weights.run_folder import CheckpointError

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
    return torch.arange(info_size(info), dtype=torch.float32).view(info.shape) + 1000 * (
        1 + KINDS.index(kind)
    )


def info_size(info: TensorInfo) -> int:
    return torch.Size(info.shape).numel()


def saved(folder: Path, cut: Cut, *, kinds: tuple[str, ...] = KINDS) -> dict[str, dict[str, Any]]:
    """Saves it like ranks of ``cut`` x DP3: one buffer of all tensors, a third for each DP rank."""
    folder.mkdir(parents=True)
    files, slices = {}, {}
    for tp in range(cut.tp):
        parts = {
            info: {kind: shard(full(info, kind), info, tp, cut).reshape(-1) for kind in KINDS}
            for info in INFOS
        }
        total = sum(tensors["main"].numel() for tensors in parts.values())
        for dp in range(DP):
            low = total * dp // DP
            high = total * (dp + 1) // DP
            at = 0
            tensors: dict[str, Tensor] = {"rng/cpu": torch.zeros(4, dtype=torch.uint8)}
            for info, held in parts.items():
                count = held["main"].numel()
                start = max(low - at, 0)
                end = min(high - at, count)
                if start < end:
                    tensors |= {f"{info.name}[{start}:{end}]/{kind}": held[kind][start:end] for kind in kinds}
                    tensors[f"{info.name}[{start}:{end}]/step"] = torch.tensor([7])
                at += count

            name = f"rank_{dp * cut.tp + tp:05d}.safetensors"
            files[name] = write_hashed(folder / name, tensors, {"tp": str(tp)})
            slices[name] = slices_of(tensors, tp, 0)

    files[INDEX] = write_index(folder, slices)
    return files


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are opened as tensors or hashed."""
    names: list[str] = []
    safe_open, check_hash = optimizer_state.safe_open, optimizer_state.check_hash

    def open_(path: Path, **options: Any) -> Any:
        names.append(Path(path).name)
        return safe_open(path, **options)

    def check(path: Path, facts: Any) -> None:
        names.append(path.name)
        check_hash(path, facts)

    monkeypatch.setattr(optimizer_state, "safe_open", open_)
    monkeypatch.setattr(optimizer_state, "check_hash", check)
    return names


@pytest.mark.parametrize("written", [WHOLE, Cut(2), Cut(4)], ids=str)
@pytest.mark.parametrize("cut", [WHOLE, Cut(2), Cut(4)], ids=str)
def test_any_range_under_any_cut_is_that_of_the_full_tensor(tmp_path: Path, written: Cut, cut: Cut) -> None:
    reader = OptimizerReader(tmp_path / "o", saved(tmp_path / "o", written), written)
    for info in INFOS:
        for kind in KINDS:
            for part in range(cut.tp):
                want = shard(full(info, kind), info, part, cut).reshape(-1)
                for start, end in ((0, len(want)), (1, len(want) - 1), (len(want) // 2, len(want) // 2 + 1)):
                    got = reader.get(info, kind, part, cut, start, end)
                    assert got is not None and torch.equal(got, want[start:end]), (
                        info.name,
                        kind,
                        part,
                        start,
                        end,
                    )
        assert reader.step(info.name) == 7


def test_only_files_that_hold_the_range_are_opened(tmp_path: Path, opened: list[str]) -> None:
    files = saved(tmp_path / "o", Cut(2))
    reader = OptimizerReader(tmp_path / "o", files, Cut(2))
    assert opened == [INDEX]
    column = INFOS[0]
    # Of 12 x 6 elements a rank: all in the first third of the buffer (5 tensors, 223 elements, 74 each).
    reader.get(column, "main", 1, Cut(2), 0, 72)
    assert set(opened[1:]) == {"rank_00001.safetensors"}
    opened.clear()
    # The first rows of part 2 of 4 are the first rows of part 1 of 2: the same file, open already.
    reader.get(column, "main", 2, Cut(4), 6, 24)
    assert reader.step("column") == 7 and opened == []
    reader.get(column, "main", 0, Cut(4), 0, 36)
    assert set(opened) == {"rank_00000.safetensors"}


def test_without_an_index_the_state_is_refused(tmp_path: Path) -> None:
    files = saved(tmp_path / "o", Cut(2))
    del files[INDEX]
    with pytest.raises(CheckpointError, match="names no index.json"):
        OptimizerReader(tmp_path / "o", files, Cut(2))


def test_where_several_files_hold_the_same_each_rank_reads_its_own(tmp_path: Path, opened: list[str]) -> None:
    """The state is not spread over replicas; thousands of ranks must not read the first one's file."""
    files, slices = {}, {}
    for rank in range(3):
        tensors = {f"column[0:144]/{kind}": full(INFOS[0], kind).reshape(-1) for kind in KINDS}
        tensors["column[0:144]/step"] = torch.tensor([7])
        name = f"rank_{rank:05d}.safetensors"
        files[name] = write_hashed(tmp_path / name, tensors, {"tp": "0"})
        slices[name] = slices_of(tensors, 0, 0)
    files[INDEX] = write_index(tmp_path, slices)
    reader = OptimizerReader(tmp_path, files, WHOLE, own="rank_00002.safetensors")
    opened.clear()
    reader.get(INFOS[0], "main", 0, WHOLE, 10, 20)
    assert set(opened) == {"rank_00002.safetensors"}


def test_moments_before_the_first_step_are_none(tmp_path: Path) -> None:
    reader = OptimizerReader(tmp_path / "o", saved(tmp_path / "o", Cut(2), kinds=("main",)), Cut(2))
    for cut in (Cut(2), WHOLE):
        assert reader.get(INFOS[0], "exp_avg", 0, cut, 0, 6) is None
        assert reader.get(INFOS[0], "main", 0, cut, 0, 6) is not None


@pytest.mark.parametrize("damage", ["flip", "remove", "other"])
def test_a_damaged_index_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    files = saved(tmp_path / "o", Cut(2))
    path = tmp_path / "o" / INDEX
    text = path.read_text()
    path.unlink()
    if damage == "flip":
        path.write_text(text.replace("72", "73", 1))
    if damage == "other":
        elsewhere = text.replace("rank_00000", "../ank_0000").encode()
        path.write_bytes(elsewhere)
        files[INDEX] = {"bytes": len(elsewhere), "sha256": hashlib.sha256(elsewhere).hexdigest()}
    with pytest.raises(CheckpointError, match=INDEX):
        OptimizerReader(tmp_path / "o", files, Cut(2))


def test_what_the_index_lacks_is_said_without_opening_everything(tmp_path: Path, opened: list[str]) -> None:
    reader = OptimizerReader(tmp_path / "o", saved(tmp_path / "o", Cut(2)), Cut(2))
    opened.clear()
    with pytest.raises(CheckpointError, match="has no optimizer state for other"):
        reader.get(TensorInfo("other", (4, 4), "column", "layer"), "main", 0, Cut(2), 0, 8)
    assert opened == []
