"""The report of an evaluation: a table in the terminal and one self-contained HTML page."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.table import Table

from megatron_vl.data.sample.pixels import VideoInfo, open_image, video_frames
from toolkit.evaluate.comparison import Result
from toolkit.pages import templates

SHOWN = 50
"""Number of questions on the page; those with differing answers come first."""
THUMBNAIL = (160, 120)
FRAME = (4320, 7680)
"""Height and width in pixels of the largest video frame that is shown."""
NO_ANSWER = "(no answer: cut off while the model was thinking)"
WORDS = {True: "passed", False: "FAILED", None: "not run"}
CLASSES = {True: "passed", False: "failed", None: "skipped"}


def _asked(result: Result) -> str:
    return f"{result.questions} questions" if result.questions else "no question asked"


def print_report(result: Result, out: Path) -> None:
    """Prints gates and scores to the terminal."""
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
    for sentence in unanswered(result):
        console.print(sentence, soft_wrap=True, markup=False)
    left = [gate.name for gate in result.gates if gate.passed is None]
    known = "the converted checkpoint equals the original" + (f" ({', '.join(left)} not run)" if left else "")
    verdict = known if result.passed else "FAILED"
    console.print(f"{verdict}; {out / 'report.html'}, {result.seconds:.0f} s", soft_wrap=True)


def metric_names(result: Result) -> list[str]:
    """The metrics of all checkpoints, in the order of first appearance."""
    return list(dict.fromkeys(name for facts in result.checkpoints.values() for name in facts["metrics"]))


def unanswered(result: Result) -> list[str]:
    """Says of each checkpoint how many answers never came."""
    counts = {role: facts.get("unanswered", 0) for role, facts in result.checkpoints.items()}
    return [
        f"{role}: answers cut off while the model was thinking, which count as no answer: {count}. Raise"
        " --max-new-tokens, or give --thinking off"
        for role, count in counts.items()
        if count
    ]


def _number(value: Any) -> str:
    return (
        "missing"
        if value is None
        else f"{value:.4f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else str(value)
    )


def write_html(result: Result, path: Path) -> None:
    """Writes the whole report as one file, with styles and small pictures but without scripts.

    All text from tables and checkpoints is escaped.
    """
    environment = templates(Path(__file__).parent)
    environment.filters |= {"number": _number, "setting": _setting}

    lines = _differing_first(result)
    page = environment.get_template("report.html.jinja").render(
        result=result,
        asked=_asked(result),
        metrics=metric_names(result),
        unanswered=unanswered(result),
        questions=[_question(result, line) for line in lines[:SHOWN]],
        unshown=len(lines) - SHOWN,
        shown=SHOWN,
        words=WORDS,
        classes=CLASSES,
    )
    path.write_text(page + "\n", encoding="utf-8")


def _setting(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return "the checkpoint's own" if value is None else str(value)


def _differing_first(result: Result) -> list[dict[str, Any]]:
    """The original's lines; questions that another checkpoint answers differently come first."""
    given = [{line["number"]: line["answer"] for line in lines} for lines in result.answers.values()]

    def same(line: dict[str, Any]) -> bool:
        return all(answers.get(line["number"]) == line["answer"] for answers in given)

    return sorted(result.answers.get("original", []), key=same)


def _question(result: Result, line: dict[str, Any]) -> dict[str, Any]:
    """What the page shows for a question: small pictures, and every checkpoint's answer."""
    answers = []
    for lines in result.answers.values():
        found = next((other for other in lines if other["number"] == line["number"]), None)
        answers.append("missing" if not found else NO_ANSWER if found["unanswered"] else found["answer"])

    # A hostile table may have written these names (docs/evaluation.md): no devices, no pipes.
    pictures = [_picture(Path(name)) for name in line["images"][:4] if Path(name).is_file()]
    pictures += [_still(Path(name)) for name in line["videos"][:4] if Path(name).is_file()]
    return line | {"answers": answers, "pictures": list(map(_thumbnail, pictures))}


def _picture(path: Path) -> Image.Image:
    with open_image(path.read_bytes()) as image:
        return image.convert("RGB")


def _still(path: Path) -> Image.Image:
    """The first frame of a video."""
    data = path.read_bytes()
    frame = video_frames(data, VideoInfo(1, 1.0, *FRAME), [0])[0]
    return Image.fromarray(frame.permute(1, 2, 0).numpy())


def _thumbnail(small: Image.Image) -> str:
    """Encodes a small JPEG in base64."""
    small.thumbnail(THUMBNAIL)
    data = io.BytesIO()
    small.save(data, "JPEG", quality=70)
    return base64.b64encode(data.getvalue()).decode()
