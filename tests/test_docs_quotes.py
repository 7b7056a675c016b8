"""What the pages quote is what the code says and reads: messages of docs/errors.md, and YAML of runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from megatron_vl.config import parse_config, validate_config

ROOT = Path(__file__).resolve().parent.parent


def texts_of_the_code() -> str:
    """All texts in our sources, one a line; what an f-string fills in is left out as ``...``."""
    found = []
    for package in ("megatron_vl", "converters", "data_tools", "toolkit"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                    found.append(" ".join("".join(map(str, parts)).split()))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(" ".join(node.value.split()))
    return "\n".join(found)


def quoted_messages() -> list[str]:
    """What each item of docs/errors.md quotes before its advice."""
    heads = re.findall(r"^- (`.*`):$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    return [message for head in heads for message in re.findall(r"`([^`]+)`", head)]


def test_messages_are_those_of_the_code():
    """What stands between the dots of a message is, in this order, in one text of the code."""
    texts = texts_of_the_code()
    messages = quoted_messages()
    assert len(messages) > 50
    for message in messages:
        pieces = [piece for piece in message.split("...") if piece.strip()]
        pattern = ".*?".join(map(re.escape, pieces))
        assert re.search(pattern, texts), f"docs/errors.md quotes {message!r}, which nothing in the code says"


def quoted_runs() -> list[str]:
    """The YAML blocks of all pages that are a run, or sections of one; a metadataset names its class."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    found = [
        block
        for page in pages
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    return [block for block in found if "__class__" not in block]


@pytest.mark.parametrize("run", quoted_runs(), ids=lambda run: run.splitlines()[0][:40])
def test_runs_are_valid(run: str, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(run)
    config = parse_config(["--config", str(path)])
    parallel = config.parallel
    assert validate_config(config, parallel.replica_ranks) == 1
