"""The images install the pinned stack: their files are parsed and compared with constraints.txt."""

import re
import shlex
import subprocess
import tomllib

import pytest

from tests.commands import ROOT, logical_lines

INSTRUCTIONS = {"FROM", "RUN", "ENV", "COPY", "WORKDIR"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_image_installs_the_pinned_stack(name: str) -> None:
    text = (ROOT / name).read_text()
    lines = [line.split(maxsplit=1) for line in logical_lines(text)]
    assert {word for word, _ in lines} <= INSTRUCTIONS and [word for word, _ in lines].count("FROM") == 1
    base, runs = lines[0][1], [run for word, run in lines if word == "RUN"]
    for run in runs:
        assert not subprocess.run(["sh", "-n", "-c", run], check=False).returncode, run
    is_gpu = name == "Dockerfile"
    cuda = ".".join(PINNED["cuda-toolkit"].split(".")[:2])
    assert base.startswith(f"nvidia/cuda:{cuda}." if is_gpu else "python:3.12-")
    pythons = set(re.findall(r"python:?(\d\.\d+)", text))
    assert {f">={version}" for version in pythons} == {PROJECT["project"]["requires-python"]}

    commands = [shlex.split(part) for run in runs for part in run.split("&&")]
    installs = [words for words in commands if words[:2] == ["pip", "install"]]
    own = [words for words in installs if any(re.match(r"\.(\[|$)", word) for word in words)]
    extras = [re.findall(r"\[(\w+)\]", " ".join(words)) for words in own]
    assert extras == ([[], ["gpu"]] if is_gpu else [[]])
    assert all("constraints.txt" in words for words in own)
    [requirement] = PROJECT["build-system"]["requires"]
    others = [word for words in installs if words not in own for word in words if re.search("[<=>]", word)]
    assert others == [requirement] * is_gpu  # without isolation, pip does not install it by itself
