"""The support matrix of the documentation: family x feature, with the test that proves each cell.

The cells of layouts, rows and training come from the settings of the parity table (:mod:`.cases`); what
other tests prove is in :data:`PROOFS`. Nothing here imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from .cases import CASES, MOE, MOE35, Q2, Q3, Q25, Q35, QUICK

FAMILIES = {
    Q2: "Qwen2-VL",
    Q25: "Qwen2.5-VL",
    Q3: "Qwen3-VL",
    MOE: "Qwen3-VL with experts",
    Q35: "Qwen3.5",
    MOE35: "Qwen3.5 with experts",
}
PARITY = "tests/parity/test_parity.py::test_parity"


TEXT_ONLY = {"text", "short_text", "without_loss"}
"""Samples without images and videos."""


def settings(case: dict[str, Any]) -> set[tuple[str, str]]:
    """Rows differ by the kinds of samples in them, layer splits by their irregularities."""
    found = {
        (field, repr(value)) for field, value in case.items() if field not in ("name", "steps", "layers")
    }
    rows = [row for step in case["steps"] for row in step]
    kinds = {kind for row in rows for kind in row}
    found |= {("sample", kind) for kind in kinds}
    if kinds - TEXT_ONLY and any(set(row) <= TEXT_ONLY for row in rows):
        found.add(("rows", "with and without images"))
    if any(len(row) > 1 for row in rows):
        found.add(("rows", "packed"))
    if len(case["steps"]) > 1:
        found.add(("steps", "several"))

    layers = case.get("layers") or []
    if len(set(layers)) > 1:
        found.add(("layers", "uneven"))
    if 0 in layers:
        found.add(("layers", "an empty stage or chunk"))
    return found


@dataclass(frozen=True)
class Entry:
    ranks: int
    case: dict[str, Any]
    in_make_test: bool
    """Whether ``make test`` runs it; the others are in ``make test-full``."""

    @cached_property
    def settings(self) -> set[tuple[str, str]]:
        return settings(self.case)

    def value(self, field: str, default: Any = 1) -> Any:
        return self.case.get(field, default)

    @property
    def data_parallel(self) -> int:
        return self.ranks // (self.value("tp") * self.value("cp") * self.value("pp"))

    def freezes(self, *parts: str) -> bool:
        return set(self.value("freeze", [])) == set(parts)

    def recomputes(self, kind: str, *modules: str) -> bool:
        """Whether the language model's recompute is of this kind and covers all of these modules."""
        recompute = {"language_modules": ["core_attn"], "language": "none"} | self.value("recompute", {})
        return recompute["language"] == kind and set(modules) <= set(recompute["language_modules"])


Features = dict[str, Callable[[Entry], bool]]


def has(setting: str, *values: str) -> Callable[[Entry], bool]:
    return lambda entry: any((setting, value) in entry.settings for value in values)


LAYOUTS: Features = {
    "One rank": lambda entry: entry.ranks == 1,
    "Tensor parallel (TP)": lambda entry: entry.value("tp") > 1,
    "Sequence parallel": lambda entry: entry.value("sequence_parallel", False),
    "Pipeline parallel (PP)": lambda entry: entry.value("pp") > 1 and entry.value("vpp") == 1,
    "Interleaved pipeline (VPP)": lambda entry: entry.value("vpp") > 1,
    "Uneven split of the decoder layers": has("layers", "uneven"),
    "A stage or chunk without decoder layers": has("layers", "an empty stage or chunk"),
    "Data parallel (DP), distributed optimizer": lambda entry: (
        entry.data_parallel > 1 and entry.value("distributed_optimizer", True)
    ),
    "Data parallel, optimizer not distributed": lambda entry: (
        entry.data_parallel > 1 and not entry.value("distributed_optimizer", True)
    ),
    "Gradient reduce and parameter gather overlapped": lambda entry: (
        entry.data_parallel > 1 and entry.value("overlap", False)
    ),
    "TP, PP, VPP and sequence parallel together": lambda entry: (
        min(entry.value("tp"), entry.value("pp"), entry.value("vpp")) > 1
    ),
    "The tower on every rank (`vision.placement: decoupled`)": lambda entry: entry.value("decoupled", False),
    "Context parallel (CP)": lambda entry: entry.value("cp") > 1,
    "Expert parallel (EP)": lambda entry: entry.value("ep") > 1,
    "Expert tensor parallel (ETP)": lambda entry: entry.value("etp") > 1,
}

ROWS: Features = {
    "Text alone": has("sample", "text", "short_text"),
    "One image": has("sample", "image", "image_between"),
    "Several images": has("sample", "two_images", "mixed", "video_between"),
    "Video": has("sample", "video", "video_between", "mixed"),
    "Several samples packed into a row": has("rows", "packed"),
    "Rows with images beside rows without": has("rows", "with and without images"),
    "Samples without loss tokens": has("sample", "without_loss"),
}

TRAINING: Features = {
    "Whole trainings: losses, weights and moments": lambda entry: entry.value("train", False),
    "Tied embeddings": lambda entry: entry.value("tied", False),
    "Vision tower frozen": lambda entry: entry.freezes("vision"),
    "Vision tower and merger frozen": lambda entry: entry.freezes("vision", "merger"),
    "Language model frozen": lambda entry: entry.freezes("language"),
    "The merger trained alone": lambda entry: entry.freezes("vision", "language"),
    "Full recompute": lambda entry: entry.recomputes("full"),
    "Recompute of attention and MLP": lambda entry: entry.recomputes("selective", "core_attn", "mlp"),
    "Recompute of the MLP's activation": lambda entry: entry.recomputes("selective", "activation"),
}

SECTIONS: dict[str, Features] = {"Layouts": LAYOUTS, "Rows": ROWS, "Model and training": TRAINING}

BALANCING = "Load-balancing loss of the experts"
MTP = "Multi-token prediction: losses and gradients as of the serving engines' layer"
THINKING = "Requests and answers with thinking, worked out by hand"
EXPERTS_ALONE = ("Expert parallel (EP)", "Expert tensor parallel (ETP)", BALANCING)
"""Features that a dense model cannot have."""


@cache
def entries() -> tuple[Entry, ...]:
    return tuple(
        Entry(ranks, case, case["name"] in QUICK) for ranks, cases in CASES.items() for case in cases
    )


def proving(feature: Callable[[Entry], bool], family: str) -> list[Entry]:
    """Lists the cases that prove a cell: those of ``make test`` first, and those with few settings first."""
    found = [entry for entry in entries() if entry.case["family"] == family and feature(entry)]
    return sorted(found, key=lambda entry: (not entry.in_make_test, len(entry.settings), entry.ranks))


EVERY = (Q2, Q25, Q3, MOE, Q35, MOE35)
DENSE = (Q2, Q25, Q3)
GENERATING = (Q25, Q3, Q35)

PROOFS: dict[str, dict[str, tuple[str, ...]]] = {
    "Hugging Face → Megatron → Hugging Face, bit for bit, in many layouts": {
        "tests/converters/test_round_trip.py::test_round_trip_of_every_layout": EVERY
    },
    "Folders that `transformers` saved, both naming styles": {
        "tests/converters/test_round_trip.py::test_round_trip_of_save_pretrained": EVERY
    },
    "The YAML of every released size fits the model": {
        "tests/test_examples.py::test_yaml_fits_the_released_model": EVERY
    },
    "Rows as the checkpoint's own processor makes them": {
        "tests/data/test_loader.py::test_rows_equal_the_hf_processor": (*DENSE, Q35)
    },
    "M-RoPE positions": {
        "tests/data/test_assemble.py::test_mrope_positions_equal_get_rope_index": (*DENSE, Q35)
    },
    "Positions or text at videos as released, worked out by hand": {
        "tests/spec/test_video_positions.py::test_positions_are_those_worked_out_by_hand": (Q2, Q25),
        "tests/data/test_chat.py::test_video_prompt_written_by_hand": (Q3,),
        "tests/data/test_qwen3_5_prompts.py::test_tokens_and_positions_worked_out_by_hand": (Q35,),
    },
    "A resumed run equals the undisturbed one, bit for bit": {
        "tests/training/test_run.py::test_resumed_run_equals_the_undisturbed_one": (Q25,)
    },
    "A conversion that was killed goes on": {
        "tests/converters/test_restart.py::test_killed_conversion_gives_the_same_bytes": (Q25,)
    },
    "Killed runs equal the undisturbed one, bit for bit": {
        "tests/training/test_faults.py::test_run_killed_at_any_moment_is_the_undisturbed_one": (Q25,)
    },
    "Optimizer state in host memory: weights and moments are the same, bit for bit": {
        "tests/training/test_offload.py::test_run_in_bf16_saves_the_same": (Q25, MOE)
    },
    "A run goes on in another layout": {
        "tests/training/test_run.py::test_run_goes_on_in_another_layout": (Q25,),
        "tests/training/test_run_experts.py::test_run_goes_on_in_another_layout": (MOE,),
    },
    "The export of a trained checkpoint": {
        "tests/training/test_export_hf.py::test_run_exports_chosen_steps_and_trains_the_same": (Q25,),
        "tests/training/test_run_experts.py::test_exported_checkpoint_has_the_trained_experts": (MOE,),
    },
    "Validation loss and answers in a training": {
        "tests/training/test_run.py::test_validation_is_that_of_transformers_in_every_layout": (Q25,)
    },
    BALANCING: {
        "tests/models/moe/test_router.py::test_balancing_loss_of_one_layer_is_that_of_transformers": (MOE,)
    },
    MTP: {"tests/models/test_mtp.py::test_step_equals_the_reference": (Q35, MOE35)},
    THINKING: {
        "tests/data/test_thinking.py::test_thinking_prompt_written_by_hand": (Q35, MOE35),
        "tests/data/test_thinking.py::test_generated_answer_is_what_follows_the_thinking": (Q35, MOE35),
    },
    "`generate` answers as `transformers` does": {
        "tests/toolkit/test_generate.py::test_generate_equals_transformers_with_its_own_processor": GENERATING
    },
    "`evaluate` gives the model what its own processor makes of a video": {
        "tests/toolkit/test_evaluate.py::test_videos_are_encoded_as_by_the_checkpoints_processor": (
            *DENSE,
            Q35,
        )
    },
    "FLOPs of a training step as torch counts them": {
        "tests/estimate/test_flops.py::test_training_step_equals_counted": EVERY
    },
}


INTRODUCTION = f"""\
- A number counts the cases of the parity table that have the feature. In each of them, loss and gradients
  of a real group of processes on CPU equal those of `transformers`. [Below](#the-cases), each number has
  one of its cases by name.
- A check mark is another test, named in [the second table](#other-proofs).
- A dash says that no test covers this feature with a model of this family. Families share most of the
  code, so it may well work; nothing here claims it.
- A cell is empty where a family cannot have the feature.
- Layouts add numbers in different orders. Their losses differ in the last bits (of 24 tiny runs of three
  steps, 6 had exactly those of one rank), and so do those of full recompute. The rows of
  [other proofs](#other-proofs) say what is equal bit for bit.

The test of a case is `{PARITY}[RANKS-NAME]`. `make test` runs those that together hold
every setting, `make test-full` all {sum(map(len, CASES.values()))}.
"""


def markdown() -> str:
    parts = [INTRODUCTION]
    for title, features in SECTIONS.items():
        rows = [
            [name, *(_count(name, each, family) for family in FAMILIES)] for name, each in features.items()
        ]
        parts += [f"## {title}\n", _table(["", *FAMILIES.values()], rows)]

    rows = [[feature, *(_mark(feature, family) for family in FAMILIES)] for feature in PROOFS]
    parts += ["## Other proofs\n", _table(["", *FAMILIES.values()], rows)]
    rows = [[feature, "<br>".join(f"`{test}`" for test in tests)] for feature, tests in PROOFS.items()]
    parts += ["The tests:\n", _table(["", "Test"], rows)]

    parts += ["## The cases\n", "One case for each number above.\n"]
    for family, name in FAMILIES.items():
        parts += [f"### {name}\n", _table(["", "`RANKS-NAME`", "Run by"], _cases(family))]
    return "\n".join(parts)


def _possible(feature: str, family: str) -> bool:
    if feature in (THINKING, MTP):
        return family in (Q35, MOE35)
    return family in (MOE, MOE35) or feature not in EXPERTS_ALONE


def _count(name: str, feature: Callable[[Entry], bool], family: str) -> str:
    return str(len(proving(feature, family)) or "–") if _possible(name, family) else ""


def _mark(feature: str, family: str) -> str:
    is_proven = any(family in families for families in PROOFS[feature].values())
    return ("✓" if is_proven else "–") if _possible(feature, family) else ""


def _cases(family: str) -> list[list[str]]:
    rows = []
    for features in SECTIONS.values():
        for name, feature in features.items():
            found = proving(feature, family)
            if found:
                first, target = found[0], "make test" if found[0].in_make_test else "make test-full"
                rows.append([name, f"`{first.ranks}-{first.case['name']}`", f"`{target}`"])
    return rows


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
