"""The tables of docs/families say what the YAMLs of examples/ say."""

from __future__ import annotations

import re

import pytest

from tests.examples import EXAMPLES, ROOT, Example, read_example

PAGES = sorted((ROOT / "docs" / "families").glob("*.md"))


def rows() -> dict[str, list[str]]:
    """The cells of each example's line, by the example's name."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for name, cells in re.findall(r"^\| `(\w+)` \| (.*) \|$", page.read_text(), re.MULTILINE):
            assert name not in found, f"{page.name} is the second page with {name}"
            found[name] = cells.split(" | ")
    return found


def expected(example: Example) -> list[str]:
    """GPUs, memory, tokens/s and hours, as a page writes them."""
    gpu = example.gpu.split()[0]
    hours = f"{example.hours:.1f}"
    return [f"{example.world} {gpu}", f"{example.gib} GiB", f"{example.tokens_per_second:,}", hours]


def sizes(example: Example) -> dict[str, int]:
    """Parallel sizes above 1, as ``TP8 x PP2`` of a page has them."""
    p = example.config.parallel
    found = {"TP": p.tp, "PP": p.pp, "DP": example.world // (p.tp * p.pp), "EP": p.ep}
    return {name: size for name, size in found.items() if size > 1}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_page_says_what_the_yaml_says(path):
    example = read_example(path)
    gpus, layout, memory, speed, hours = rows()[path.stem]
    assert [gpus, memory, speed.split(", ")[0], hours] == expected(example)
    assert ("measured" in speed) == bool(example.measured_per_gpu)

    named = {name: int(size) for name, size in re.findall(r"\b(TP|PP|DP|EP)(\d+)", layout)}
    assert named == sizes(example)
    split = re.search(r"layers (\d+(?: \+ \d+)+)", layout)
    assert not split or [int(number) for number in split[1].split(" + ")] == example.config.parallel.layers
