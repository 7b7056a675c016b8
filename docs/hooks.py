"""What mkdocs adds to pages from the code when it builds the site: the fields of a run, the options of every
command, the support matrix, the supported versions, predicted layouts of long rows, GPUs for models, and the
families' cards.

mkdocs calls :func:`on_page_markdown`. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from docs.card_page import card_section  # noqa: E402
from megatron_vl.config import (  # noqa: E402
    LoraConfig,
    ParallelConfig,
    RecomputeConfig,
    RunConfigError,
    TrainConfig,
)
from megatron_vl.estimate.gpus import Gpu, known_gpus  # noqa: E402
from megatron_vl.estimate.search import SearchRequest, search_layouts  # noqa: E402
from megatron_vl.estimate.split import run_layout  # noqa: E402
from megatron_vl.estimate.step import RunPrediction, predict_layout  # noqa: E402
from megatron_vl.spec.families import ModelSpec, read_spec  # noqa: E402
from megatron_vl.spec.tensors import LayoutError  # noqa: E402
from tests.parity import matrix  # noqa: E402
from toolkit.commands import COMMANDS  # noqa: E402
from toolkit.common.options import CommandOptions, field_docstrings, option_flag, shown_options  # noqa: E402

# --- The fields of a run ------------------------------------------------------------------------------------


def run_reference() -> str:
    """What the site's page ``reference/run.md`` says after its introduction."""
    return "\n".join(["## The run as a whole\n", *_config_parts(TrainConfig, prefix="")])


def _config_parts(config: type, prefix: str) -> list[str]:
    """The plain fields of a dataclass, then its sections."""
    sections = {field.name: section_of(field) for field in dataclasses.fields(config)}
    plain = [field for field in dataclasses.fields(config) if sections[field.name] is None]
    parts = _fields(config, plain, prefix)
    for name, section in sections.items():
        if section is not None:
            parts += [f"## {prefix}{name}\n", f"{as_markdown(_docstring(section))}\n"]
            parts += _config_parts(section, prefix=f"{prefix}{name}.")
    return parts


def section_of(field: dataclasses.Field) -> type | None:
    """The dataclass of a field that holds fields."""
    config = field.default_factory
    return config if isinstance(config, type) and dataclasses.is_dataclass(config) else None


def _fields(config: type, fields: list[dataclasses.Field], prefix: str) -> list[str]:
    """A heading, a line of facts and a paragraph for each field."""
    texts = field_docstrings(config)
    hints = typing.get_type_hints(config)
    parts = []
    for field in fields:
        parts.append(f"### `{prefix}{field.name}`\n")
        parts.append(f"{type_text(hints[field.name])}, default: {_default(field)}\n")
        parts.append(f"{as_markdown(texts[field.name])}\n")
    return parts


def _default(field: dataclasses.Field) -> str:
    factory = field.default_factory
    value = factory() if factory is not dataclasses.MISSING else field.default
    if value in (None, ""):
        return "empty"
    return f"`{value}`" if not isinstance(value, bool) else f"`{str(value).lower()}`"


# --- The commands -------------------------------------------------------------------------------------------


def commands_reference() -> str:
    """What the site's page ``reference/commands.md`` says after its introduction."""
    parts = []
    for name, command in COMMANDS.items():
        options = command.load_options_class()
        parts += [f"## megatron-vl {name}\n", f"{as_markdown(_docstring(options))}\n"]
        if options.run_fields:
            parts.append("Takes `--config RUN.yaml` and [every field of a run](run.md) as well.\n")
        parts += _options(options)
        if options.epilog:
            parts.append(f"```text\n{options.epilog.strip()}\n```\n")
    return "\n".join(parts)


def _options(options: type[CommandOptions]) -> list[str]:
    texts = field_docstrings(options)
    hints = typing.get_type_hints(options)
    parts = []
    for field in shown_options(options):
        facts = "; ".join(_facts(field, hints[field.name]))
        parts.append(f"`{spelled(field, hints[field.name])}`{f' ({facts})' if facts else ''}")
        parts.append(f":   {as_markdown(texts[field.name])}\n")
    return parts


def spelled(field: dataclasses.Field, hint: Any) -> str:
    """The option as it is written: ``--media-root DIR``."""
    metavar = field.metadata.get("metavar") or "|".join(map(str, choices(hint))) or "VALUE"
    if field.metadata.get("positional"):
        return metavar
    if hint is bool:
        return option_flag(field.name)
    return f"{option_flag(field.name)} {metavar}"


def _facts(field: dataclasses.Field, hint: Any) -> list[str]:
    """What stands in brackets after an option."""
    if hint is bool:
        return []
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return ["must be given"]
    shown = field.metadata.get("shown_default")
    if shown:
        return [f"default: {shown}"]
    return [] if field.default in (dataclasses.MISSING, None, "") else [f"default: `{field.default}`"]


# --- The supported versions ---------------------------------------------------------------------------------

PYTHON = "Python"
TESTS_ON_GPUS = "the programs of `tests/gpu/` and `megatron-vl bench`"
TESTED_BY = {
    PYTHON: "`.ci/run`",
    "torch": "`.ci/run`",
    "megatron-core": "`.ci/run`; another version is refused at the start "
    "(`tests/core_fixes/test_register.py`), and `make test-next` tries the newest one",
    "megatron-energon": "`.ci/run`",
    "transformers": "`make test` with the first version, `make test-transformers` with the last one",
    "transformer-engine": TESTS_ON_GPUS,
    "flash-attn-4": f"{TESTS_ON_GPUS}; a run compares its gradients with float32 when it starts",
}
"""What runs with each package that decides about numbers."""
GPUS = (
    ("none: CPU, two cores", "all of `.ci/run`, with gloo"),
    ("H200", f"{TESTS_ON_GPUS}, on one, two and four; all published speeds"),
    ("H100", "parity, LoRA and moments, on two; FlashAttention-4"),
    (
        "RTX 4090, L40S, A100, B200",
        "nothing; `plan` assumes that they reach the same shares of their peaks as H200",
    ),
)


def supported_versions() -> str:
    """What the site's page ``releases.md`` says after its introduction."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = dict(map(_requirement, [*project["dependencies"], *extras["gpu"]]))
    wanted[PYTHON] = project["requires-python"]
    tested = tested_versions()

    lines = ["## Supported versions\n", "| package | allowed | tested | by |", "|---|---|---|---|"]
    for name, tests in TESTED_BY.items():
        lines.append(f"| {name} | {wanted[name]} | {tested.get(name, '')} | {tests} |")
    lines += ["\nAny allowed version may work. Only the tested ones are supported.\n"]
    lines += ["| GPU | what has run on it |", "|---|---|", *(f"| {gpu} | {ran} |" for gpu, ran in GPUS)]
    return "\n".join(lines)


def tested_versions() -> dict[str, str]:
    """Package -> the version that the tests install, from ``constraints.txt`` and the exact requirements.

    ``make test-transformers`` adds its own version of transformers to the pinned one.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    exact = dict(map(_requirement, project["optional-dependencies"]["gpu"]))
    newest = re.search(r"/transformers-([\d.]+)", (ROOT / "Makefile").read_text())
    assert newest is not None

    pinned[PYTHON] = (ROOT / ".python-version").read_text().strip()
    pinned["transformers"] += f", {newest[1]}"
    return {name: text[2:] for name, text in exact.items() if text.startswith("==")} | pinned


def _requirement(text: str) -> tuple[str, str]:
    """``name[extra]>=1,<2`` -> ``name``, ``>=1,<2``; "any" where no version is named."""
    found = re.match(r"([\w-]+)(?:\[[\w,]+\])?(.*)", text)
    assert found is not None
    return found[1], found[2] or "any"


# --- Long rows ----------------------------------------------------------------------------------------------

LONG_ROW_MODELS = (
    "Qwen2.5-VL-7B-Instruct",
    "Qwen3-VL-8B-Instruct",
    "Qwen3-VL-30B-A3B-Instruct",
    "Qwen3.5-9B",
    "Qwen3.5-27B",
    "Qwen3.5-35B-A3B",
)
LONG_ROW_LENGTHS = (32_768, 65_536, 131_072, 262_144)
LONG_ROW_GPUS = 8
LONG_ROW_RECOMPUTE = {
    "none": RecomputeConfig(vision="full"),
    "activation": RecomputeConfig("selective", ["activation"], vision="full"),
    "full": RecomputeConfig("full", vision="full"),
    "full, inputs in host memory": RecomputeConfig("full", vision="full", offload_inputs=True),
}


def long_row_layouts() -> str:
    """What the site's page ``long-context.md`` says after its introduction."""
    parts = []
    for model in LONG_ROW_MODELS:
        spec = read_spec(ROOT / "tests" / "hf_configs" / f"{model}.json")
        parts.append(f"## {model}\n")
        parts.append(
            "| tokens of a row | TP | CP | recompute | GiB a GPU | GiB on the host | MFU | tokens/s a GPU |"
        )
        parts.append("|---|---|---|---|---|---|---|---|")
        parts += [long_row_line(spec, seq_len) for seq_len in LONG_ROW_LENGTHS]
        parts.append("")
    return "\n".join(parts)


def long_row_line(spec: ModelSpec, seq_len: int) -> str:
    """The table's line for rows of ``seq_len`` tokens: the fastest layout that fits, or the smallest one."""
    predictions = long_row_predictions(spec, seq_len)
    fitting = [each for each in predictions if each[1].fits_memory]
    if not fitting:
        recompute, smallest = min(predictions, key=lambda each: each[1].peak_gib)
        layout = smallest.layout
        return (
            f"| {seq_len:,} | | | none fits; the smallest is TP {layout.tp}, CP {layout.cp}, {recompute}"
            f" | {smallest.peak_gib:.0f} | | | |"
        )

    recompute, fastest = max(fitting, key=lambda each: each[1].tokens_per_second)
    host_gib = LONG_ROW_GPUS * max(stage.host_gib for stage in fastest.stages)
    return (
        f"| {seq_len:,} | {fastest.layout.tp} | {fastest.layout.cp} | {recompute} | {fastest.peak_gib:.0f}"
        f" | {host_gib:.0f} | {100 * fastest.mfu:.1f} %"
        f" | {fastest.tokens_per_second / LONG_ROW_GPUS:,.0f} |"
    )


def long_row_predictions(spec: ModelSpec, seq_len: int) -> list[tuple[str, RunPrediction]]:
    """The name of the recompute and the prediction of each possible layout of eight GPUs."""
    run = TrainConfig(dtype="bfloat16", global_batch_size=LONG_ROW_GPUS)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, seq_len=seq_len))
    expert_parallel = LONG_ROW_GPUS if spec.language.moe is not None else 1

    predictions = []
    for tensor_parallel, context_parallel in itertools.product((1, 2, 4, 8), repeat=2):
        if tensor_parallel * context_parallel > LONG_ROW_GPUS:
            continue
        parallel = ParallelConfig(
            tp=tensor_parallel, cp=context_parallel, ep=expert_parallel, sequence_parallel=tensor_parallel > 1
        )
        for name, recompute in LONG_ROW_RECOMPUTE.items():
            config = dataclasses.replace(run, parallel=parallel, recompute=recompute)
            try:
                layout = run_layout(config, spec, LONG_ROW_GPUS)
                predicted = predict_layout(config, spec, LONG_ROW_GPUS, layout)
            except (LayoutError, RunConfigError):  # the heads do not divide
                break
            predictions.append((name, predicted))
    return predictions


# --- Which GPU for which model ------------------------------------------------------------------------------

GPU_PAGE_MODELS = (
    "Qwen3-VL-2B-Instruct",
    "Qwen2.5-VL-7B-Instruct",
    "Qwen3.5-9B",
    "Qwen3.5-27B",
    "Qwen3-VL-30B-A3B-Instruct",
    "Qwen2.5-VL-72B-Instruct",
)
GPU_PAGE_GPUS = ("RTX 4090", "L40S", "H100", "H200")
GPU_PAGE_COUNTS = (1, 2, 4, 8)
GPU_PAGE_TRAININGS = {"LoRA": LoraConfig(rank=16), "full": LoraConfig()}
GPU_PAGE_HOST_GIB = 128.0
"""GiB of host memory for each GPU."""


def gpus_for_models() -> str:
    """What the site's page ``which-gpu.md`` says after its introduction."""
    gpus = [known_gpus()[name] for name in GPU_PAGE_GPUS]
    names = [gpu.label if gpu.is_measured else f"{gpu.label}, not measured" for gpu in gpus]
    parts = []
    for model in GPU_PAGE_MODELS:
        spec = read_spec(ROOT / "tests" / "hf_configs" / f"{model}.json")
        parts += [f"## {model}\n", f"| training | GPUs | {' | '.join(names)} |", "|---|---|---|---|---|---|"]
        for training, count in itertools.product(GPU_PAGE_TRAININGS, GPU_PAGE_COUNTS):
            cells = [gpu_cell(spec, training, count, gpu) for gpu in gpus]
            parts.append(f"| {training} | {count} | {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def gpu_cell(spec: ModelSpec, training: str, count: int, gpu: Gpu) -> str:
    """Tokens a second of the fastest layout; empty if none fits."""
    config = TrainConfig(global_batch_size=8 * count, lora=GPU_PAGE_TRAININGS[training])
    request = SearchRequest(config, spec, count, gpu, GPU_PAGE_HOST_GIB, result_count=1)
    found = search_layouts(request)
    return f"{found[0].tokens_per_second:,.0f}" if found else ""


# --- Cards of the families ----------------------------------------------------------------------------------

CARDS = ROOT / "docs" / "families" / "cards"
"""Files of `benchmarks.card`: ``PAGE.json``, or ``PAGE-ANYTHING.json`` where a page has several."""


def family_cards(page: str) -> str:
    """The cards of ``families/PAGE.md``; empty without any."""
    files = [*CARDS.glob(f"{page}.json"), *sorted(CARDS.glob(f"{page}-*.json"))]
    return "\n".join(card_section(json.loads(file.read_text())) for file in files)


# --- Shared -------------------------------------------------------------------------------------------------


def _docstring(config: type) -> str:
    return " ".join((config.__doc__ or "").split())


def as_markdown(text: str) -> str:
    """Plain text that keeps its stars, angle brackets and words such as ``<|im_end|>``; backquotes work."""
    pieces = text.replace("``", "`").split("`")
    for number in range(0, len(pieces), 2):
        for sign in "\\*_<>[]|":
            pieces[number] = pieces[number].replace(sign, f"&#{ord(sign)};")
    return "`".join(pieces)


def choices(hint: Any) -> tuple[Any, ...]:
    """The words that a field takes, where they are listed."""
    parts = typing.get_args(hint) if _is_union(hint) else (hint,)
    literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
    return tuple(word for part in literals for word in typing.get_args(part))


def type_text(hint: Any) -> str:
    """A type as a reader of YAML knows it."""
    if choices(hint):
        return "One of " + ", ".join(f"`{word}`" for word in choices(hint))
    if _is_union(hint):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is list:
        return f"List of {PLURALS.get(typing.get_args(hint)[0], 'values')}"
    return SINGULARS.get(hint, f"`{hint}`")


SINGULARS = {int: "Whole number", float: "Number", str: "Text", bool: "`true` or `false`"}
PLURALS = {int: "whole numbers", str: "words"}


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


# --- mkdocs -------------------------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], str]] = {
    "reference/run.md": run_reference,
    "reference/commands.md": commands_reference,
    "support-matrix.md": matrix.markdown,
    "releases.md": supported_versions,
    "long-context.md": long_row_layouts,
    "which-gpu.md": gpus_for_models,
}
"""Address below docs/ -> what writes the part of the page that is made of the code."""


ITEM = re.compile(r"([-*]|\d+\.) ")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs' hook: adds what is made of the code, and writes lists as Python-Markdown wants them."""
    address = page.file.src_uri
    added = ""
    if write := PAGES.get(address):
        added = write()
    elif address.startswith("families/"):
        added = family_cards(Path(address).stem)
    return lists_indented(f"{markdown}\n{added}" if added else markdown)


def lists_indented(markdown: str) -> str:
    """Lists as Python-Markdown wants them.

    Our files are written for any reader of Markdown. Python-Markdown wants what belongs to an item indented
    by four spaces, and a blank line before a list that follows a paragraph.
    """
    lines: list[str] = []
    fence = ""
    wider = 0
    within_paragraph = False
    for line in markdown.splitlines():
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        if not fence:
            wider = 4 - indent if indent in (2, 3) else 0
            if not text:
                within_paragraph = False
            elif ITEM.match(text):
                lines += [""] if within_paragraph else []
                within_paragraph = False
            elif not lines or not lines[-1]:
                within_paragraph = text[0] not in "|#"

        if text.startswith("```"):
            fence = "" if fence else text
            within_paragraph = False

        lines.append(" " * wider + line if text else line)

    return "\n".join(lines)
