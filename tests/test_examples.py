"""Every shipped example: its YAML parses, its layout fits the released model, its scripts say the same as its YAML and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_vl.config import parse_config, validate
from megatron_vl.models.families import FAMILIES, read_spec
from megatron_vl.models.families.base import text_config
from megatron_vl.parallel.layout import run_layout
from megatron_vl.weights import WeightReader
from tests.commands import logical_lines, megatron_vl_arguments

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/pretrain.yaml"))
SCRIPTS = sorted((ROOT / "examples").rglob("*.sh"))
HF_CONFIGS = ROOT / "tests" / "hf_configs"


def name(path: Path) -> str:
    return str(path.relative_to(ROOT / "examples"))


def test_every_family_and_every_released_size_has_an_example():
    used = {Path(parse_config(["--config", str(e / "pretrain.yaml")]).model.hf).name for e in EXAMPLES}
    assert used == {path.stem for path in HF_CONFIGS.glob("*.json")}
    assert {read_spec(HF_CONFIGS / f"{size}.json").family for size in used} == set(FAMILIES)


@pytest.mark.parametrize("folder", EXAMPLES, ids=name)
def test_yaml_fits_the_released_model(folder):
    config = parse_config(["--config", str(folder / "pretrain.yaml")])
    spec = read_spec(HF_CONFIGS / f"{Path(config.model.hf).name}.json")
    assert folder.name.startswith(spec.family.removesuffix("_moe"))
    p = config.parallel
    run_layout(spec, p)
    nodes = int(re.search(r"NNODES:-(\d+)", (folder / "pretrain.sh").read_text())[1])
    assert validate(config, nodes * 8) >= 1
    assert config.data.seq_len <= text_config(spec.hf_config)["max_position_embeddings"]
    assert config.model.checkpoint and config.data.path and config.checkpoint.dir


@pytest.mark.parametrize("folder", EXAMPLES, ids=name)
def test_weights_are_split_as_the_yaml_says(folder):
    config = parse_config(["--config", str(folder / "pretrain.yaml")])
    text = (folder / "convert_then_split.sh").read_text()
    defaults = dict(re.findall(r"^(\w+)=\$\{\1:-(.+)\}$", text, re.MULTILINE))
    assert defaults["HF"] == config.model.hf and defaults["SHARDS"] == config.model.checkpoint
    commands = [line for line in logical_lines(text) if line.startswith("megatron-vl")]
    commands += [text[match.start() :].splitlines()[0] for match in re.finditer(r"megatron-vl convert .*--tp", text)]
    parsed = [megatron_vl_arguments(line) for line in commands]
    assert [args.command for args in parsed] == ["convert", "split", "convert"]
    p = config.parallel
    for args in parsed[1:]:
        assert (args.tp, args.pp, args.vpp or 1, args.layers, args.ep or 1, args.etp or 1) == (
            p.tp,
            p.pp,
            p.vpp,
            p.layers,
            p.ep,
            p.etp,
        )


@pytest.mark.parametrize("folder", EXAMPLES, ids=name)
def test_evaluation_is_of_the_yamls_weights_and_run(folder):
    """That such a script runs is shown by tests/toolkit/test_evaluate.py, where VLMEvalKit is installed."""
    config = parse_config(["--config", str(folder / "pretrain.yaml")])
    text = (folder / "evaluate.sh").read_text()
    defaults = dict(re.findall(r"^(\w+)=\$\{\1:-(.+)\}$", text, re.MULTILINE))
    paths = (config.model.hf, config.model.checkpoint, config.checkpoint.dir)
    assert (defaults["HF"], defaults["SHARDS"], defaults["RUN"]) == paths
    commands = [line.removesuffix(' "$@"') for line in logical_lines(text) if line.startswith("megatron-vl")]
    shards, run, evaluated = (megatron_vl_arguments(line) for line in commands)
    assert (shards.command, run.command, evaluated.command) == ("export", "export", "evaluate")
    assert evaluated.original == shards.hf == run.hf and evaluated.converted.name == "converted"
    assert evaluated.gpus_per_process == {"72B": 4, "A22B": 8}.get(config.model.hf.split("-")[-2], 1)


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_scripts_parse_and_can_be_started(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK), f"{script} is not executable"
    assert "set -euo pipefail" in script.read_text()


def environment(**variables: str | Path) -> dict[str, str]:
    """This environment with the programs of this Python in front of the path."""
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {key: str(value) for key, value in variables.items()}


def test_convert_then_split_runs(tiny_checkpoint, tmp_path):
    hf = tiny_checkpoint("qwen2_vl", layers=28)
    variables = {"HF": hf, "FULL": tmp_path / "full", "SHARDS": tmp_path / "shards"}
    script = ROOT / "examples" / "qwen2_vl_7b" / "convert_then_split.sh"
    subprocess.run([str(script)], check=True, env=environment(**variables), cwd=tmp_path)
    assert WeightReader(tmp_path / "shards").layout.layers == (10, 18)


def test_launch_gives_options_to_the_trainer_and_its_exit_code_back(tmp_path):
    """A real launch of two processes; the trainer refuses the layout before any process group starts."""
    script = ROOT / "examples" / "qwen2_vl_7b" / "pretrain.sh"
    options = ["--parallel.tp", "3"]
    done = subprocess.run([str(script), *options], env=environment(GPUS="2"), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "tp 3 x pp 2 = 6 ranks do not divide the world size 2" in done.stdout + done.stderr
    missing = subprocess.run([str(script)], env=environment(GPUS="2", NNODES="2"), cwd=tmp_path, capture_output=True, text=True)
    assert missing.returncode != 0 and "MASTER_ADDR" in missing.stderr


@pytest.mark.parametrize("script", ["launch.sh", "slurm.sh"])
def test_without_arguments_the_usage_is_told_alone(script):
    done = subprocess.run([str(ROOT / "examples" / script)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"usage: .*\n", done.stderr), done.stderr


STARTED = [script for script in SCRIPTS if script.name not in ("slurm.sh", "environment.sh")]


@pytest.mark.parametrize("script", STARTED, ids=name)
def test_without_the_environment_one_line_says_what_to_do(script, tmp_path):
    """A Python that has nothing installed, from the root of the checkout."""
    for program in ("bash", "env", "dirname"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    (tmp_path / "python").write_text(f'#!{shutil.which("bash")}\nexec "{os.path.realpath(sys.executable)}" -s -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    options = ["run.yaml"] if script.name == "launch.sh" else []
    done = subprocess.run([str(script), *options], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 127
    asked = script.name.replace("pretrain", "launch")
    assert re.fullmatch(rf"{asked}: .*source \.venv/bin/activate.*\n", done.stderr), done.stderr
