"""Every shipped example has a valid YAML, a layout that fits its model, correct numbers, working scripts."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_vl.config import validate_config
from megatron_vl.estimate.gpus import find_gpu
from megatron_vl.estimate.split import run_layout
from megatron_vl.estimate.step import predict_layout
from megatron_vl.spec.families import FAMILIES
from megatron_vl.spec.families.base import text_config
from megatron_vl.weights.weight_reader import WeightReader
from tests.commands import logical_lines, megatron_vl_command, trainer_config, words_of
from tests.examples import EXAMPLES, HF_CONFIGS, ROOT, Example, read_example
from toolkit.weights.options import SplitOptions

STAGES = sorted((ROOT / "examples" / "pretrain").glob("*.yaml"))
SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
WITHOUT_EXAMPLES = {"Qwen3.6-27B", "Qwen3.6-35B-A3B"}
"""Models that have the sizes of Qwen3.5's, whose YAMLs are theirs too."""


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request) -> Example:
    return read_example(request.param)


def test_examples_cover_every_family_and_released_size():
    examples = [read_example(path) for path in EXAMPLES]
    sizes = {path.stem for path in HF_CONFIGS.glob("*.json")}
    assert {e.hf_config.stem for e in examples} == sizes - WITHOUT_EXAMPLES and sizes > WITHOUT_EXAMPLES
    assert {e.spec.family for e in examples} == set(FAMILIES)


def test_yaml_fits_the_released_model(example):
    config, spec = example.config, example.spec
    assert example.name.startswith(spec.family.removesuffix("_moe"))
    assert validate_config(config, example.world) >= 1
    assert config.data.seq_len <= text_config(spec.hf_config)["max_position_embeddings"]
    assert not config.model.checkpoint and config.data.path and config.checkpoint.dir


@pytest.mark.parametrize("name", ["qwen2_5_vl_32b", "qwen3_vl_235b_a22b"])
def test_split_takes_the_layout_of_the_yaml(name):
    path = str(ROOT / "examples" / f"{name}.yaml")
    parallel = vars(read_example(Path(path)).config.parallel)
    expected = {name: parallel[name] for name in ("tp", "pp", "vpp", "layers", "ep", "etp")}
    command = f"megatron-vl split --checkpoint full --config {path} --out shards"
    for more, changed in (("", {}), (" --parallel.tp 16", {"tp": 16})):
        _, options = megatron_vl_command(command + more)
        assert isinstance(options, SplitOptions) and options.layout_arguments == expected | changed


@pytest.mark.parametrize("path", [*EXAMPLES, *STAGES], ids=lambda path: path.stem)
def test_stated_numbers_are_the_estimate_of_plan(path):
    """tests/estimate compares the estimate with what was measured and with counts by hand."""
    example = read_example(path)
    layout = run_layout(example.config, example.spec, example.world)
    predicted = predict_layout(example.config, example.spec, example.world, layout, find_gpu(example.gpu))
    assert example.gpu in ("H200 (141 GB)", "RTX 4090 (24 GB)") and predicted.fits_memory
    assert example.gib == round(predicted.peak_gib)
    if "24gb" in example.name:  # the driver, CUDA and a longer row than estimated may take a quarter
        assert example.gib <= 0.75 * find_gpu(example.gpu).memory_gib
    assert example.hours == pytest.approx(1e9 / example.tokens_per_second / 3600, abs=0.06)
    if example.measured_per_gpu:
        assert example.tokens_per_second == pytest.approx(example.measured_per_gpu * example.world, rel=0.001)
        assert f"| image rows | {example.measured_per_gpu:,} |" in (ROOT / "docs" / "speed.md").read_text()
    else:
        assert example.tokens_per_second == pytest.approx(predicted.tokens_per_second, abs=51)
        assert example.mfu == pytest.approx(predicted.mfu, abs=0.0051)


def test_stages_of_pretraining_follow_each_other():
    """Each starts from the run of the one before, with other data, the last with longer rows."""
    runs = {path.stem: read_example(path).config for path in STAGES}
    for model in ("qwen2_5_vl_3b", "qwen3_vl_8b"):
        merger, whole, long = (runs[f"{model}_{stage}"] for stage in ("1_merger", "2_all", "3_long"))
        assert merger.model.freeze_vision and merger.model.freeze_language and not merger.model.freeze_merger
        assert not any((whole.model.freeze_vision, whole.model.freeze_language, whole.model.freeze_merger))
        starts = [run.model.checkpoint for run in (merger, whole, long)]
        assert starts == ["", merger.checkpoint.dir, whole.checkpoint.dir]
        assert len({run.checkpoint.dir for run in (merger, whole, long)}) == 3
        assert merger.data.path != whole.data.path != long.data.path
        assert merger.data.seq_len == whole.data.seq_len < long.data.seq_len


def family_rows() -> dict[str, list[str]]:
    """The cells of each example's line in docs/families, by the example's name."""
    pages = [page.read_text() for page in (ROOT / "docs" / "families").glob("*.md")]
    lines = [line for page in pages for line in re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)]
    assert len(lines) == len(dict(lines)) == len(EXAMPLES)
    return {name: cells.split(" | ") for name, cells in lines}


def test_family_pages_say_what_the_yaml_says(example):
    gpus, layout, memory, speed, hours = family_rows()[example.name]
    assert gpus == f"{example.world} {example.gpu.partition(' (')[0]}" and memory == f"{example.gib} GiB"
    assert speed.split(", ")[0] == f"{example.tokens_per_second:,}" and hours == f"{example.hours:.1f}"
    assert ("measured" in speed) == bool(example.measured_per_gpu)

    p = example.config.parallel
    sizes = {"TP": p.tp, "PP": p.pp, "DP": example.world // (p.tp * p.pp), "EP": p.ep}
    named = {name: int(size) for name, size in re.findall(r"\b(TP|PP|DP|EP)(\d+)", layout)}
    assert named == {name: size for name, size in sizes.items() if size > 1}
    split = re.search(r"layers (\d+(?: \+ \d+)+)", layout)
    assert not split or [int(number) for number in split[1].split(" + ")] == p.layers


def code_cells() -> list[str]:
    notebook = json.loads((ROOT / "examples" / "first_run.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [re.sub(r"\\\n\s*", "", cell) for cell in cells]


def run_shell(line: re.Match[str]) -> str:
    return f"__import__('subprocess').run({line[1]!r}, shell=True, check=True)"


def test_notebook_has_valid_commands_and_no_outputs():
    commands = [line for cell in code_cells() for line in cell.splitlines() if line.startswith("!")]
    assert [line.split()[1] for line in commands] == ["train", "export", "generate"]
    validate_config(trainer_config(commands[0][1:])[0], 1)
    for line in commands[1:]:
        megatron_vl_command(line[1:])
    notebook = json.loads((ROOT / "examples" / "first_run.ipynb").read_text())
    assert [cell["outputs"] for cell in notebook["cells"] if "outputs" in cell] == [[]] * 4


@pytest.mark.full
@pytest.mark.ranks
def test_notebook_runs_and_ends_with_the_right_answer(tmp_path):
    (tmp_path / "cells.py").write_text(re.sub(r"^!(.*)$", run_shell, "\n\n".join(code_cells()), flags=re.M))
    env = environment(MPLBACKEND="Agg", PYTHONPATH=ROOT)
    command = [sys.executable, "cells.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == "A tabby cat that looks straight at you."


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_have_valid_commands(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK) and "set -euo pipefail" in script.read_text()
    for line in logical_lines(script.read_text()):
        start = re.search(r"megatron-vl (train|convert|split|export|evaluate)\b", line)
        if start is None or line.startswith("echo"):
            continue
        command = re.sub(r'"\$\{?\w*\[?@\]?\}?"', "", line[start.start() :])
        if start[1] == "train":
            assert words_of(command)[2:4] == ["--config", "config"]
        else:
            megatron_vl_command(re.sub(r'--config "\$config"', "", command))


def environment(**variables: str | Path) -> dict[str, str]:
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {key: str(value) for key, value in variables.items()}


def run(script: str, *words: str, folder: Path, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "examples" / script), *words]
    env = environment(**variables)
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_convert_then_split_runs(tiny_checkpoint, tmp_path):
    hf, other = tiny_checkpoint("qwen2_vl"), tiny_checkpoint("qwen2_vl", seed=5)
    text = (ROOT / "examples" / "qwen2_vl_7b.yaml").read_text()
    cut = text.replace("tp: 1\n  pp: 1", "tp: 2\n  pp: 2\n  layers: [1, 3]\n  sequence_parallel: true")
    (tmp_path / "cut.yaml").write_text(cut)

    def split(source: Path, shards: str) -> subprocess.CompletedProcess[str]:
        paths = {"HF": source, "FULL": tmp_path / "full", "SHARDS": tmp_path / shards}
        return run("convert_then_split.sh", str(tmp_path / "cut.yaml"), folder=tmp_path, **paths)

    assert split(hf, "shards").returncode == 0
    assert WeightReader(tmp_path / "shards").layout.layers_per_chunk == (1, 3)

    # FULL exists now, and must be that of HF.
    refused = split(other, "other")
    assert refused.returncode == 1 and not (tmp_path / "other").exists()
    assert f"{tmp_path / 'full'} does not hold the weights of {other}" in refused.stderr


def test_pretrain_passes_options_to_the_trainer_and_returns_its_exit_code(tmp_path):
    words = f"--parallel.tp 3 --parallel.pp 2 --model.hf {HF_CONFIGS / 'Qwen2-VL-7B-Instruct.json'}"
    words += " --data.path synthetic:images --model.checkpoint random"
    done = run("pretrain.sh", "pretrain/qwen3_vl_8b_1_merger", *words.split(), folder=tmp_path, GPUS="2")
    assert done.returncode == 1 and "tp 3 x pp 2 = 6 ranks do not divide the world size 2" in done.stderr
    missing = run("pretrain.sh", "examples/qwen2_vl_7b", folder=tmp_path, GPUS="4", NNODES="2")
    assert missing.returncode == 2 and "--master-addr" in missing.stderr


@pytest.mark.parametrize("script", ["convert_then_split.sh", "pretrain.sh", "evaluate.sh"])
def test_scripts_without_the_environment_say_what_to_do(script, tmp_path):
    for program in ("bash", "env", "dirname"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    command = [str(ROOT / "examples" / script), "qwen2_vl_7b"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 127
    assert re.fullmatch(rf"{script}: .*source \.venv/bin/activate.*\n", done.stderr), done.stderr


def test_slurm_starts_one_task_a_node_with_the_yaml(tmp_path):
    """``srun`` records its arguments."""
    (tmp_path / "srun").write_text(f'#!{shutil.which("bash")}\nprintf "%s\\n" "$@" > {tmp_path}/given\n')
    (tmp_path / "srun").chmod(0o755)
    shutil.copy(ROOT / "examples" / "slurm.sh", tmp_path / "spooled.sh")  # Slurm runs a copy
    variables = environment(SLURM_JOB_NUM_NODES="4", SLURM_GPUS_ON_NODE="8")
    variables["PATH"] = f"{tmp_path}:{variables['PATH']}"
    command = [str(tmp_path / "spooled.sh"), "qwen2_5_vl_72b", "--steps", "3"]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    start = ["megatron-vl", "train", "--config", "examples/qwen2_5_vl_72b.yaml", "--nproc-per-node", "8"]
    given = (tmp_path / "given").read_text().split()
    assert given == ["--kill-on-bad-exit=1", *start, "--steps", "3"]
