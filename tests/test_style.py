"""The style of product code: names that say what they hold, comments where a reader would ask why.

A file keeps within the limits below. ``tests/style.json`` lists the files that were beyond a limit when the
test was written, with their values: these may only get better. ``python -m tests.test_style`` writes the list
anew.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import json
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EXCEPTIONS_FILE = Path(__file__).with_name("style.json")
FOLDERS = ("megatron_vl", "converters", "data_tools", "toolkit")

MAX_ONE_WORD_SHARE = 0.55
"""Of the distinct names that a file binds."""
MIN_NAME_LENGTH = 8.5
"""Mean length of these names."""
MAX_NODES_PER_LINE = 9.2
"""Nodes of the syntax tree per line of code."""
MAX_COMPREHENSIONS = 3.0
"""Per 100 lines of code."""
SLACK = 0.05
"""A listed file may be worse than its listed value by this share. So one renamed variable does not fail."""
MIN_NAMES = 25
"""Files with fewer names say too little about style."""

MIN_COMMENTS = 5.0
"""Comments per 100 lines of the central functions."""
CENTRAL_FUNCTIONS = (
    "megatron_vl.training.step:run_schedule",
    "megatron_vl.training.step:train_step",
    "megatron_vl.training.step:forward_step",
    "megatron_vl.training.loop:run_steps",
    "megatron_vl.training.checkpoint:take_snapshot",
    "megatron_vl.training.checkpoint:load_checkpoint",
    "megatron_vl.training.optimizer_state:optimizer_slices",
    "megatron_vl.training.optimizer_state:snapshot_optimizer",
    "megatron_vl.models.vision_language:VisionLanguageModel.forward",
    "megatron_vl.models.vision:VisionTower.forward",
    "megatron_vl.models.attention:PackedAttention.forward",
    "megatron_vl.models.gated_delta_net:GatedDeltaNet.forward",
    "megatron_vl.models.layer_specs:transformer_block_spec",
    "megatron_vl.models.moe.dispatch:OncePerRankDispatcher.dispatch_preprocess",
    "megatron_vl.models.moe.dispatch:OncePerRankDispatcher.dispatch_postprocess",
    "megatron_vl.models.moe.experts:GroupedExperts.forward",
    "megatron_vl.models.decoupled:DecoupledTower.encode",
    "megatron_vl.models.decoupled:DecoupledTower.forward",
    "megatron_vl.models.decoupled:DecoupledTower.backward",
    "megatron_vl.data.packing.plan_rows:plan_rows",
    "megatron_vl.data.packing.fill_row:choose_row_samples",
    "megatron_vl.data.packing.assemble_row:pack_row",
    "megatron_vl.data.planned_rows:BatchPlanner.next_batch",
    "megatron_vl.data.planned_rows:plan_shares",
    "megatron_vl.data.row_loader:RowLoader.__next__",
    "megatron_vl.data.source.sample_order:SampleOrder.sample_indices",
    "megatron_vl.data.sample.chat:ChatEncoder.encode",
    "megatron_vl.spec.layout:make_layout",
    "megatron_vl.spec.positions:mrope_positions",
    "converters.convert:export_weights",
    "converters.rules:rules_from_entries",
    "converters.copy_jobs:run_copy_tasks",
    "converters.compare:compare_weights",
    "megatron_vl.weights.weight_reader:WeightReader.read_shard",
    "megatron_vl.weights.manifest:write_manifest",
    "megatron_vl.weights.matrix_blocks:gather_region",
    "data_tools.convert:convert_dataset",
    "toolkit.train.command:train",
    "toolkit.parity.worker:run_case",
)
"""The functions that a newcomer reads first, as ``module:qualified name``."""


def product_files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def style_values(source: str) -> dict[str, float]:
    """Each measure of a file; the larger, the worse."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))

    names = set()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    names -= {"self", "cls", "_"}
    if len(names) < MIN_NAMES:
        return {}

    code_lines = _code_line_count(source, nodes)
    comprehensions = sum(
        isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) for node in nodes
    )
    one_word_names = [name for name in names if not _has_several_words(name)]
    return {
        "one_word_share": len(one_word_names) / len(names),
        "missing_length": max(0.0, MIN_NAME_LENGTH - sum(map(len, names)) / len(names)),
        "nodes_per_line": len(nodes) / code_lines,
        "comprehensions": 100 * comprehensions / code_lines,
    }


def _has_several_words(name: str) -> bool:
    """Whether a name has an underscore or a capital letter inside."""
    inner = name.strip("_")
    return "_" in inner or (inner != inner.upper() and any(letter.isupper() for letter in inner[1:]))


def _code_line_count(source: str, nodes: list[ast.AST]) -> int:
    """Number of lines with a token other than a comment or a docstring."""
    docstring_lines: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstring_lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))

    layout_tokens = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    code_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*layout_tokens, tokenize.ENDMARKER):
            code_lines.update(range(token.start[0], token.end[0] + 1))
    return len(code_lines - docstring_lines)


LIMITS = {
    "one_word_share": MAX_ONE_WORD_SHARE,
    "missing_length": 0.0,
    "nodes_per_line": MAX_NODES_PER_LINE,
    "comprehensions": MAX_COMPREHENSIONS,
}


def values_beyond_limits() -> dict[str, dict[str, float]]:
    """For each file that is beyond a limit, the measures that are."""
    beyond = {}
    for path in product_files():
        values = style_values(path.read_text())
        worse = {name: round(value, 3) for name, value in values.items() if value > LIMITS[name]}
        if worse:
            beyond[str(path.relative_to(ROOT))] = worse
    return beyond


def test_no_file_gets_worse():
    exceptions: dict[str, dict[str, float]] = json.loads(EXCEPTIONS_FILE.read_text())
    problems = []
    for file_name, values in values_beyond_limits().items():
        for name, value in values.items():
            limit = exceptions.get(file_name, {}).get(name, LIMITS[name])
            if value > limit * (1 + SLACK):
                problems.append(f"{file_name}: {name} is {value}; it may be at most {limit}")
    assert not problems, "\n".join(problems)


def test_no_exception_is_left_that_no_file_needs():
    exceptions = json.loads(EXCEPTIONS_FILE.read_text())
    beyond = values_beyond_limits()
    assert not [name for name in exceptions if name not in beyond]


@pytest.mark.parametrize(
    "source, one_word_share",
    [("\n".join(f"name_{number} = 1" for number in range(30)), 0.0), ("a = b = c = 1", None)],
)
def test_names_with_several_words_are_told_apart(source: str, one_word_share: float | None):
    assert style_values(source).get("one_word_share") == one_word_share
    assert _has_several_words("StepVision")
    assert not _has_several_words("Step")
    assert not _has_several_words("ROWS")


def _resolve(location: str) -> Any:
    module_name, _, qualified_name = location.partition(":")
    target: Any = importlib.import_module(module_name)
    for name in qualified_name.split("."):
        target = inspect.getattr_static(target, name)
    return inspect.unwrap(getattr(target, "__func__", target))


def test_central_functions_have_comments():
    lines = comments = 0
    for location in CENTRAL_FUNCTIONS:
        source = inspect.getsource(_resolve(location))
        lines += source.count("\n")
        comments += sum(
            token.type == tokenize.COMMENT
            for token in tokenize.generate_tokens(io.StringIO(source.lstrip()).readline)
        )
    assert 100 * comments / lines >= MIN_COMMENTS


if __name__ == "__main__":
    # One line for each file, so that a change shows as one.
    listed = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in values_beyond_limits().items()]
    EXCEPTIONS_FILE.write_text("{\n" + ",\n".join(sorted(listed)) + "\n}\n")
