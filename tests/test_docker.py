"""The images: Docker knows each instruction, and what they copy and install exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTIONS = {"FROM", "RUN", "ENV", "COPY", "WORKDIR"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
    return [tuple(line.split(maxsplit=1)) for line in lines]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_image_installs_the_pinned_stack(name: str):
    assert "has not been" in (ROOT / name).read_text()
    assert re.search(
        r"`Dockerfile`.*`Dockerfile.cpu`.*neither was built", (ROOT / "docs/quickstart-gpu.md").read_text()
    )
    found = instructions(name)
    assert found[0][0] == "FROM" and {word for word, _ in found} <= INSTRUCTIONS
    base = found[0][1]
    assert base == "python:3.12-slim" or re.fullmatch(
        r"nvidia/cuda:13\.\d+\.\d+-cudnn-devel-ubuntu24\.04", base
    )
    for word, argument in found:
        if word == "RUN":
            checked = subprocess.run(
                ["sh", "-n", "-c", argument], capture_output=True, text=True, check=False
            )
            assert checked.returncode == 0, checked.stderr
    commands = [shlex.split(part) for word, text in found if word == "RUN" for part in text.split("&&")]
    installs = [words for words in commands if words[:2] == ["pip", "install"] and "-c" in words]
    assert installs
    for words in installs:
        assert (ROOT / words[words.index("-c") + 1]).is_file()
        extras = re.findall(r"\[(\w+)\]", " ".join(words))
        assert set(extras) <= set(PROJECT["optional-dependencies"])
    assert any("gpu" in " ".join(words) for words in installs) == ("cuda" in base)


def test_image_leaves_out_what_the_checkout_ignores():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs", "checkpoints"} <= set(ignored)
