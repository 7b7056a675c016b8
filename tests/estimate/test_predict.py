"""Predicted steps against measured ones on H200 (docs/log/speed.md), and what must follow from the fields.

The measured figures are those of the machines, never of the model of cost.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from megatron_vl.planning import gpus
from megatron_vl.planning.calibration import (
    CalibrationError,
    find_calibration,
)
from megatron_vl.planning.cost import mean_ranks_per_token
from megatron_vl.planning.layer_split import balance_layers
from megatron_vl.planning.memory_check import check_memory
from megatron_vl.planning.predict import RunPrediction
from megatron_vl.planning.row_statistics import RowShape, RowStatistics, make_assumed_rows
from megatron_vl.planning.run_layout import run_layout

from megatron_vl.config import FailuresConfig, RunConfigError, TrainConfig, parse_config
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import make_layout
from tests.support.planned import cut, predict_run

CONFIGS = Path(__file__).parents[1] / "hf_configs"
LEAN = (
    "--recompute.vision activation --recompute.language selective --recompute.language_modules [activation]"
)
TP2 = f"--parallel.tp 2 --parallel.sequence_parallel true {LEAN}"
PP4 = f"{LEAN} --recompute.vision full --global_batch_size 12 --parallel.pp 4"
ROWS_8 = f"--global_batch_size 8 {LEAN}"
FULL_8 = "--global_batch_size 8 --recompute.language full --recompute.vision full"
INTERLEAVED = "--parallel.pp 2 --parallel.vpp 2 --parallel.layers [0,5,2,9]"
DECOUPLED = f"{ROWS_8} --parallel.pp 2 --parallel.layers [14,14] --vision.placement decoupled"
EP2 = f"--parallel.ep 2 {LEAN}"
NARROW, AWAY = "--optimizer.moments_dtype bfloat16", "--optimizer.offload_fraction"
B7, B3, B8 = "Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL-3B-Instruct", "Qwen3-VL-8B-Instruct"
A3, B9, A35 = "Qwen3-VL-30B-A3B-Instruct", "Qwen3.5-9B", "Qwen3.5-35B-A3B"

TEXT = RowStatistics("documents of 300 to 700 tokens", (RowShape((500,) * 16, loss_tokens=8000),))

MEASURED = [
    ("7B", 3137, B7, cut(10), 1, ROWS_8),
    ("7B, text", 1916, B7, cut(10), 1, ROWS_8),
    ("9B", 3282, B9, cut(12), 1, ROWS_8),
    ("30B-A3B", 2186, A3, cut(6, 3), 1, f"{ROWS_8} --data.seq_len 32768"),
]
"""ms a step, on the rows of `megatron-vl bench`, experts evenly loaded. One H200, 2026-11-26."""
EARLIER_MEASURED = [
    ("DP2, 20 layers, images", 2543, B7, cut(20), 2, ROWS_8),
    ("DP2, 20 layers, text", 1858, B7, cut(20), 2, ROWS_8),
    ("DP4, whole", 3279, B7, {}, 4, f"--global_batch_size 16 {LEAN}"),
    ("DP2, 10 layers", 3386, B7, cut(10), 2, f"--global_batch_size 16 {LEAN}"),
    ("3B, images", 1978, B3, {}, 1, "--global_batch_size 4"),
    ("3B, text", 1215, B3, {}, 1, "--global_batch_size 4"),
    ("TP2, images", 2649, B7, cut(16), 2, f"--global_batch_size 8 {TP2}"),
    ("TP2, text", 484, B7, cut(8, 8), 2, f"--global_batch_size 4 {TP2}"),
    ("8B, images", 883, B8, cut(9, 7), 1, "--global_batch_size 4"),
    ("8B, text", 853, B8, cut(9, 7), 1, "--global_batch_size 4"),
    ("PP2", 3647, B7, {}, 2, f"{ROWS_8} --parallel.pp 2 --parallel.layers [8,20]"),
    ("PP2, text", 3713, B7, {}, 2, f"{ROWS_8} --parallel.pp 2 --parallel.layers [8,20]"),
    ("PP2 x VPP2", 2643, B7, cut(16), 2, f"{ROWS_8} {INTERLEAVED}"),
    ("DP2, 4 rows a GPU", 1717, B7, cut(10), 2, ROWS_8),
    ("tower on every rank", 3701, B7, {}, 2, DECOUPLED),
    ("tower on every rank, text", 2930, B7, {}, 2, DECOUPLED),
    ("PP4, even", 5143, B7, {}, 4, f"{PP4} --parallel.layers [7,7,7,7]"),
    ("PP4, planned", 3691, B7, {}, 4, f"{PP4} --parallel.layers [0,9,9,10]"),
    ("EP2, rows of 32768", 1253, A3, cut(12, 7), 2, f"--global_batch_size 4 {EP2} --data.seq_len 32768"),
    ("EP2, rows of 8192", 2267, A3, cut(12, 7), 2, f"--global_batch_size 16 {EP2}"),
    ("7B on one GPU", 3374, B7, cut(10), 1, ROWS_8),
    ("moments in bf16", 3384, B7, cut(10), 1, f"{ROWS_8} {NARROW}"),
    ("all computed again", 4404, B7, cut(10), 1, FULL_8),
    ("offload 1", 4050, B7, cut(10), 1, f"{ROWS_8} {AWAY} 1"),
    ("offload 1, bf16", 3770, B7, cut(10), 1, f"{ROWS_8} {AWAY} 1 {NARROW}"),
    ("3B whole, 8 rows", 3858, B3, {}, 1, ROWS_8),
    ("8B, 12 layers", 3164, B8, cut(12), 1, ROWS_8),
    ("30B-A3B on one GPU", 2015, A3, cut(6), 1, ROWS_8),
    ("linear attention", 3508, B9, cut(12), 1, ROWS_8),
    ("linear attention, experts, bf16", 2225, A35, cut(4, 3), 1, f"{ROWS_8} --data.seq_len 32768 {NARROW}"),
    ("EP2, all computed again", 3137, A3, cut(12, 7), 2, f"{FULL_8} --data.seq_len 32768 --parallel.ep 2"),
]
"""Steps of the program and the kernels before 2026-11-25, whose rates were :data:`EARLIER_RATES`."""
EARLIER_RATES = {
    "product_tflops": 718.0,
    "product_width": 400.0,
    "memory_tb_s": 4.0,
    "decoder_widths": 114.0,
    "tower_widths": 59.0,
    "attention_tflops": 500.0,
    "attention_length": 1100.0,
    "tower_attention_tflops": 200.0,
    "expert_tflops": 560.0,
    "optimizer_ps": 11.0,
    "gradient_ps": 1.5,
    "host_copy_gb_s": 47.0,
}


def config(options: str) -> TrainConfig:
    return parse_config(["--data.seq_len", "8192", *options.split()])


def spec_of(size: str, **layers: int) -> ModelSpec:
    return read_spec(CONFIGS / f"{size}.json").replace_layers(**layers)


def run(size: str, world: int, options: str, **layers: int) -> RunPrediction:
    return predict_run(config(options), spec_of(size, **layers), world)


@pytest.mark.parametrize(
    ("name", "measured", "size", "layers", "world", "options"), MEASURED, ids=[m[0] for m in MEASURED]
)
def test_a_step_takes_what_was_measured(name, measured, size, layers, world, options) -> None:
    rows = TEXT if name.endswith("text") else None
    found = predict_run(config(options), spec_of(size, **layers), world, rows=rows)
    assert 1e3 * found.step_seconds == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("name", "measured", "size", "layers", "world", "options"),
    EARLIER_MEASURED,
    ids=[m[0] for m in EARLIER_MEASURED],
)
def test_a_step_took_what_was_measured_earlier(name, measured, size, layers, world, options) -> None:
    rows = TEXT if name.endswith("text") else None
    earlier_calibration = dataclasses.replace(find_calibration(), **EARLIER_RATES)
    found = predict_run(
        config(options), spec_of(size, **layers), world, rows=rows, calibration=earlier_calibration
    )
    assert 1e3 * found.step_seconds == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("world", "options", "ratio"),
    [
        (2, "0.5", 3324 / 3227),
        (2, "1", 3562 / 3207),
        (1, "1", 4050 / 3374),
        (1, f"1 {NARROW}", 3770 / 3392),
        (1, f"1 {NARROW}", 3475 / 3232),
        (1, f"0.5 {NARROW}", 3305 / 3232),
        (1, "0.5", 3497 / 3232),
    ],
)
def test_offload_takes_as_much_longer_as_measured(world: int, options: str, ratio: float) -> None:
    """Both steps of a ratio ran on the same machine."""
    shape = f"--global_batch_size {8 * world} {LEAN}"
    without = run(B7, world, shape, num_language_layers=10)
    found = run(B7, world, f"{shape} {AWAY} {options}", num_language_layers=10)
    assert found.step_seconds / without.step_seconds == pytest.approx(ratio, rel=0.03)


def test_passes_hide_no_more_copies_than_slots_hold() -> None:
    """A forward pass of a long row lasts longer than copies of all slots, 32 of 256 MiB at 50.5 GB/s."""
    options = f"--global_batch_size 1 --data.seq_len 65536 --recompute.language full {AWAY} 1"
    (stage,) = run(B7, 1, options, num_language_layers=10).stage_plans
    copied_bytes, slot_bytes = 10 * 4.1016e9, 32 * 2**28
    rest_seconds = (copied_bytes - slot_bytes) / (find_calibration().host_copy_gb_s * 1e9)
    assert stage.seconds_per_row > 2.0
    assert stage.optimizer_seconds == pytest.approx(rest_seconds, abs=0.03)


def test_copies_of_inputs_take_time_only_where_layers_take_less() -> None:
    """At 47 GB/s, layers hide them. At 0.042 GB/s, each pass of a layer takes as long as its input's copy."""
    options = "--recompute.language full --global_batch_size 1"
    moved = f"{options} --recompute.offload_inputs true"
    here, away = (run(B7, 1, each, num_language_layers=10) for each in (options, moved))
    assert away.step_seconds == here.step_seconds

    slow = dataclasses.replace(find_calibration(), host_copy_gb_s=0.042)
    nine, ten = (
        predict_run(config(moved), spec_of(B7, num_language_layers=layers), 1, calibration=slow)
        for layers in (9, 10)
    )
    a_layer = ten.stage_plans[0].seconds_per_row - nine.stage_plans[0].seconds_per_row
    assert a_layer == pytest.approx(2 * 8192 * 3584 * 2 / 0.042e9)


def test_the_planned_split_is_as_much_faster_as_measured() -> None:
    """5,143 ms even, 3,691 ms with [0,9,9,10]: 1.39 times."""
    even = run(B7, 4, f"{PP4} --parallel.layers [7,7,7,7]")
    planned = run(B7, 4, PP4)
    assert planned.layout.layers_per_chunk != (7, 7, 7, 7) and planned.layout.layers_per_chunk[0] == 0
    assert even.step_seconds / planned.step_seconds == pytest.approx(5143 / 3691, rel=0.03)


def test_an_empty_split_and_auto_are_the_planned_one() -> None:
    spec = spec_of(B7)
    options = f"{LEAN} --recompute.vision full --global_batch_size 8 --parallel.pp 2"
    left_out = run_layout(config(options), spec, 2)
    assert run_layout(config(f"{options} --parallel.layers auto"), spec, 2) == left_out
    assert left_out.layers_per_chunk != (14, 14) and sum(left_out.layers_per_chunk) == 28
    # The even one runs out of memory; the planned one fits.
    assert predict_run(config(options), spec, 2).fits_memory
    assert not run(
        B7, 2, f"{LEAN} --global_batch_size 8 --parallel.pp 2 --parallel.layers [14,14]"
    ).fits_memory


def test_a_run_on_cpu_is_split_evenly() -> None:
    spec = spec_of(B7, num_language_layers=6)
    options = "--global_batch_size 8 --parallel.pp 2 --data.seq_len 1024"
    assert run_layout(config(options), spec, 2).layers_per_chunk == (0, 6)
    on_cpu = config(f"{options} --platform cpu")
    assert run_layout(on_cpu, spec, 2).layers_per_chunk == (3, 3)
    assert run_layout(on_cpu, spec, 2, calibration=find_calibration("H100")).layers_per_chunk == (3, 3)


def test_a_saved_split_stays_while_the_stages_do() -> None:
    spec = spec_of(B7)
    run_of_two = config("--global_batch_size 8 --parallel.pp 2")
    saved = make_layout(spec, pp=2, layers=[3, 25])
    assert run_layout(run_of_two, spec, 2, saved_layout=saved).layers_per_chunk == (3, 25)
    other = config("--global_batch_size 8 --parallel.pp 4")
    assert len(run_layout(other, spec, 4, saved_layout=saved).layers_per_chunk) == 4
    given = config("--global_batch_size 8 --parallel.pp 2 --parallel.layers [10,18]")
    assert run_layout(given, spec, 2, saved_layout=saved).layers_per_chunk == (10, 18)


def test_balanced_by_hand() -> None:
    """Ten layers of 1 on three entries, the first of which has 4 and the last 1 besides: 5 each."""
    assert balance_layers([1.0] * 10, 4.0, 1.0, 3) == (1, 5, 4)
    assert balance_layers([1.0] * 8, 0.0, 0.0, 4) == (2, 2, 2, 2)
    # A tower longer than its share leaves the rest to the others.
    assert balance_layers([1.0] * 9, 30.0, 0.0, 4) == (0, 3, 3, 3)
    # Layers that take longer are fewer.
    assert balance_layers([1.0] * 4 + [2.0] * 2, 0.0, 0.0, 2) == (4, 2)


def test_ranks_of_a_token() -> None:
    """Counted in docs/log/experts.md: 8 of 128 experts are on 1.99, 3.63 and 5.34 ranks."""
    for ep, expected in ((1, 1.0), (2, 1.99), (4, 3.63), (8, 5.34)):
        assert mean_ranks_per_token(128, 8, ep) == pytest.approx(expected, abs=0.01)


def test_stated_rows_are_those_of_bench() -> None:
    """docs/log/speed.md: 1,149 tokens with loss of 7,974, 22,208 to 23,844 patches."""
    rows = make_assumed_rows(spec_of(B7), 8192)
    assert rows.mean_tokens == pytest.approx(7974, rel=0.01)
    assert rows.loss_tokens == pytest.approx(1149, rel=0.03)
    assert rows.mean_patches == pytest.approx(22588, rel=0.01)
    assert make_assumed_rows(spec_of(B7), 8192, max_patches=8000).most_patches <= 8000
    # A row too short for a picture still has one document.
    assert make_assumed_rows(spec_of(B7), 256).mean_tokens <= 256


def test_more_work_takes_longer() -> None:
    base = run(B7, 8, "--global_batch_size 64")
    again = run(B7, 8, "--global_batch_size 64 --recompute.language full --recompute.vision full")
    frozen = run(B7, 8, "--global_batch_size 64 --model.freeze_vision true --model.freeze_merger true")
    assert frozen.step_seconds < base.step_seconds < again.step_seconds < 4 / 3 * base.step_seconds
    assert again.mfu < base.mfu
    alone = dataclasses.replace(find_calibration(), nvlink_gb_s=1.0)
    slow = predict_run(config("--global_batch_size 64"), spec_of(B7), 8, calibration=alone)
    assert slow.step_seconds > 2 * base.step_seconds


# --- The refusal --------------------------------------------------------------------------------------------


def test_a_run_that_does_not_fit_is_refused_with_what_to_do() -> None:
    spec = spec_of(B7)
    given = config("--global_batch_size 8 --parallel.pp 2 --parallel.layers [14,14]")
    layout = run_layout(given, spec, 2)
    advice = r"H200 has 140; .*`megatron-vl plan --gpus 2 --search`.*--failures.check_memory false"
    with pytest.raises(RunConfigError, match=advice):
        check_memory(given, spec, layout, 2, find_calibration())

    anyway = dataclasses.replace(given, failures=FailuresConfig(check_memory=False))
    told = check_memory(anyway, spec, layout, 2, find_calibration())
    assert "the run may end for lack of memory" in told
    small = config(
        "--global_batch_size 8 --data.seq_len 1024 --recompute.language full --recompute.vision full"
    )
    eight = run_layout(small, spec, 8)
    assert check_memory(small, spec, eight, 8, find_calibration()) == ""


# --- Calibrations -------------------------------------------------------------------------------------------


def test_other_gpus_are_scaled_and_said_to_be() -> None:
    assert find_calibration("H200").measured and find_calibration("H200").provenance
    for gpu in ("H100", "A100", "B200"):
        assert not find_calibration(gpu).measured
    assert find_calibration("A100").product_tflops == pytest.approx(718 * 312 / 989, rel=0.1)
    with pytest.raises(CalibrationError, match="GPU Z80 is unknown; known: H200"):
        find_calibration("Z80")


def test_a_device_name_names_its_kind() -> None:
    assert find_calibration("NVIDIA H200") == find_calibration("h200") == find_calibration()
    assert "from this package" in find_calibration("h200").source


def test_this_machines_gpus_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(name: str, mib: int = 143771):
        monkeypatch.setattr(gpus, "_cached_gpus", lambda: (gpus.GpuInfo(0, name, mib, 0, "580"),))
        return gpus.read_local_calibration()

    assert here("NVIDIA H200") == find_calibration()
    assert here("NVIDIA H200 NVL", 90000).memory_gib == pytest.approx(90000 / 1024)
    assert "not measured but scaled from H200's" in here("NVIDIA A100-SXM4-80GB", 81920).source
    unknown = here("NVIDIA L40S", 46068)
    assert not unknown.measured and unknown.memory_gib < 45 and unknown.product_tflops == 686.0
    assert unknown.source == "nothing is known of NVIDIA L40S, so the rates are H200's"
    assert gpus.calibration_for_platform("cpu").gpu == "H200"
