"""Tests the built wheel in a virtual environment with only what it declares, away from the checkout."""

from __future__ import annotations

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
SOURCES = (
    "megatron_vl",
    "converters",
    "data_tools",
    "toolkit",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)
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
    """Distributions that the wheel without extras requires, directly or indirectly."""
    found: set[str] = set()
    open_ones = [(requirement, "") for requirement in wheel_requirements]
    while open_ones:
        text, extra = open_ones.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            name = f"{canonicalize_name(requirement.name)}[{wanted}]"
            if name in found:
                continue
            found.add(name)
            try:
                open_ones += [(inner, wanted) for inner in metadata.requires(requirement.name) or []]
            except metadata.PackageNotFoundError:
                pass  # for another system

    return {name.partition("[")[0] for name in found}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A virtual environment with the wheel and, from this one, only the packages that the wheel declares."""
    work = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, work / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, work / "source" / name)

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [
        *pip,
        *"wheel --no-build-isolation --no-deps --no-index -w".split(),
        str(work),
        str(work / "source"),
    ]

    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = work.glob("*.whl")
    shutil.rmtree(work / "source")

    venv = work / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=300)
    install = [
        *pip,
        "--python",
        str(venv / "bin" / "python"),
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]

    # A checkout in PYTHONPATH, with its metadata, would count as the installed package.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(install, check=True, capture_output=True, timeout=300, env=environment)
    _add_declared_packages(venv)
    return venv


def _add_declared_packages(venv: Path) -> None:
    (site,) = (venv / "lib").glob("*/site-packages")
    (own,) = site.glob("megatron_vl-*.dist-info")
    allowed = declared(metadata.PathDistribution(own).requires or []) | {"megatron-vl"}
    owners = metadata.packages_distributions()
    blocked = {
        module
        for module, names in owners.items()
        if not {canonicalize_name(name) for name in names} & allowed and not (site / module).exists()
    }
    assert {"pytest", "skimage", "dashscope"} <= blocked and not {"torch", "PIL", "rich"} & blocked
    shared = sysconfig.get_paths()["purelib"]
    facts = f"ALLOWED = {sorted(allowed)!r}\nBLOCKED = {sorted(blocked)!r}\nSHARED = {shared!r}"
    (site / "only_declared.py").write_text(f"{facts}\n{ONLY_DECLARED}")
    (site / "zz_shared.pth").write_text(f"{shared}\nimport only_declared\n")


@pytest.fixture(scope="module")
def program(installed, tmp_path_factory) -> Program:
    """Starts that environment's ``megatron-vl`` in an empty folder, which it keeps."""
    folder = tmp_path_factory.mktemp("away")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str | Path, code: int = 0, python: str = "") -> subprocess.CompletedProcess[str]:
        start = (
            [installed / "bin" / "python", "-c", python] if python else [installed / "bin" / "megatron-vl"]
        )
        line = [str(word) for word in (*start, *words)]
        variables = kept | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(line, env=variables, cwd=folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, (
            f"{line}: {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        )
        return done

    return run


@pytest.mark.full
def test_one_package_is_put_into_site_packages(installed):
    (site,) = (installed / "lib").glob("*/site-packages")
    ours = {"only_declared.py", "zz_shared.pth", "__pycache__"}
    names = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} - ours
    assert names == {"megatron_vl"}
    (own,) = site.glob("megatron_vl-*.dist-info")
    assert (own / "top_level.txt").read_text() == "megatron_vl\n"
    assert tools_dir() == ROOT  # and the checkout is the checkout


@pytest.mark.full
def test_every_command_explains_itself(program, installed):
    for name in COMMANDS:
        assert "--help" in program(*name.split(), "--help").stdout
    assert "train" in program("--help").stdout
    where = program(python="import megatron_vl; print(megatron_vl.__file__)").stdout
    assert where.startswith(str(installed))


@pytest.mark.full
def test_version_is_that_of_the_wheel(program):
    """Transformer Engine comes with an extra, which is not installed here."""
    core, torch = (metadata.version(name) for name in ("megatron-core", "torch"))
    lines = program("--version").stdout.splitlines()
    assert lines[0] == f"megatron-vl {megatron_vl.__version__}"
    assert lines[1:] == [f"megatron-core {core}", f"torch {torch}", "transformer-engine not installed"]


@pytest.mark.full
@pytest.mark.ranks
def test_the_demo_passes_outside_the_checkout(program):
    """With drawings, because the wheel does not require scikit-image."""
    done = program("demo", "--dir", "shown")
    assert "11 of 11" in done.stdout


TINY = """
import json
from pathlib import Path
from megatron_vl.system.processes import tools_dir
import sys
sys.path.insert(0, str(tools_dir()))
from toolkit.demo.demo_data import write_raw_data
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint
import torch
write_tiny_checkpoint(Path("hf"), "qwen2_5_vl", dtype=torch.float32)
write_raw_data(Path("raw"))
"""


@pytest.mark.full
@pytest.mark.ranks
def test_commands_run_without_extras_or_name_the_one_that_they_need(program):
    """Runs conversion there and back, data, a training, its checkpoint, an answer and parity,
    with drawn pictures."""
    program(python=TINY)
    program("convert", "--hf", "hf", "--out", "full")
    program("split", "--checkpoint", "full", "--parallel.tp", "2", "--out", "shards")
    program("merge", "--checkpoint", "shards", "--out", "merged")
    program("export", "--checkpoint", "merged", "--hf", "hf", "--out", "back")

    assert "identical" in program("verify", "hf", "back").stdout
    source = ["--input", "raw/conversations.json", "--media-root", "raw/media"]
    program("data", "convert", *source, "--out", "data", "--val-fraction", "0")
    program("data", "verify", "data")

    run = "--model.hf hf --model.checkpoint shards --data.path data --data.seq_len 512 --steps 1"
    run += " --global_batch_size 2"
    run += " --dtype float32 --platform cpu --checkpoint.dir run --data.num_workers 0"
    assert (
        "1 micro-batch on each" in program("train", "--dry-run", "--nproc-per-node", "2", *run.split()).stdout
    )

    program("train", "--nproc-per-node", "1", *run.split())
    program("checkpoint", "show", "run")
    program("checkpoint", "verify", "run")
    asked = ["--model.hf", "hf", "--prompt", "Hello", "--max-new-tokens", "2"]
    program("generate", "--checkpoint", "run", *asked)

    program("parity", "--hf", "qwen2_5_vl", "--layouts", "1")
    program("doctor", "--json", code=1 if shutil.disk_usage("/").free < 2**30 else 0)
    shape = "--data.seq_len 512 --global_batch_size 1 --dtype float32"
    shape += " --timed 1 --data.path synthetic:images"
    program("bench", "--model.hf", "hf", "--nproc-per-node", "1", *shape.split())
    compared = ["--original", "hf", "--converted", "back", "--out", "out", "--data", "photos.tsv"]

    program(python="open('photos.tsv', 'w').write('index\\tquestion\\n1\\tWho?\\n')")
    refused = program("evaluate", *compared, code=2)
    assert re.search(r"pip install .*eval", refused.stderr), refused.stderr
