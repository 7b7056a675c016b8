"""The report of an evaluation: a table in the terminal and one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.table import Table

from megatron_vl.data.sample.pixels import VideoInfo, decode_image, video_frames
from toolkit.evaluate.evaluation import EvaluationResult
from toolkit.html_templates import jpeg_base64, template_environment

MAX_QUESTIONS = 50
"""Number of questions on the page; those with differing answers come first."""
THUMBNAIL_SIZE = (160, 120)
MAX_FRAME_SIZE = (4320, 7680)
"""Height and width in pixels of the largest video frame that is shown."""
NO_ANSWER = "(no answer: cut off while the model was thinking)"
GATE_WORDS = {True: "passed", False: "FAILED", None: "not run"}
CSS_CLASSES = {True: "passed", False: "failed", None: "skipped"}


def _questions_text(result: EvaluationResult) -> str:
    return f"{result.questions} questions" if result.questions else "no question asked"


def print_report(result: EvaluationResult, output_dir: Path) -> None:
    """Prints gates and scores to the terminal."""
    console = Console(highlight=False, width=max(100, Console().width))
    gate_table = Table(
        "gate", "", "measured", title=f"{result.data}, {_questions_text(result)}", title_justify="left"
    )
    for gate in result.gates:
        colour = {True: "green", False: "red", None: "yellow"}[gate.passed]
        gate_table.add_row(gate.name, f"[{colour}]{GATE_WORDS[gate.passed]}[/]", gate.measured)

    console.print(gate_table)
    for gate in result.gates:
        for detail in gate.details[:5]:
            console.print(f"  {gate.name}: {detail}", markup=False)
        if len(gate.details) > 5:
            console.print(f"  {gate.name}: ... and {len(gate.details) - 5} more in report.json")

    score_table = Table("metric", *result.checkpoints, title="scores", title_justify="left")
    for name in metric_names(result):
        metric_values = [facts["metrics"].get(name) for facts in result.checkpoints.values()]
        score_table.add_row(name, *map(_format_number, metric_values))
    if metric_names(result):
        console.print(score_table)
    for sentence in unanswered_sentences(result):
        console.print(sentence, soft_wrap=True, markup=False)

    skipped_gates = [gate.name for gate in result.gates if gate.passed is None]
    verdict_text = "the converted checkpoint equals the original" if result.passed else "FAILED"
    if result.passed and skipped_gates:
        verdict_text += f" ({', '.join(skipped_gates)} not run)"
    console.print(f"{verdict_text}; {output_dir / 'report.html'}, {result.seconds:.0f} s", soft_wrap=True)


def metric_names(result: EvaluationResult) -> list[str]:
    """The metrics of all checkpoints, in the order of first appearance."""
    names: dict[str, None] = {}
    for facts in result.checkpoints.values():
        names |= dict.fromkeys(facts["metrics"])
    return list(names)


def unanswered_sentences(result: EvaluationResult) -> list[str]:
    """Says of each checkpoint how many answers never came."""
    sentences: list[str] = []
    for role, facts in result.checkpoints.items():
        if facts.get("unanswered"):
            sentences.append(
                f"{role}: answers cut off while the model was thinking, which count as no answer: "
                f"{facts['unanswered']}. Raise --max-new-tokens, or give --thinking off"
            )
    return sentences


def _format_number(metric_value: Any) -> str:
    if metric_value is None:
        return "missing"
    if isinstance(metric_value, float):
        return f"{metric_value:.4f}".rstrip("0").rstrip(".")
    return str(metric_value)


def write_html(result: EvaluationResult, html_path: Path) -> None:
    """Writes the whole report as one file, with styles and small pictures but without scripts.

    All text from tables and checkpoints is escaped.
    """
    environment = template_environment(Path(__file__).parent)
    environment.filters |= {"number": _format_number, "setting": _format_setting}

    lines = _differing_first(result)
    page = environment.get_template("report.html.jinja").render(
        result=result,
        asked=_questions_text(result),
        metrics=metric_names(result),
        unanswered=unanswered_sentences(result),
        questions=[_question_fields(result, line) for line in lines[:MAX_QUESTIONS]],
        unshown=len(lines) - MAX_QUESTIONS,
        shown=MAX_QUESTIONS,
        words=GATE_WORDS,
        classes=CSS_CLASSES,
    )
    html_path.write_text(page + "\n", encoding="utf-8")


def _format_setting(setting_value: Any) -> str:
    if isinstance(setting_value, dict):
        return ", ".join(f"{name} {part}" for name, part in setting_value.items())
    return "the checkpoint's own" if setting_value is None else str(setting_value)


def _differing_first(result: EvaluationResult) -> list[dict[str, Any]]:
    """The original's lines. Questions that another checkpoint answers differently come first."""
    answers_by_role = []
    for lines in result.answers.values():
        answers_by_role.append({line["number"]: line["answer"] for line in lines})

    def all_agree(line: dict[str, Any]) -> bool:
        return all(answers.get(line["number"]) == line["answer"] for answers in answers_by_role)

    return sorted(result.answers.get("original", []), key=all_agree)


def _question_fields(result: EvaluationResult, line: dict[str, Any]) -> dict[str, Any]:
    """What the page shows for a question: small pictures, and every checkpoint's answer."""
    answers = []
    for lines in result.answers.values():
        answer_text = "missing"
        for other_line in lines:
            if other_line["number"] == line["number"]:
                answer_text = NO_ANSWER if other_line["unanswered"] else other_line["answer"]
                break
        answers.append(answer_text)

    # A hostile table may have written these names (docs/evaluation.md): no devices, no pipes.
    pictures = []
    for media_field, read_thumbnail in (("images", _read_picture), ("videos", _read_first_frame)):
        for name in line[media_field][:4]:
            if Path(name).is_file():
                pictures.append(jpeg_base64(read_thumbnail(Path(name)), THUMBNAIL_SIZE))
    return line | {"answers": answers, "pictures": pictures}


def _read_picture(picture_path: Path) -> Image.Image:
    return Image.fromarray(decode_image(picture_path.read_bytes()).permute(1, 2, 0).numpy())


def _read_first_frame(video_path: Path) -> Image.Image:
    """The first frame of a video."""
    frame = video_frames(video_path.read_bytes(), VideoInfo(1, 1.0, *MAX_FRAME_SIZE), [0])[0]
    return Image.fromarray(frame.permute(1, 2, 0).numpy())
