"""The page of an evaluation is complete and executes nothing from a table or a checkpoint."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from tests.toolkit.evaluation import photographs
from toolkit.evaluate.evaluation import EvaluationResult
from toolkit.evaluate.gates import ConversionGate
from toolkit.evaluate.report import MAX_QUESTIONS, NO_ANSWER, print_report, write_html

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\" & '{{ 7 * 7 }}"


class Page(HTMLParser):
    """Tags, attributes and cells of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def line(index: str, answer: str, **fields: object) -> dict[str, object]:
    return {
        "number": index,
        "index": index,
        "answer": answer,
        "thinking": None,
        "unanswered": 0,
        "question": "Who?",
        "expected": "A",
        "images": [],
        "videos": [],
    } | fields


def result(answers: dict[str, list[dict]], gates: list[ConversionGate]) -> EvaluationResult:
    facts = {
        role: {"folder": HOSTILE, "sha256": HOSTILE, "metrics": {HOSTILE: 0.25}, "problem": HOSTILE}
        for role in answers
    }
    return EvaluationResult(
        HOSTILE,
        2,
        {"dtype": HOSTILE, "min_pixels": None, "versions": {"torch": "2"}},
        facts,
        gates,
        answers,
        12.3,
    )


def test_answers_that_were_cut_off_are_counted_and_said(tmp_path: Path, capsys) -> None:
    lines = [line("1", "", thinking="A or", unanswered=1), line("2", "B", thinking="Hm.")]
    found = result(
        {"original": lines, "converted": lines}, [ConversionGate("text", True, "2 answers identical")]
    )
    found.checkpoints["original"]["unanswered"] = 1
    said = "original: answers cut off while the model was thinking, which count as no answer: 1."
    write_html(found, tmp_path / "a.html")
    shown = "".join(Page((tmp_path / "a.html").read_text()).words)
    assert said in shown and shown.count(NO_ANSWER) == 2
    assert "converted: answers cut off" not in shown
    print_report(found, tmp_path)
    assert said in capsys.readouterr().out


def test_what_a_table_or_a_checkpoint_says_stays_text(tmp_path: Path) -> None:
    photographs()[0].save(tmp_path / "a.png")
    hostile = line(HOSTILE, HOSTILE, question=HOSTILE, expected=HOSTILE, images=[str(tmp_path / "a.png")])
    gates = [
        ConversionGate("tensors", True, HOSTILE),
        ConversionGate("text", False, HOSTILE, [HOSTILE] * (MAX_QUESTIONS + 3)),
        ConversionGate("scores", None, "-"),
    ]
    write_html(
        result({"original": [hostile], "converted": [hostile | {"answer": HOSTILE + " B"}]}, gates),
        tmp_path / "a.html",
    )
    text = (tmp_path / "a.html").read_text()
    page = Page(text)

    assert "script" not in page.tags and page.tags.count("img") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    shown = "".join(page.words)
    # Title, heading, 2 gates, 50 details, metric, 2 problems, 2 x 2 of checkpoints, a setting, 5 cells.
    assert shown.count(HOSTILE) == 2 + 2 + MAX_QUESTIONS + 1 + 2 + 4 + 1 + 5
    assert "... and 3 more in report.json" in shown and HOSTILE + " B" in shown
    assert "the checkpoint's own" in shown and "torch 2" in shown and "0.25" in shown


def test_questions_that_are_answered_otherwise_come_first(tmp_path: Path) -> None:
    original = [line(str(i), "A") for i in range(MAX_QUESTIONS + 5)]
    converted = [one | ({"answer": "B"} if one["index"] == "52" else {}) for one in original[:-1]]
    write_html(result({"original": original, "converted": converted}, []), tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    rows = text.partition("<h2>Answers</h2>")[2].split("<tr>")[2:]
    assert [row.split("<td>")[1].split("<")[0] for row in rows[:3]] == ["52", "54", "0"]
    assert rows[0].count('class="other"') == 1 and "missing" in rows[1] and 'class="other"' not in rows[2]
    assert "5 more questions in work/." in text and len(rows) == MAX_QUESTIONS


def test_a_wide_table_scrolls_by_itself(tmp_path: Path) -> None:
    """The page stays as wide as its window, on a phone too."""
    write_html(result({"original": [line("1", "A")]}, []), tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    assert re.search(r"^table \{ display: block; overflow-x: auto;", text, re.MULTILINE)
    assert re.search(r'<meta name="viewport" content="width=device-width', text)
