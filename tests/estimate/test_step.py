"""The closed form by hand, splits of layers, and what must follow from the fields."""

import dataclasses
from pathlib import Path

import pytest

from megatron_vl.config import FailuresConfig, RunConfigError, TrainConfig, parse_config
from megatron_vl.data.synthetic import IMAGE_SIZES, TEXT_LENGTHS
from megatron_vl.estimate import gpus
from megatron_vl.estimate.gpus import find_gpu, peak_tflops
from megatron_vl.estimate.memory_check import check_memory
from megatron_vl.estimate.parameters import mean_ranks_per_token
from megatron_vl.estimate.rows import MARK_TOKENS, assumed_rows
from megatron_vl.estimate.split import balance_layers, run_layout
from megatron_vl.estimate.step import RunPrediction
from megatron_vl.spec.families import ModelSpec, read_spec
from tests.support.planned import predict_run

CONFIGS = Path(__file__).parents[1] / "hf_configs"
B7 = "Qwen2.5-VL-7B-Instruct"


def config(options: str) -> TrainConfig:
    return parse_config(["--data.seq_len", "8192", *options.split()])


def spec_of(size: str, **layers: int) -> ModelSpec:
    return read_spec(CONFIGS / f"{size}.json").replace_layers(**layers)


def run(size: str, world: int, options: str, **layers: int) -> RunPrediction:
    return predict_run(config(options), spec_of(size, **layers), world)


def test_step_of_text_worked_by_hand() -> None:
    """10 layers of the 7B: 6 FLOPs a weight and token, and causal attention over documents of 500 tokens."""
    found = run(B7, 1, "--global_batch_size 8 --data.path synthetic:text", num_language_layers=10)
    tokens, h, ffn = 0.98 * 8192, 3584, 18944
    layer = 6 * tokens * (h * (3584 + 1024) + h * h + 3 * h * ffn) + 3 * 2 * h * tokens * 500
    output = 6 * tokens * h * spec_of(B7).language.vocab_size
    shares = find_gpu().efficiencies
    expected = 8 * (10 * layer / shares.decoder + output / shares.output) / 989e12
    assert found.step_seconds == pytest.approx(expected)


def test_bubble_worked_by_hand() -> None:
    """Four equal stages and eight rows: three rows more, and a seventh of them with seven chunks each."""
    options = "--global_batch_size 8 --parallel.pp 4 --model.freeze_vision true --data.path synthetic:text"
    plain = run(B7, 4, f"{options} --parallel.layers [7,7,7,7]")
    chunks = f"{options} --parallel.vpp 7 --parallel.layers {[1] * 28}".replace(", ", ",")
    interleaved = run(B7, 4, chunks)
    slowest = max(plain.stage_seconds)
    fill = sum(plain.stage_seconds) - slowest
    assert plain.bubble == pytest.approx(fill / (8 * slowest)) and 0.2 < plain.bubble < 3 / 8
    assert plain.step_seconds == pytest.approx(8 * slowest + fill)
    assert interleaved.stage_seconds == pytest.approx(plain.stage_seconds)
    assert interleaved.bubble == pytest.approx(plain.bubble / 7)


def test_messages_by_hand() -> None:
    """TP2 of the 7B's text rows: four collectives a pass move half of a row's hidden states."""
    options = "--global_batch_size 8 --data.path synthetic:text"
    alone = run(B7, 2, options, num_language_layers=10)
    cut = run(B7, 2, f"{options} --parallel.tp 2 --parallel.sequence_parallel true", num_language_layers=10)
    messages = 8 * 10 * 2 * 4 * (8192 * 3584 * 2) / 2 / 300e9
    assert cut.step_seconds == pytest.approx(8 / 2 * sum(alone.stage_seconds) + messages)


def test_offloaded_state_costs_what_no_pass_hides() -> None:
    """12 + 2 bytes of 10 for each of 4.1 billion parameters in host memory, one way."""
    options = "--global_batch_size 8 --optimizer.offload_fraction"
    with_state, without = (run(B7, 1, f"{options} {share}", num_language_layers=10) for share in (1, 0))
    copies = with_state.stages[0].host_bytes / 50.5e9
    hidden = without.stage_seconds[0] / 3
    extra = with_state.step_seconds - without.step_seconds
    assert extra == pytest.approx(copies - hidden) and extra > 0.5


def test_ranks_of_a_token() -> None:
    """Counted in benchmarks/log/experts.md: 8 of 128 experts are on 1.99, 3.63 and 5.34 ranks."""
    for ep, expected in ((1, 1.0), (2, 1.99), (4, 3.63), (8, 5.34)):
        assert mean_ranks_per_token(128, 8, ep) == pytest.approx(expected, abs=0.01)


def test_assumed_rows_are_those_of_bench() -> None:
    """benchmarks/log/speed.md: 1,149 tokens with loss of 7,974, 22,208 to 23,844 patches."""
    rows = assumed_rows(config(""), spec_of(B7))
    assert rows.tokens == pytest.approx(7974, rel=0.01)
    assert rows.loss_tokens == pytest.approx(1149, rel=0.03)
    assert rows.patches == pytest.approx(22588, rel=0.01)
    units = [round(width / 28) * round(height / 28) for width, height in IMAGE_SIZES]
    document = sum(units) / len(units) + MARK_TOKENS + sum(TEXT_LENGTHS) / len(TEXT_LENGTHS)
    assert rows.tokens / (rows.loss_tokens / 75) == pytest.approx(document, rel=0.01)
    assert assumed_rows(config("--data.max_patches 8000"), spec_of(B7)).patches <= 8000
    assert assumed_rows(config("--data.path synthetic:text"), spec_of(B7)).patches == 0


def test_balanced_by_hand() -> None:
    """Ten layers of 1 on three entries, the first of which has 4 and the last 1 besides: 5 each."""
    assert balance_layers((1.0,) * 10, 4.0, 1.0, 3) == (1, 5, 4)
    assert balance_layers((1.0,) * 8, 0.0, 0.0, 4) == (2, 2, 2, 2)
    # A tower longer than its share leaves the rest to the others.
    assert balance_layers((1.0,) * 9, 30.0, 0.0, 4) == (0, 3, 3, 3)
    # Layers that take longer are fewer.
    assert balance_layers((1.0,) * 4 + (2.0,) * 2, 0.0, 0.0, 2) == (4, 2)
    # With chunks, the other ones of the first stage make up for a long tower: 5 + 1 and 6.
    assert balance_layers((1.0,) * 7, 5.0, 0.0, 2, 2) in ((0, 3, 1, 3), (0, 2, 1, 4), (0, 4, 1, 2))


def test_split_is_the_same_on_every_platform_and_number_of_gpus() -> None:
    spec, options = spec_of(B7), "--global_batch_size 8 --parallel.pp 2"
    kinds = ("", "--platform cpu", "--parallel.layers auto")
    layouts = {run_layout(config(f"{options} {more}"), spec, gpus) for more in kinds for gpus in (2, 4)}
    (layout,) = layouts
    # The first stage also runs the tower. [8,20] was measured to be the fastest (benchmarks/log/speed.md).
    assert layout.layers_per_chunk in ((8, 20), (9, 19), (10, 18))


def test_run_that_does_not_fit_is_refused_with_what_to_do() -> None:
    spec = spec_of(B7)
    given = config("--global_batch_size 8 --parallel.pp 2 --parallel.layers [14,14]")
    layout = run_layout(given, spec, 2)
    advice = r"H200 has 140; .*`megatron-vl plan --gpus 2` .*--failures.check_memory false"
    with pytest.raises(RunConfigError, match=advice):
        check_memory(given, spec, layout, 2, find_gpu())

    anyway = dataclasses.replace(given, failures=FailuresConfig(check_memory=False))
    assert "the run may end for lack of memory" in check_memory(anyway, spec, layout, 2, find_gpu())
    full = "--recompute.language full --recompute.vision full"
    small = config(f"--global_batch_size 8 --data.seq_len 1024 {full}")
    assert check_memory(small, spec, run_layout(small, spec, 8), 8, find_gpu()) == ""


def test_device_name_names_its_kind() -> None:
    assert find_gpu("NVIDIA H200") == find_gpu("h200") == find_gpu()
    assert find_gpu("NVIDIA GeForce RTX 4090").marketed_gb == 24
    assert (peak_tflops("NVIDIA H800"), peak_tflops("cpu"), peak_tflops("cpu", 5.0)) == (989.0, 0.0, 5.0)


def test_estimate_takes_the_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(name: str, mib: int = 143771) -> gpus.Gpu | None:
        monkeypatch.setattr(gpus, "query_gpus", lambda: [gpus.GpuInfo(0, name, mib, 0, "580")])
        return gpus.local_gpu.__wrapped__()

    assert here("NVIDIA H200") == find_gpu()
    less = here("NVIDIA H200 NVL", 90000)
    assert less is not None and less.memory_gib == pytest.approx(90000 / 1024)
    unknown = here("NVIDIA RTX A6000", 49140)
    assert unknown is not None and not unknown.is_measured and unknown.memory_gib < 48
    assert unknown.name == "NVIDIA RTX A6000" and unknown.peak_tflops == 989.0
