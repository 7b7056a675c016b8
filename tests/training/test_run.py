"""The trainer as users start it, with real data, four ranks, checkpoints, resume and export."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from converters.compare import compare_weights
from converters.convert import export_weights, reshard_weights
from megatron_vl.weights.tensor_files import WeightsError
from megatron_vl.weights.weight_reader import WeightReader
from tests.security.payload import edit
from tests.support.tiny_run import LAYOUT, metrics, trained
from toolkit.checkpoint.contents import verify_checkpoint
from toolkit.demo.reference import DemoReference

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def whole(prepared: dict[str, Path]) -> Path:
    run = prepared["folder"] / "whole"
    saves = ["--checkpoint.interval", "1", "--checkpoint.keep", "1", "--checkpoint.keep_every", "4"]
    trained(prepared, run, *LAYOUT, *saves)
    return run


def test_run_logs_one_line_a_step_and_keeps_the_latest_and_every_fourth(whole: Path) -> None:
    lines = metrics(whole)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in whole.glob("step_*")) == ["step_00000004", "step_00000006"]
    assert lines[-1]["loss"] < lines[0]["loss"]
    for line in lines:
        assert line["updated"] and line["grad_norm"] > 0 and line["tokens_per_s_per_rank"] > 0
        assert line["samples"] > 0 and line["tflops_per_rank"] > 0
        assert line["lr"] == line["lr/language"] == line["lr/vision"] == line["lr/merger"] > 0
        assert line["skipped/not_finite"] == line["skipped/no_loss_tokens"] == 0


def test_export_with_the_text_rules_of_another_folder_is_refused(prepared, whole, tmp_path) -> None:
    """Its shapes do not show it. Merged weights keep what the run recorded."""
    reshard_weights(whole, merged := tmp_path / "merged")
    for other in ("tokenizer", "chat template"):
        shutil.copytree(prepared["hf"], folder := tmp_path / other)
        if other == "tokenizer":
            edit(folder / "tokenizer.json", normalizer={"type": "Lowercase"})
        else:
            (folder / "chat_template.json").unlink(missing_ok=True)
            (folder / "chat_template.jinja").write_text("another {{ messages }}")
        for weights in (whole, merged):
            with pytest.raises(WeightsError, match=f"^{weights}.* another {other} than that in {folder},"):
                export_weights(weights, folder, tmp_path / "out")
    export_weights(merged, prepared["hf"], tmp_path / "same")
    export_weights(prepared["weights"], folder, tmp_path / "out")  # which no run has trained


QUICK = ["--data.num_workers", "0"]
EVALUATION = ["--eval.interval", "3", "--eval.rows", "3"]
EXACT = ("step", "loss", "grad_norm", "loss_tokens", "samples", "images", "lr")
"""What only training may change."""


@pytest.fixture(scope="module")
def resumed(prepared: dict[str, Path]) -> Path:
    """The run of ``whole`` with evaluations and no loader workers, started again after three steps."""
    run = prepared["folder"] / "resumed"
    for options in (["--stop_after", "3"], []):
        printed = trained(prepared, run, *LAYOUT, *QUICK, *EVALUATION, *options)
    assert "resumed at step 3" in printed and "nothing to do" not in printed
    return run


def test_run_evaluates_at_its_steps_once(resumed: Path) -> None:
    evaluations = metrics(resumed, "eval.jsonl")
    assert [line["step"] for line in evaluations] == [0, 3, 6]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]


def test_validation_is_that_of_transformers_in_every_layout(prepared, resumed) -> None:
    """Compares the loss over the rows' samples on four ranks (TP and PP) and two (DP and CP)."""
    ours = metrics(resumed, "eval.jsonl")[:1]
    still = ["--optimizer.lr", "0", "--optimizer.warmup_steps", "0", "--eval.interval", "1", *QUICK]
    for name, layout in (("dp2", []), ("cp2", ["--parallel.cp", "2"])):
        run = prepared["folder"] / f"evaluated_{name}"
        trained(prepared, run, *EVALUATION, *still, *layout, ranks=2, steps=1)
        ours += metrics(run, "eval.jsonl")
    assert [line["step"] for line in ours] == [0, 0, 1, 0, 1]

    reference = DemoReference(prepared["hf"], video_fps=2.0, video_max_frames=8)
    records, held_out = json.loads(prepared["records"].read_text()), validation_records(prepared["data"])
    losses = [reference.assistant_loss(records[number], prepared["media"]) for number in held_out]
    count = sum(tokens for _, tokens in losses)
    for line in ours:
        assert line["loss_tokens"] == count
        assert line["loss"] == pytest.approx(sum(total for total, _ in losses) / count, rel=1e-5)


def validation_records(data: Path) -> list[int]:
    """The places of the held-out samples in the input."""
    numbers = []
    for shard in sorted(data.glob("val*.tar")):
        with tarfile.open(shard) as tar:
            descriptions = [tar.extractfile(member) for member in tar if member.name.endswith(".json")]
            numbers += [json.load(file)["source"]["record"] - 1 for file in descriptions if file]
    assert numbers
    return numbers


def test_resumed_run_equals_the_undisturbed_one(resumed: Path, whole: Path) -> None:
    """Losses, norms, samples and weights are equal bit for bit, although it was evaluated meanwhile."""
    for name in EXACT:
        assert [line[name] for line in metrics(resumed)] == [line[name] for line in metrics(whole)], name
    assert compare_weights(resumed, whole).differences == []


def test_split_stays_although_a_new_run_would_have_another(prepared: dict[str, Path], tmp_path: Path) -> None:
    """The run was begun with a split of its own, and goes on without it."""
    stages, uneven = [*QUICK, "--parallel.pp", "2"], ["--parallel.layers", "[3,1]", "--stop_after", "1"]
    trained(prepared, tmp_path, *stages, *uneven, ranks=2, steps=3)
    again = trained(prepared, tmp_path, *stages, ranks=2, steps=3)
    assert "[3, 1]: as it was saved" in again and "resumed at step 1" in again
    assert list(WeightReader(tmp_path).layout.layers_per_chunk) == [3, 1]


ELSEWHERE = {
    "interleaved": "--parallel.pp 2 --parallel.vpp 2 --parallel.distributed_optimizer false".split(),
    "decoupled": ["--parallel.pp", "2", "--vision.placement", "decoupled", *EVALUATION],
}
"""Options of two ranks that go on with what TP2 x PP2 + SP has saved."""


@pytest.mark.parametrize("name", ELSEWHERE)
def test_run_goes_on_in_another_layout(prepared, resumed, whole, name: str) -> None:
    """The same samples, losses within 1e-6, and the same validation with the tower on every rank."""
    run = prepared["folder"] / f"elastic_{name}"
    shutil.copytree(resumed / "step_00000003", run / "step_00000003")
    trained(prepared, run, *QUICK, *ELSEWHERE[name], ranks=2)
    lines = metrics(run)
    assert [line["step"] for line in lines] == [4, 5, 6]
    for ours, theirs in zip(lines, metrics(whole)[3:], strict=True):
        assert all(ours[key] == theirs[key] for key in ("loss_tokens", "samples", "images"))
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    if name == "decoupled":
        ours, theirs = (metrics(folder, "eval.jsonl")[-1] for folder in (run, resumed))
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_damaged_checkpoint_is_refused_by_name(prepared, resumed, tmp_path) -> None:
    """What resume reads is verified against its hash; one flipped bit is enough."""
    source = resumed / "step_00000003"
    assert not verify_checkpoint(source)

    def flip(data: bytearray) -> bytearray:
        data[len(data) * 3 // 4] ^= 4
        return data

    for victim, damage in (
        ("optimizer/rank_00001.safetensors", flip),
        ("weights/tp01_pp00.safetensors", flip),
        ("loader/dp_00000.json", lambda data: data[: len(data) // 2]),
        ("optimizer/rank_00002.safetensors", None),
    ):
        shutil.copytree(source, broken := tmp_path / str(damage) / victim.replace("/", "_"))
        if damage:
            (broken / victim).write_bytes(damage(bytearray((broken / victim).read_bytes())))
        else:
            (broken / victim).unlink()
        assert any(Path(victim).name in problem for problem in verify_checkpoint(broken)), victim
