"""The report of an evaluation: a table in the terminal and one HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.table import Table

from megatron_vl.data.pixels import VideoInfo, open_image, video_frames
from toolkit.evaluate.gates import Gate
from toolkit.evaluate.run import Result

SHOWN = 50
"""Questions on the page, those with differing answers first."""
THUMBNAIL = (160, 120)
FRAME = (4320, 7680)
"""Largest frame of a video that is shown: height and width in pixels."""
WORDS = {True: "passed", False: "FAILED", None: "not run"}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222; background: #fff; }
table { border-collapse: collapse; margin: .5em 0 1.5em; } th, td { border: 1px solid #ccc; padding: .3em .6em; text-align: left;
vertical-align: top; } th { background: #f3f3f3; } code, td.id { font-family: ui-monospace, monospace; font-size: .9em; }
.passed { color: #14682b; font-weight: 600; } .failed { color: #a40e26; font-weight: 600; } .skipped { color: #777; }
td.other { background: #fdecef; } pre { white-space: pre-wrap; margin: 0; } .number { text-align: right; }
"""


def _asked(result: Result) -> str:
    return f"{result.questions} questions" if result.questions else "no question asked"


def print_report(result: Result, out: Path) -> None:
    """Gates and scores in the terminal."""
    console = Console(highlight=False, width=max(100, Console().width))
    table = Table("gate", "", "measured", title=f"{result.data}, {_asked(result)}", title_justify="left")
    for gate in result.gates:
        colour = {True: "green", False: "red", None: "yellow"}[gate.passed]
        table.add_row(gate.name, f"[{colour}]{WORDS[gate.passed]}[/]", gate.measured)
    console.print(table)
    for gate in result.gates:
        for detail in gate.details[:5]:
            console.print(f"  {gate.name}: {detail}", markup=False)
        if len(gate.details) > 5:
            console.print(f"  {gate.name}: ... and {len(gate.details) - 5} more in report.json")
    scores = Table("metric", *result.checkpoints, title="scores", title_justify="left")
    for name in metric_names(result):
        scores.add_row(name, *(_number(facts["metrics"].get(name)) for facts in result.checkpoints.values()))
    if metric_names(result):
        console.print(scores)
    left = [gate.name for gate in result.gates if gate.passed is None]
    known = "the converted checkpoint is the original" + (f" ({', '.join(left)} not run)" if left else "")
    verdict = known if result.passed else "FAILED"
    console.print(f"{verdict}; {out / 'report.html'}, {result.seconds:.0f} s", soft_wrap=True)


def metric_names(result: Result) -> list[str]:
    """Metrics that any checkpoint has, in the order they came."""
    return list(dict.fromkeys(name for facts in result.checkpoints.values() for name in facts["metrics"]))


def _number(value: Any) -> str:
    return "missing" if value is None else f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def write_html(result: Result, path: Path) -> None:
    """The whole report as one file: styles and small pictures are in it, and there are no scripts."""
    title = f"{result.data}: {'passed' if result.passed else 'failed'}"
    body = [
        f"<h1>{escape(result.data)}: <span class={_class(result.passed)}>{WORDS[result.passed]}</span></h1>",
        f"<p>{_asked(result)}, {result.seconds:.0f} s.</p>",
        "<h2>Is the converted checkpoint the original?</h2>",
        _table(("gate", "", "measured"), [_gate_cells(gate) for gate in result.gates]),
        *(_details(gate) for gate in result.gates if gate.details),
        "<h2>Scores</h2>",
        _scores(result),
        "<h2>Checkpoints</h2>",
        _table(
            ("", "folder", "SHA-256 of all its files"),
            [
                [_cell(role), _cell(facts["folder"], "id"), _cell(facts["sha256"], "id")]
                for role, facts in result.checkpoints.items()
            ],
        ),
        "<h2>Settings, the same for all</h2>",
        _table(("", ""), [[_cell(name), _cell(_setting(value))] for name, value in result.settings.items()]),
        _answers(result),
    ]
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style><body>"
    path.write_text(page + "\n".join(body) + "</body></html>\n", encoding="utf-8")


def _class(passed: bool | None) -> str:
    return {True: "passed", False: "failed", None: "skipped"}[passed]


def _setting(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return "the checkpoint's own" if value is None else str(value)


def _cell(text: Any, kind: str = "") -> str:
    return f"<td{f' class={kind}' if kind else ''}>{escape(str(text))}</td>"


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f"<table><tr>{titles}</tr>{''.join(f'<tr>{"".join(row)}</tr>' for row in rows)}</table>"


def _gate_cells(gate: Gate) -> list[str]:
    return [_cell(gate.name), _cell(WORDS[gate.passed], _class(gate.passed)), _cell(gate.measured)]


def _details(gate: Gate) -> str:
    more = f"\n... and {len(gate.details) - SHOWN} more in report.json" if len(gate.details) > SHOWN else ""
    return f"<p>{escape(gate.name)}:</p><pre>{escape(chr(10).join(gate.details[:SHOWN]) + more)}</pre>"


def _scores(result: Result) -> str:
    roles = list(result.checkpoints)
    rows = []
    for name in metric_names(result):
        values = [result.checkpoints[role]["metrics"].get(name) for role in roles]
        rows.append([_cell(name), *(_cell(_number(value), "number") for value in values)])
    problems = "".join(
        f"<p class=failed>{escape(role)}: {escape(facts['problem'])}</p>"
        for role, facts in result.checkpoints.items()
        if facts["problem"]
    )
    return (_table(("metric", *roles), rows) if rows else "<p class=skipped>none</p>") + problems


def _answers(result: Result) -> str:
    """Questions with their pictures and every checkpoint's answer; a cell that differs from the original's is marked."""
    if not result.answers:
        return ""
    roles = list(result.answers)
    by_index = [{line["index"]: line["answer"] for line in result.answers[role]} for role in roles]
    lines = sorted(result.answers["original"], key=lambda line: all(a.get(line["index"]) == line["answer"] for a in by_index))
    rows = []
    for line in lines[:SHOWN]:
        given = [_spoken(answers.get(line["index"], "missing")) for answers in by_index]
        marked = [_cell(text, "other" if text != given[0] else "") for text in given]
        pictures = "".join(map(_thumbnail, [_picture(Path(name)) for name in line["images"][:4]]))
        pictures += "".join(map(_thumbnail, [_still(Path(name)) for name in line["videos"][:4]]))
        question = f"<td>{pictures}<pre>{escape(line['question'])}</pre></td>"
        rows.append([_cell(line["index"]), question, _cell(line["expected"]), *marked])
    more = f"<p>{len(lines) - SHOWN} more questions in work/.</p>" if len(lines) > SHOWN else ""
    return "<h2>Answers</h2>" + _table(("index", "question", "expected", *roles), rows) + more


def _spoken(answer: str | list[str]) -> str:
    """An answer; of a dialogue, one turn a line."""
    return answer if isinstance(answer, str) else "\n".join(f"{i}. {turn}" for i, turn in enumerate(answer, 1))


def _picture(path: Path) -> Image.Image:
    with open_image(path.read_bytes()) as image:
        return image.convert("RGB")


def _still(path: Path) -> Image.Image:
    """A video's first frame."""
    data = path.read_bytes()
    frame = video_frames(data, VideoInfo(1, 1.0, *FRAME), [0])[0]
    return Image.fromarray(frame.permute(1, 2, 0).numpy())


def _thumbnail(small: Image.Image) -> str:
    small.thumbnail(THUMBNAIL)
    data = io.BytesIO()
    small.save(data, "JPEG", quality=70)
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"> '
