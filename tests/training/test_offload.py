"""A run with optimizer state in host memory is that without, bit for bit, and the state moves."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_vl.kernels.sizes import MAX_STATE_CHUNKS_ON_GPU, STATE_CHUNKS_ON_GPU
from megatron_vl.training.offload.build import choose_offloaded
from megatron_vl.training.offload.pinned_memory import parse_cpu_list
from tests.support.ranks import call
from tests.training.offload_programs import (
    bytes_at_start,
    phases_of_slots,
    poisoned,
    saved_and_restored,
    steps_by_share,
    two_steps_by_hand,
)
from tests.training.small_run import metrics, prepare, small_checkpoint, train
from toolkit.checkpoint.rollback import restart_data

SHARES = [0.0, 0.4, 1.0]


def test_the_share_is_met_by_whole_parameters() -> None:
    assert choose_offloaded([5, 3, 2], 0.0) == set()
    assert choose_offloaded([5, 3, 2], 0.4) == {1}
    assert choose_offloaded([5, 3, 2], 0.7) == {0, 2}
    assert choose_offloaded([5, 3, 2], 1.0) == {0, 1, 2}
    assert choose_offloaded([1] * 1000, 0.333) == set(range(333))
    assert choose_offloaded([], 1.0) == choose_offloaded([0], 1.0) == set()


def test_cores_of_a_node() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpu_list("\n") == set()


def steps(hf: Path, ranks: int = 1, shares: list[float] = SHARES, **variables: Any) -> list[dict[str, Any]]:
    """The steps of rank 0 without offload. All ranks' losses, norms, weights and states are equal for all
    shares, and the state was where it belongs."""
    in_chunks = variables.get("moments_dtype") == "bfloat16"
    found = call(steps_by_share, ranks, hf=str(hf), shares=shares, **variables)
    for share in shares[1:]:
        assert found[str(share)] == found["0.0"], share
        held = found[f"{share} held"]
        assert share - 0.02 <= held["host"] <= share
        here, other = ("chunks on device", "device") if in_chunks else ("device", "chunks on device")
        assert math.isclose(held[here], 1 - held["host"], abs_tol=1e-9) and held[other] == 0
        assert held["chunks"] > 2 and held["cut"] > 1
    return found["0.0"][0]


@pytest.mark.ranks
def test_all_shares_give_the_same_bits(tiny_checkpoint) -> None:
    """Of weights in bf16, where the master weights move. Parameters are cut, the last chunk is not full."""
    taken = steps(tiny_checkpoint("qwen2_5_vl"), dtype="bfloat16", steps=2)
    assert len({step["state"] for step in taken}) == len(taken)


@pytest.mark.ranks
def test_weights_in_float32_are_their_own_masters(tiny_checkpoint) -> None:
    """Here with a step in between that is skipped."""
    taken = steps(tiny_checkpoint("qwen2_5_vl"), dtype="float32", steps=2, bad=1)
    assert [step["skipped"] for step in taken] == ["", "no_loss_tokens"]
    assert taken[0]["state"] == taken[1]["state"]


@pytest.mark.ranks
def test_moments_in_bf16_give_the_same_bits_for_all_shares(tiny_checkpoint) -> None:
    """They are all in chunks, in host memory or on the device, and not in the optimizer."""
    taken = steps(tiny_checkpoint("qwen2_5_vl"), dtype="bfloat16", steps=2, moments_dtype="bfloat16")
    assert len({step["state"] for step in taken}) == len(taken)


@pytest.mark.ranks
def test_two_steps_with_moments_in_bf16_worked_by_hand() -> None:
    """Gradients of 0.5 and -0.25, learning rate 0.1, betas 0.9 and 0.95, no epsilon.

    After the first step, the moments are a tenth of the gradient and a twentieth of its square: 0.05 and
    -0.025, 0.0125 and 0.003125. All are 1.6 times a power of two, between 204 and 205 of 128 parts of it, of
    which they take one. Corrected for their start, they give a step of 0.1.
    """
    first, second = call(two_steps_by_hand)
    assert first["main"] == pytest.approx([0.9, -1.9], rel=1e-6)
    assert first["weight"] == [0.8984375, -1.8984375]
    assert first["exp_avg"] == [204 / 128 / 2**5, -204 / 128 / 2**6]  # to the nearest, 204.8 would be 205
    assert first["exp_avg_sq"] == [205 / 128 / 2**7, 205 / 128 / 2**9]

    # The second step begins with what was kept, and Adam computes it in fp32.
    for at, gradient in enumerate((0.5, -0.25)):
        avg = 0.9 * first["exp_avg"][at] + 0.1 * gradient
        square = 0.95 * first["exp_avg_sq"][at] + 0.05 * gradient**2
        step = 0.1 * (avg / (1 - 0.9**2)) / (square / (1 - 0.95**2)) ** 0.5
        assert second["main"][at] == pytest.approx(first["main"][at] - step, rel=3e-7)
        assert second["exp_avg"][at] == pytest.approx(avg, rel=1 / 128)
        assert second["exp_avg_sq"][at] == pytest.approx(square, rel=1 / 128)
        assert abs(abs(step) - 0.1) > 1e-6  # what moments in fp32 would give


@pytest.mark.ranks
def test_moments_in_bf16_are_saved_and_resumed_with_any_share(tiny_checkpoint, tmp_path: Path) -> None:
    """And are the same after having been fp32 for no step; fp32 moments are rounded to the nearest."""
    found = call(saved_and_restored, hf=str(tiny_checkpoint("qwen2_5_vl")), folder=str(tmp_path))
    assert found.pop("wide") == ["torch.float32"]
    assert found.pop("to the nearest") and found.pop("rounded")
    assert len(found) == 4 and len(set(found.values())) == 1, found


@pytest.mark.ranks
def test_master_weights_that_leave_the_device_are_never_all_on_it(tiny_checkpoint) -> None:
    """While an optimizer is built, at most one of them and its copy in bf16 has storage."""
    for share, moments, kept in ((0.0, "float32", 1.0), (1.0, "float32", 0.0), (0.4, "float32", 0.6)):
        found = call(bytes_at_start, hf=str(tiny_checkpoint("qwen2_5_vl")), share=share, moments=moments)
        assert found["left"] == pytest.approx(kept * found["all"], rel=0.04, abs=4096), share
        assert found["most"] <= found["left"] + found["largest"] + 4096, (share, found)


@pytest.mark.ranks
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_state_that_is_not_spread_gives_the_same_bits(tiny_checkpoint, dtype: str) -> None:
    steps(tiny_checkpoint("qwen2_5_vl"), 2, dtype=dtype, spread=False)


@pytest.mark.ranks
@pytest.mark.full
def test_the_first_step_may_be_skipped(tiny_checkpoint) -> None:
    taken = steps(tiny_checkpoint("qwen2_5_vl"), dtype="bfloat16", bad=0)
    assert [step["skipped"] for step in taken] == ["no_loss_tokens", "", ""]


@pytest.mark.ranks
@pytest.mark.full
@pytest.mark.parametrize("rates", [{"vision_lr": 0.0}, {"lr": 0.0}], ids=str)
def test_a_rate_of_zero_gives_the_same_bits(tiny_checkpoint, rates: dict[str, float]) -> None:
    steps(tiny_checkpoint("qwen2_5_vl"), 2, dtype="bfloat16", **rates)


@pytest.mark.ranks
@pytest.mark.full
def test_what_is_streamed_is_what_is_used(tiny_checkpoint) -> None:
    """Also what is fetched during the backward pass, and dropped when its step is skipped. Without room, only
    the update takes memory."""
    out = call(poisoned, hf=str(tiny_checkpoint("qwen2_5_vl")))
    assert out["room"] == out["no room"] == out["plain"] != out["host"]
    assert out["room, on the device"] == [MAX_STATE_CHUNKS_ON_GPU] * 2
    assert out["no room, on the device"] == [0, STATE_CHUNKS_ON_GPU]


@pytest.mark.ranks
def test_slots_say_what_happens_to_their_chunks() -> None:
    """Each slot goes round from free to free, and a chunk is not dropped during its update."""
    out = call(phases_of_slots)
    once = ["fetching", "updating", "leaving", "free"]
    rounds = 0
    for phases in out["phases"]:
        while phases:
            seen = ["fetching", "free"] if phases[:2] == ["fetching", "free"] else once
            assert phases[: len(seen)] == seen, out["phases"]
            rounds += seen == once
            del phases[: len(seen)]
    assert rounds == 8 and out["sums"] == [2.0, 4.0, 6.0, 8.0]
    assert "from SlotPhase.UPDATING to SlotPhase.FREE" in out["error"]


# --- Whole runs


@pytest.fixture(scope="module")
def experts(tmp_path_factory, tiny_checkpoint) -> dict[str, Path]:
    """Of a model with experts."""
    hf = tiny_checkpoint("qwen3_vl_moe", dtype=torch.float32)
    return prepare(tmp_path_factory.mktemp("offload_experts") / "prepared", hf)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("offload")
    return prepare(folder / "prepared", small_checkpoint(folder / "hf"))


def run(prepared: dict[str, Path], folder: Path, share: float, ranks: int, steps: int, *options: str) -> None:
    done = train(
        prepared, folder, *options, "--optimizer.offload_fraction", str(share), ranks=ranks, steps=steps
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("of optimizer state in host memory" in done.stdout) == (share > 0)


def saved(folder: Path, step: int) -> dict[str, str]:
    """Hashes of what a checkpoint holds of weights and optimizer."""
    facts = json.loads((folder / f"step_{step:08d}" / "run.json").read_text())
    state = {name: one["sha256"] for name, one in facts["files"].items() if name.startswith("optimizer/")}
    return state | {"weights": facts["weights"]}


ROWS_PER_STEP = (
    "--global_batch_size",
    "4",
    "--optimizer.schedule",
    "constant",
    "--optimizer.warmup_steps",
    "0",
)
TP2 = ("--parallel.tp", "2", "--parallel.sequence_parallel", "true")


@pytest.mark.ranks
def test_any_share_resumes_any_other_in_any_layout(prepared: dict[str, Path], tmp_path: Path) -> None:
    """Two replicas save with a share of 0.4; TP2 goes on with all of it in host memory, and with none."""
    run(prepared, tmp_path / "some", 0.4, 2, 2, *ROWS_PER_STEP)
    shutil.copytree(tmp_path / "some", tmp_path / "none")
    for name, share in (("some", 1.0), ("none", 0.0)):
        restart_data(tmp_path / name)
        run(prepared, tmp_path / name, share, 2, 4, *ROWS_PER_STEP, *TP2)
    assert saved(tmp_path / "some", 4) == saved(tmp_path / "none", 4) != saved(tmp_path / "none", 2)


BF16 = ("--optimizer.moments_dtype", "bfloat16")


LAYOUTS = {
    "replicas": (2, ()),
    "TP2": (2, TP2),
    "VPP": (2, ("--parallel.pp", "2", "--parallel.vpp", "2", "--parallel.layers", "[1,1,1,1]")),
    "tower on every rank": (2, ("--parallel.pp", "2", "--vision.placement", "decoupled")),
    "moments in bf16": (2, BF16),
    "moments in bf16, TP2": (2, (*TP2, *BF16)),
    "moments in bf16, not spread": (
        2,
        (*BF16, "--parallel.distributed_optimizer", "false"),
    ),
    "frozen tower": (2, ("--model.freeze_vision", "true")),
    "frozen language": (2, ("--model.freeze_language", "true", "--parallel.pp", "2")),
}


@pytest.mark.ranks
@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_in_bf16_saves_the_same(prepared: dict[str, Path], tmp_path: Path, layout: str) -> None:
    compare(prepared, tmp_path, *LAYOUTS[layout])


@pytest.mark.ranks
@pytest.mark.full
def test_moments_of_another_type_and_layout_are_resumed(prepared: dict[str, Path], tmp_path: Path) -> None:
    """fp32 on two replicas, bf16 with TP2, fp32 on two replicas again. Every start with another type says so,
    and with bf16 moments any share gives the same."""
    note = "optimizer.moments_dtype was"
    starts: list[tuple[int, str, tuple[str, ...], str]] = [
        (2, "0", ROWS_PER_STEP, ""),
        (4, "0.4", (*ROWS_PER_STEP, *TP2, *BF16), f"{note} 'float32', is 'bfloat16'"),
        (6, "1.0", (*ROWS_PER_STEP, *TP2, *BF16), ""),
        (8, "0", ROWS_PER_STEP, f"{note} 'bfloat16', is 'float32'"),
    ]
    for steps, share, options, told in starts:
        if steps > 2:
            restart_data(tmp_path / "run")
        if steps == 6:
            shutil.copytree(tmp_path / "run", tmp_path / "other")
            run(prepared, tmp_path / "other", 0.0, 2, steps, *options)
        done = train(
            prepared, tmp_path / "run", *options, "--optimizer.offload_fraction", share, ranks=2, steps=steps
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert (note in done.stdout) == bool(told) and told in done.stdout
    assert saved(tmp_path / "run", 6) == saved(tmp_path / "other", 6)
    assert all(math.isfinite(line["loss"]) for line in metrics(tmp_path / "run"))


@pytest.mark.ranks
@pytest.mark.full
@pytest.mark.parametrize("spread", ["true", "false"])
def test_experts_have_an_optimizer_of_their_own(
    experts: dict[str, Path], tmp_path: Path, spread: str
) -> None:
    gathered = ("--parallel.distributed_optimizer", spread)
    compare(experts, tmp_path, 2, ("--parallel.ep", "2", *gathered))


def compare(prepared: dict[str, Path], folder: Path, ranks: int, layout: tuple[str, ...]) -> None:
    """From none in host memory to some to all: each step and each checkpoint is that of the run without."""
    options = (*layout, *ROWS_PER_STEP, "--dtype", "bfloat16", "--checkpoint.interval", "1")
    for name, shares in {"plain": (0.0, 0.0, 0.0), "moved": (0.0, 0.4, 1.0)}.items():
        for count, share in enumerate(shares, 1):
            run(prepared, folder / name, share, ranks, count, *options, "--checkpoint.keep", "0")

    for step in (1, 2, 3):
        assert saved(folder / "plain", step) == saved(folder / "moved", step), step
    lines = [[line["loss"] for line in metrics(folder / name)] for name in ("plain", "moved")]
    assert lines[0] == lines[1] and len(lines[0]) == 3
