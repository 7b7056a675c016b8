"""Tests the built wheel in a virtual environment with only what it declares, away from the checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megatron_vl
from megatron_vl.system.processes import tools_dir
from toolkit.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("megatron_vl", "converters", "data_tools", "toolkit")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""A checkout in PYTHONPATH, with its metadata, would count as the installed package."""
ONLY_DECLARED = """
import re
import sys
from importlib.machinery import PathFinder

class Declared(PathFinder):
    @classmethod
    def find_distributions(cls, *context, **more):
        for found in PathFinder.find_distributions(*context, **more):
            if re.sub("[-_.]+", "-", found.name).lower() in ALLOWED:
                yield found

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in BLOCKED:  # setuptools has copies of its own of some
            path = [folder for folder in sys.path if folder != SHARED]
        return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Declared
"""
Program = Callable[..., subprocess.CompletedProcess[str]]


def declared(wheel_requirements: list[str]) -> set[str]:
    found: set[tuple[str, str]] = set()
    pending = [(text, "") for text in wheel_requirements]
    while pending:
        text, extra = pending.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in {"", *requirement.extras}:
            key = (canonicalize_name(requirement.name), wanted)
            if key not in found:
                found.add(key)
                try:
                    pending += [(inner, wanted) for inner in metadata.requires(requirement.name) or []]
                except metadata.PackageNotFoundError:
                    pass  # for another system
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A virtual environment with the wheel and, from this one, only the packages that the wheel declares."""
    work = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, work / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, work / "source" / name)

    def pip(*words: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
        subprocess.run(command, check=True, capture_output=True, timeout=300, env=ENVIRONMENT)

    pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", work, work / "source")
    shutil.rmtree(work / "source")
    venv = work / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=300)
    pip("--python", venv / "bin" / "python", "install", "--no-deps", "--no-index", *work.glob("*.whl"))

    (site,) = (venv / "lib").glob("*/site-packages")
    (own,) = site.glob("megatron_vl-*.dist-info")
    allowed = declared(metadata.PathDistribution(own).requires or []) | {"megatron-vl"}
    blocked = {
        module
        for module, names in metadata.packages_distributions().items()
        if not {canonicalize_name(name) for name in names} & allowed and not (site / module).exists()
    }
    assert {"pytest", "skimage", "dashscope"} <= blocked and not {"torch", "PIL", "rich"} & blocked
    shared = sysconfig.get_paths()["purelib"]
    facts = f"ALLOWED = {sorted(allowed)!r}\nBLOCKED = {sorted(blocked)!r}\nSHARED = {shared!r}"
    (site / "only_declared.py").write_text(f"{facts}\n{ONLY_DECLARED}")
    (site / "zz_shared.pth").write_text(f"{shared}\nimport only_declared\n")
    return venv


@pytest.fixture(scope="module")
def program(installed, tmp_path_factory) -> Program:
    """Starts that environment's ``megatron-vl`` in an empty folder, which it keeps."""
    folder = tmp_path_factory.mktemp("away")
    env = ENVIRONMENT | {"OMP_NUM_THREADS": "1"}

    def run(line: str, code: int = 0, python: str = "") -> subprocess.CompletedProcess[str]:
        name = "python" if python else "megatron-vl"
        command = [str(installed / "bin" / name), *(["-c", python] if python else line.split())]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        return done

    return run


@pytest.mark.full
def test_wheel_is_one_package_whose_commands_explain_themselves(program, installed):
    (site,) = (installed / "lib").glob("*/site-packages")
    ours = {"only_declared.py", "zz_shared.pth", "__pycache__"}
    names = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} - ours
    assert names == {"megatron_vl"} and tools_dir() == ROOT  # and the checkout is the checkout
    for name in COMMANDS:
        assert "--help" in program(f"{name} --help").stdout
    where = program("", python="import megatron_vl; print(megatron_vl.__file__)").stdout
    assert where.startswith(str(installed))
    first, *_, last = program("--version").stdout.splitlines()
    assert (first, last) == (f"megatron-vl {megatron_vl.__version__}", "transformer-engine not installed")


@pytest.mark.full
@pytest.mark.ranks
def test_demo_passes_outside_the_checkout(program):
    """With drawings, because the wheel does not require scikit-image."""
    assert "11 of 11" in program("demo --dir shown").stdout


TINY = """
import sys
from pathlib import Path
from megatron_vl.system.processes import tools_dir
sys.path.insert(0, str(tools_dir()))
from toolkit.demo.demo_data import write_raw_data
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint
import torch
write_tiny_checkpoint(Path("hf"), "qwen2_5_vl", dtype=torch.float32)
write_raw_data(Path("raw"))
Path("photos.tsv").write_text("index\\tquestion\\n1\\tWho?\\n")
"""


@pytest.mark.full
@pytest.mark.ranks
def test_commands_of_the_wheel_run_without_extras_or_name_the_one_that_they_need(program):
    program("", python=TINY)
    program("convert --hf hf --out full")
    program("split --checkpoint full --parallel.tp 2 --out shards")
    program("merge --checkpoint shards --out merged")
    program("export --checkpoint merged --hf hf --out back")
    assert "identical" in program("verify hf back").stdout
    program("data convert --input raw/conversations.json --media-root raw/media --out data --val-fraction 0")

    run = "--model.hf hf --model.checkpoint shards --data.path data --data.seq_len 512 --checkpoint.dir run"
    run += " --steps 1 --global_batch_size 2 --dtype float32 --platform cpu --data.num_workers 0"
    assert "1 micro-batch on each" in program(f"train --dry-run --nproc-per-node 2 {run}").stdout
    program(f"train --nproc-per-node 1 {run}")
    program("checkpoint show run")
    program("checkpoint verify run")
    program("generate --checkpoint run --model.hf hf --prompt Hello --max-new-tokens 2")

    program("parity --hf qwen2_5_vl --layouts 1")
    program("doctor --json", code=1 if shutil.disk_usage("/").free < 2**30 else 0)
    shape = "--data.seq_len 512 --global_batch_size 1 --dtype float32 --data.path synthetic:images"
    program(f"bench --model.hf hf --nproc-per-node 1 --timed 1 {shape}")
    refused = program("evaluate --original hf --converted back --out out --data photos.tsv", code=2)
    assert re.search(r"pip install .*eval", refused.stderr), refused.stderr
