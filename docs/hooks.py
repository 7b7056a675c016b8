"""What pages of the documentation have from the code.

``make pages`` writes :data:`WRITTEN` into the Markdown files. The reference of fields and commands, and the
cards of the families, are added while mkdocs builds the site. Nothing here imports torch.
"""

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
from toolkit.common.options import field_docstrings, option_flag, shown_options  # noqa: E402

# --- The reference ------------------------------------------------------------------------------------------


def run_reference() -> str:
    """The fields of a run: a heading, a line of facts and a paragraph each."""
    return "\n".join(["## The run as a whole\n", *_section_fields(TrainConfig, prefix="")])


def _section_fields(config: type, prefix: str) -> list[str]:
    docstrings = field_docstrings(config)
    hints = typing.get_type_hints(config)
    plain, sections = [], []
    for field in dataclasses.fields(config):
        name = prefix + field.name
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(default):
            sections += [f"## {name}\n", f"{as_markdown(_docstring(type(default)))}\n"]
            sections += _section_fields(type(default), prefix=f"{name}.")
        else:
            plain += [
                f"### `{name}`\n",
                f"{type_text(hints[field.name])}, default: {_default_text(default)}\n",
            ]
            plain.append(f"{as_markdown(docstrings[field.name])}\n")
    return plain + sections


def commands_reference() -> str:
    """Every command and its options."""
    parts = []
    for name, command in COMMANDS.items():
        options = command.load_options_class()
        parts += [f"## megatron-vl {name}\n", f"{as_markdown(_docstring(options))}\n"]
        if options.run_fields:
            parts.append("Takes `--config RUN.yaml` and [every field of a run](run.md) as well.\n")

        docstrings = field_docstrings(options)
        hints = typing.get_type_hints(options)
        for field in shown_options(options):
            parts.append(_option_head(field, hints[field.name]))
            parts.append(f":   {as_markdown(docstrings[field.name])}\n")
        if options.epilog:
            parts.append(f"```text\n{options.epilog.strip()}\n```\n")
    return "\n".join(parts)


def _option_head(field: dataclasses.Field, hint: Any) -> str:
    """The option as it is written, and its default: ``--media-root DIR``."""
    flag = option_flag(field.name)
    if hint is bool:
        return f"`{flag}`"

    metavar = field.metadata.get("metavar") or "|".join(map(str, _choices(hint))) or "VALUE"
    written = metavar if field.metadata.get("positional") else f"{flag} {metavar}"
    if field.default is field.default_factory is dataclasses.MISSING:
        return f"`{written}` (must be given)"
    if shown := field.metadata.get("shown_default"):
        return f"`{written}` (default: {shown})"
    if field.default in (dataclasses.MISSING, None, ""):
        return f"`{written}`"
    return f"`{written}` (default: `{field.default}`)"


def _default_text(value: Any) -> str:
    if value in (None, ""):
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _docstring(config: type) -> str:
    return " ".join((config.__doc__ or "").split())


def as_markdown(text: str) -> str:
    """Plain text that keeps its stars, angle brackets and words such as ``<|im_end|>``; backquotes work."""
    pieces = text.replace("``", "`").split("`")
    for number in range(0, len(pieces), 2):
        pieces[number] = re.sub(r"[\\*_<>\[\]|]", lambda sign: f"&#{ord(sign[0])};", pieces[number])
    return "`".join(pieces)


def _choices(hint: Any) -> list[Any]:
    """The words that a field takes, where they are listed."""
    parts = typing.get_args(hint) if _is_union(hint) else (hint,)
    return [
        word for part in parts if typing.get_origin(part) is typing.Literal for word in typing.get_args(part)
    ]


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def type_text(hint: Any) -> str:
    """A type as a reader of YAML knows it."""
    if words := _choices(hint):
        return "One of " + ", ".join(f"`{word}`" for word in words)
    if _is_union(hint):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is list:
        return {int: "List of whole numbers", str: "List of words"}.get(
            typing.get_args(hint)[0], "List of values"
        )
    return {int: "Whole number", float: "Number", str: "Text", bool: "`true` or `false`"}.get(
        hint, f"`{hint}`"
    )


# --- The supported versions ---------------------------------------------------------------------------------

TESTS_ON_GPUS = "the programs of `tests/gpu/` and `megatron-vl bench`"
TESTED_BY = {
    "Python": "`.ci/run`",
    "torch": "`.ci/run`",
    "megatron-core": "`.ci/run`; another version is refused at the start "
    "(`tests/core_fixes/test_register.py`), and `make test-next` tries the newest one",
    "megatron-energon": "`.ci/run`",
    "transformers": "`make test` with the first version, `make test-transformers` with the last one",
    "transformer-engine": TESTS_ON_GPUS,
    "flash-attn-4": f"{TESTS_ON_GPUS}; a run compares its gradients with float32 when it starts",
}
"""What runs with each package that decides about numbers."""
GPUS = {
    "none: CPU, two cores": "all of `.ci/run`, with gloo",
    "H200": f"{TESTS_ON_GPUS}, on one, two and four; all published speeds without another name",
    "H100": "parity, LoRA and moments, on two; FlashAttention-4",
    "RTX 4090, L40S, A100, B200": "nothing; `plan` assumes the shares of the peak that an H200 reaches",
}


def supported_versions() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    allowed = {"Python": project["requires-python"], **dict(map(_requirement, required))}
    tested = tested_versions()

    lines = ["## Supported versions\n", "| package | allowed | tested | by |", "|---|---|---|---|"]
    lines += [f"| {name} | {allowed[name]} | {tested[name]} | {by} |" for name, by in TESTED_BY.items()]
    lines += ["\nAny allowed version may work. Only the tested ones are supported.\n"]
    lines += [
        "| GPU | what has run on it |",
        "|---|---|",
        *(f"| {gpu} | {ran} |" for gpu, ran in GPUS.items()),
    ]
    return "\n".join(lines)


def tested_versions() -> dict[str, str]:
    """Package -> the version that the tests install, from ``constraints.txt`` and the exact requirements.

    ``make test-transformers`` adds its own version of transformers to the pinned one.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    exact = dict(map(_requirement, project["optional-dependencies"]["gpu"]))
    tested = {name: version[2:] for name, version in exact.items() if version.startswith("==")}
    tested |= dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    tested["Python"] = (ROOT / ".python-version").read_text().strip()
    (newest,) = re.findall(r"NEWEST.*/transformers-([\d.]+)", (ROOT / "Makefile").read_text())
    tested["transformers"] += f", {newest}"
    return tested


def _requirement(text: str) -> tuple[str, str]:
    """``name[extra]>=1,<2`` -> ``name``, ``>=1,<2``; "any" where no version is named."""
    ((name, version),) = re.findall(r"^([\w-]+)(?:\[[\w,]+\])?(.*)", text)
    return name, version or "any"


# --- Long rows ----------------------------------------------------------------------------------------------

LONG_ROW_MODELS = (
    "Qwen2.5-VL-7B-Instruct",
    "Qwen3-VL-8B-Instruct",
    "Qwen3-VL-30B-A3B-Instruct",
    "Qwen3.5-9B",
    "Qwen3.5-27B",
    "Qwen3.5-35B-A3B",
)
LONG_ROW_GPUS = 8
LONG_ROWS = (32_768, 65_536, 131_072, 262_144, 1_048_576)
LONG_ROW_RECOMPUTE = {
    "none": RecomputeConfig(vision="full"),
    "activation": RecomputeConfig("selective", ["activation"], vision="full"),
    "full": RecomputeConfig("full", vision="full"),
    "full, inputs in host memory": RecomputeConfig("full", vision="full", offload_inputs=True),
}


def long_row_layouts() -> str:
    parts = []
    for model in LONG_ROW_MODELS:
        spec = released_spec(model)
        head = (
            "| tokens of a row | TP | CP | recompute | GiB a GPU | GiB on the host | MFU | tokens/s a GPU |"
        )
        parts += [f"## {model}\n", head, "|---|---|---|---|---|---|---|---|"]
        parts += [long_row_line(spec, seq_len) for seq_len in LONG_ROWS]
        parts.append("")
    return "\n".join(parts)


def long_row_line(spec: ModelSpec, seq_len: int) -> str:
    """The table's line for rows of ``seq_len`` tokens: the fastest layout that fits, or the smallest one."""
    predictions = long_row_predictions(spec, seq_len)
    fitting = [(recompute, run) for recompute, run in predictions if run.fits_memory]
    if not fitting:
        recompute, run = min(predictions, key=lambda each: each[1].peak_gib)
        smallest = f"TP {run.layout.tp}, CP {run.layout.cp}, {recompute}"
        return f"| {seq_len:,} | | | none fits; the smallest is {smallest} | {run.peak_gib:.0f} | | | |"

    recompute, run = max(fitting, key=lambda each: each[1].tokens_per_second)
    host_gib = LONG_ROW_GPUS * max(stage.host_gib for stage in run.stages)
    tokens = run.tokens_per_second / LONG_ROW_GPUS
    cells = [
        f"{seq_len:,}",
        run.layout.tp,
        run.layout.cp,
        recompute,
        f"{run.peak_gib:.0f}",
        f"{host_gib:.0f}",
    ]
    cells += [f"{100 * run.mfu:.1f} %", f"{tokens:,.0f}"]
    return f"| {' | '.join(map(str, cells))} |"


def long_row_predictions(spec: ModelSpec, seq_len: int) -> list[tuple[str, RunPrediction]]:
    """The name of the recompute and the prediction of each possible layout of eight GPUs."""
    run = TrainConfig(dtype="bfloat16")
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, seq_len=seq_len))
    ep = LONG_ROW_GPUS if spec.language.moe is not None else 1

    predictions = []
    for tp, cp in itertools.product((1, 2, 4, 8), repeat=2):
        if tp * cp > LONG_ROW_GPUS:
            continue
        parallel = ParallelConfig(tp=tp, cp=cp, ep=ep, sequence_parallel=tp > 1)
        # The rows of a step wait on the GPU: eight of a million tokens would take 25 GiB.
        rows = LONG_ROW_GPUS // (tp * cp) if seq_len >= 1 << 20 else LONG_ROW_GPUS
        step = dataclasses.replace(run, parallel=parallel, global_batch_size=rows)
        for name, recompute in LONG_ROW_RECOMPUTE.items():
            config = dataclasses.replace(step, recompute=recompute)
            try:
                layout = run_layout(config, spec, LONG_ROW_GPUS)
                predictions.append((name, predict_layout(config, spec, LONG_ROW_GPUS, layout)))
            except (LayoutError, RunConfigError):  # the heads do not divide
                break
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
GPU_PAGE_TRAININGS = {"LoRA": LoraConfig(rank=16), "full": LoraConfig()}
HOST_GIB_PER_GPU = 128.0


def gpus_for_models() -> str:
    gpus = [known_gpus()[name] for name in ("RTX 4090", "L40S", "H100", "H200")]
    names = [gpu.label if gpu.is_measured else f"{gpu.label}, not measured" for gpu in gpus]
    parts = []
    for model in GPU_PAGE_MODELS:
        spec = released_spec(model)
        parts += [f"## {model}\n", f"| training | GPUs | {' | '.join(names)} |", "|---|---|---|---|---|---|"]
        for training, count in itertools.product(GPU_PAGE_TRAININGS, (1, 2, 4, 8)):
            cells = [gpu_cell(spec, training, count, gpu) for gpu in gpus]
            parts.append(f"| {training} | {count} | {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def gpu_cell(spec: ModelSpec, training: str, count: int, gpu: Gpu) -> str:
    """Tokens a second of the fastest layout; empty if none fits."""
    config = TrainConfig(global_batch_size=8 * count, lora=GPU_PAGE_TRAININGS[training])
    found = search_layouts(SearchRequest(config, spec, count, gpu, HOST_GIB_PER_GPU, result_count=1))
    return f"{found[0].tokens_per_second:,.0f}" if found else ""


def released_spec(model: str) -> ModelSpec:
    return read_spec(ROOT / "tests" / "hf_configs" / f"{model}.json")


# --- The pages ----------------------------------------------------------------------------------------------

CARDS = ROOT / "docs" / "families" / "cards"
"""Files of `benchmarks.card`: ``PAGE.json``, or ``PAGE-ANYTHING.json`` where a page has several."""
MARK = "<!-- `make pages` writes what follows. -->\n\n"
WRITTEN: dict[str, Callable[[], str]] = {
    "support-matrix.md": matrix.markdown,
    "releases.md": supported_versions,
    "long-context.md": long_row_layouts,
    "which-gpu.md": gpus_for_models,
}
"""Page below docs/ -> the part of its file that the code decides."""
ADDED = {"reference/run.md": run_reference, "reference/commands.md": commands_reference}
"""Page below docs/ -> the part that only the site has."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs' hook."""
    address = page.file.src_uri
    if address in ADDED:
        return f"{markdown}\n{ADDED[address]()}"
    if address.startswith("families/"):
        return "\n".join([markdown, *family_cards(Path(address).stem)])
    return markdown


def family_cards(page: str) -> list[str]:
    """The cards of ``families/PAGE.md``."""
    files = [*CARDS.glob(f"{page}.json"), *sorted(CARDS.glob(f"{page}-*.json"))]
    return [card_section(json.loads(file.read_text())) for file in files]


def write_pages() -> None:
    for name, write in WRITTEN.items():
        page = ROOT / "docs" / name
        introduction = page.read_text().partition(MARK)[0]
        page.write_text(f"{introduction}{MARK}{write().strip()}\n")


if __name__ == "__main__":
    write_pages()
