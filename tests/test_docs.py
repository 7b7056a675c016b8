"""Checks commands in the documents: blocks marked ``# checked`` are run; all others must be valid.

The checked blocks of a document run in order in one folder that holds what its text asks the reader to have:
the examples, a checkpoint (a small one with as many layers as the example's layout needs) and conversations
with their media.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_vl.config import parse_config, validate
from tests.commands import logical_lines, megatron_vl_command, trainer_config
from toolkit.demo.data import write_raw_data

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#]+)")


def blocks(document: Path) -> list[str]:
    return BLOCK.findall(document.read_text())


COMMANDS = [
    (document.name, line)
    for document in DOCUMENTS
    for block in blocks(document)
    for line in logical_lines(block)
]
CHECKED = [
    document for document in DOCUMENTS if any(block.startswith("# checked\n") for block in blocks(document))
]


@pytest.mark.parametrize(("document", "line"), COMMANDS, ids=[line[:70] for _, line in COMMANDS])
def test_commands_are_valid(document, line):
    words = shlex.split(line, comments=True)
    while re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    program = words[0].removeprefix(".venv/bin/")
    line = line[line.index(program) :]
    if "megatron_vl.train" in words or line.startswith("megatron-vl train"):
        training = trainer_config(line)
        if training is not None:
            validate(*training)
    elif program == "megatron-vl":
        megatron_vl_command(line)
    elif program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif "/slurm.sh" in line:
        assert (ROOT / "examples" / f"{words[-1]}.yaml").is_file() and (ROOT / words[-2]).is_file()
    elif program.startswith("examples/"):
        assert os.access(ROOT / program, os.X_OK)
        name = words[1]
        path = str(ROOT / "examples" / f"{name}.yaml")
        assert Path(path).is_file() or name == "RUN.yaml"
        if program.endswith("pretrain.sh") and name != "RUN.yaml":
            parse_config(["--config", path, *words[2:]])
    elif program in ("pip", "pre-commit", "source", "python") or words[1:3] == ["-m", "pytest"]:
        for word in words[1:]:
            assert not word.startswith(("tests/", "constraints")) or (ROOT / word).exists()
    else:
        pytest.fail(
            f"{document}: nobody checks {line!r}; mark its block `# checked` or teach this test to "
            "validate it"
        )


@pytest.mark.parametrize("document", CHECKED, ids=lambda path: path.name)
def test_checked_blocks_run(document, tiny_checkpoint, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "Qwen2.5-VL-7B-Instruct").symlink_to(tiny_checkpoint("qwen2_5_vl", layers=28))
    write_raw_data(tmp_path / "data")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    script = "\n".join(block for block in blocks(document) if block.startswith("# checked\n"))
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    assert "identical" in done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}, which does not exist"
