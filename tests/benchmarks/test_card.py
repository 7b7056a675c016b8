"""A card's two sides learn the same, what differs shows, and its page shows the figures."""

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import card
from megatron_vl.parallel.process_grid import init_distributed
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import read_spec
from tests.docs_site import docs_hooks, site_page
from tests.support.ranks import call, in_ranks

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
LR = 1e-3


@pytest.fixture(scope="module")
def card_file(tiny_checkpoint, tmp_path_factory) -> Path:
    """The card of a model with fewer layers than its config, written by the command."""
    folder = tmp_path_factory.mktemp("card")
    words = ["--hf", str(tiny_checkpoint("qwen3_vl"))]
    words += "--language-layers 3 --vision-layers 2 --seq-len 512".split()
    words += ["--steps", str(STEPS), "--lr", str(LR)]
    words += ["--out", str(folder / "card.json")]
    assert call(card.main, argv=words) == 0
    return folder / "card.json"


@pytest.mark.full
@pytest.mark.ranks
def test_card_has_what_was_measured(card_file: Path) -> None:
    card = json.loads(card_file.read_text())
    model = card["model"]
    assert (model["language_layers"], model["config_language_layers"]) == (3, 4)
    assert (model["vision_layers"], model["config_vision_layers"]) == (2, 4)

    speed = card["speed"]
    # Rows are nearly full, and each has images.
    tokens = speed["tokens_per_s_per_rank"] * speed["step_s"]
    assert 0.7 * card.TIMED_ROWS * 512 < tokens <= card.TIMED_ROWS * 512 and speed["images_per_s"] > 0

    curve = card["curve"]
    assert curve["dtype"] == "float32" and curve["optimizer"]["lr"] == LR
    ours, theirs, eager = (
        curve["losses"][name] for name in ("megatron-vl", "transformers", "transformers, eager")
    )
    assert len(ours) == STEPS and ours[-1] < ours[0] - 0.05
    assert ours == pytest.approx(theirs, abs=5e-6) and eager == pytest.approx(theirs, abs=5e-6)
    gap = curve["gaps"]["megatron-vl"]
    assert gap["largest"] == max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    assert card["source"]["commit"] and card["machine"]["attention"]["language"] == "sdpa"


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "dtype", "limit"),
    [
        ("qwen2_5_vl", "float32", 5e-6),
        ("qwen2_5_vl", "bfloat16", 5e-3),
        ("qwen3_5_moe", "float32", 5e-6),
        ("qwen3_5_moe", "bfloat16", 5e-3),
    ],
)
@in_ranks()
def test_card_shows_another_learning_rate(hf, family: str, dtype: str, limit: float, tmp_path):
    init_distributed(get_platform("cpu"))
    run = card.prepare_curve(read_spec(hf), tmp_path / "card", "cpu", steps=STEPS, learning_rate=LR)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, dtype=dtype))
    other = dataclasses.replace(run.config, optimizer=dataclasses.replace(run.config.optimizer, lr=3 * LR))
    expected = card.train_in_transformers(run)
    losses = {
        "same": card.train_here(run),
        "eager": card.train_in_transformers(run, attention="eager"),
        "other rate": card.train_here(dataclasses.replace(run, config=other)),
    }
    gaps = {name: card.curve_gap(each, expected)["largest"] for name, each in losses.items()}
    assert 0 < gaps["same"] < limit < 10 * limit < gaps["other rate"]
    # On a CPU, both kernels of transformers may give the same bits.
    assert gaps["eager"] == 0 or gaps["same"] < 5 * gaps["eager"]


@pytest.mark.full
@pytest.mark.ranks
def test_page_shows_its_cards(card_file: Path, tmp_path, monkeypatch) -> None:
    card = json.loads(card_file.read_text())
    for name in ("qwen3_vl", "qwen3_vl-small", "qwen3_vl_moe"):
        (tmp_path / f"{name}.json").write_text(json.dumps(card | {"date": f"day of {name}"}))
    hooks = docs_hooks()
    monkeypatch.setattr(hooks, "CARDS", tmp_path)
    text = site_page("families/qwen3_vl.md")
    assert "day of qwen3_vl on" in text
    assert "day of qwen3_vl-small on" in text
    assert "day of qwen3_vl_moe" not in text
    assert "| ms a step | " in text and f"{card['curve']['gaps']['megatron-vl']['mean']:.1e}" in text
    assert "3 of\n4 decoder layers, 2 of 4 vision layers" in text

    image = text[text.index("<svg") : text.index("</svg>") + len("</svg>")]
    namespace = "{http://www.w3.org/2000/svg}"
    lines = ElementTree.fromstring(image).findall(f"{namespace}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [STEPS] * 5
    assert "\n\n" not in image  # a blank line ends Markdown's block of HTML


def test_page_without_a_card_stays_as_it_is(tmp_path, monkeypatch) -> None:
    hooks = docs_hooks()
    monkeypatch.setattr(hooks, "CARDS", tmp_path)
    written = (ROOT / "docs" / "families" / "qwen2_vl.md").read_text()
    assert site_page("families/qwen2_vl.md") == written


@pytest.mark.parametrize("name", ["Qwen2-VL-2B-Instruct", "Qwen3-VL-8B-Instruct", "Qwen3.5-35B-A3B"])
def test_config_with_fewer_layers_describes_the_model(name: str) -> None:
    spec = read_spec(ROOT / "tests" / "hf_configs" / f"{name}.json")
    fewer = spec.replace_layers(num_language_layers=5, num_vision_layers=10)
    assert read_spec(fewer.hf_config) == fewer and fewer.language.num_layers == 5
    assert read_spec(spec.hf_config) == spec, "the config itself has changed"
    without_config = dataclasses.replace(spec, hf_config={})
    assert without_config.replace_layers(num_vision_layers=1).hf_config == {}
