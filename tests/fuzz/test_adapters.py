"""Random adapters of PEFT, with targets and patterns of every kind, which may contradict each other.

Merged here, they give the model that PEFT trained, or a refusal that is due; exported again, the same.
"""

import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from converters.convert import convert_adapter, export_adapter, export_weights
from converters.hf_checkpoint import short_tensor_name
from converters.peft_folder import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    KEY_PREFIX,
    is_expert_stack,
    released_matrices,
)
from megatron_vl.spec.families import read_spec
from megatron_vl.weights.tensor_files import WeightsError
from tests.converters.helpers import read_tensors
from tests.converters.peft_models import FAMILIES, merged_by_peft, peft_model
from tests.converters.test_lora import float_checkpoint, released

SETTINGS = ("rank_pattern", "alpha_pattern")


def random_settings(rng: Random, names: list[str], stacks: list[str]) -> dict[str, Any]:
    """The settings of an adapter of some of these modules, and of some stacks of experts."""
    settings: dict[str, Any] = {
        "r": rng.randint(1, 6),
        "lora_alpha": rng.choice([1, 6, 7, 16, 2.5]),
        "use_rslora": rng.random() < 0.3,
    }
    chosen = rng.sample(names, rng.randint(1, 6))
    match rng.choice(["ends", "whole", "regex"]):
        case "ends":
            settings["target_modules"] = sorted({".".join(name.split(".")[-2:]) for name in chosen})
            if rng.random() < 0.5 and any(".layers.0." in name for name in chosen):
                settings["layers_to_transform"] = rng.choice([0, [0], [0, 1]])
        case "whole":
            settings["target_modules"] = chosen
        case "regex":
            settings["target_modules"] = "|".join(
                rf".*{re.escape(name.split('.', 2)[-1])}" for name in chosen
            )
    if stacks and rng.random() < 0.5:
        settings["target_parameters"] = sorted({stack.rpartition(".")[2] for stack in rng.sample(stacks, 1)})
    for setting, values in zip(SETTINGS, ([1, 2, 3, 5], [1, 4, 16, 60]), strict=True):
        entries = [random_pattern(rng, rng.choice([*chosen, *names])) for _ in range(rng.randint(0, 3))]
        settings[setting] = {entry: rng.choice(values) for entry in entries}
    if rng.random() < 0.05:
        settings["alpha_pattern"]["no_such_proj"] = 3
    return settings


def random_pattern(rng: Random, name: str) -> str:
    words = name.split(".")
    number = next((word for word in words if word.isdigit()), "0")
    return rng.choice(
        [words[-1], ".".join(words[-2:]), name, re.escape(name), rf".*\.[{number}3]\..*{words[-1]}"]
    )


def values_of(patterns: dict[str, Any], name: str) -> set[Any]:
    return {value for entry, value in patterns.items() if re.match(rf"(.*\.)?({entry})$", name)}


def due_refusal(settings: dict[str, Any], adapted: set[str], names: list[str]) -> str:
    """What a refusal must say; empty if the adapter must be read."""
    for setting in SETTINGS:
        for entry in settings[setting]:
            if not any(values_of({entry: 0}, name) for name in names):
                return f"{setting} {entry!r} matches no matrix"
    has_two = any(len(values_of(settings[setting], name)) > 1 for setting in SETTINGS for name in adapted)
    return "values for" if has_two else ""


def with_old_names(folder: Path) -> None:
    """Renames tensors and patterns as transformers before 4.52 has them."""
    tensors = {}
    for key, tensor in load_file(folder / ADAPTER_FILE).items():
        tensors[KEY_PREFIX + short_tensor_name(key.removeprefix(KEY_PREFIX))] = tensor
    save_file(tensors, folder / ADAPTER_FILE, {"format": "pt"})
    config = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())
    for setting in SETTINGS:
        config[setting] = {short_tensor_name(entry): value for entry, value in config[setting].items()}
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config))


def outcome_of_adapter(rng: Random, folder: Path) -> str:
    """Makes one adapter and compares. Returns what became of it."""
    family = rng.choice(FAMILIES)
    hf = float_checkpoint(family)
    every_name = list(released_matrices(read_spec(hf)))
    stacks = [name for name in every_name if is_expert_stack(name)]
    names = [name for name in every_name if name not in stacks]
    adapter = random_settings(rng, names, stacks)

    model = peft_model(hf, rng.randrange(1000), **adapter)
    model.save_pretrained(folder / "peft")
    # PEFT's module names are those of the factors; a stack's are told by its setting.
    inner_names = {name for name, _ in model.base_model.model.named_modules()}
    adapted = {name for name in names if f"{name}.lora_A" in inner_names}
    for parameter in adapter.get("target_parameters", ()):
        adapted |= {stack for stack in stacks if stack.endswith(f".{parameter}")}
    expected = model.merge_and_unload().state_dict()
    expected_refusal = due_refusal(adapter, adapted, every_name)
    kind = family
    if family in ("qwen2_vl", "qwen2_5_vl") and rng.random() < 0.5:
        with_old_names(folder / "peft")
        kind = f"{family}, old names"

    try:
        export_weights(folder / "peft", hf, folder / "merged", merges_adapter=True)
    except WeightsError as error:
        assert expected_refusal and expected_refusal in str(error), f"{adapter}: {error}"
        return expected_refusal.split()[0]
    assert not expected_refusal, f"{adapter}: not refused, although {expected_refusal}"
    merged = released(read_tensors(folder / "merged"), family)
    convert_adapter(folder / "peft", hf, folder / "weights", {"tp": 2})
    export_adapter(folder / "weights", hf, folder / "again")
    again = merged_by_peft(hf, folder / "again")
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5, msg=f"{name}: {adapter}")
        torch.testing.assert_close(again[name], expected[name], rtol=0, atol=1e-5, msg=f"{name}: {adapter}")
    return kind


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.full)])
def test_random_adapters_are_merged_as_peft_does(count: int) -> None:
    outcomes: Counter[str] = Counter()

    @settings(max_examples=count, suppress_health_check=[*HealthCheck])
    @given(st.randoms(use_true_random=True))
    def is_merged_as_peft_does(rng: Random) -> None:
        with tempfile.TemporaryDirectory() as folder:
            outcomes[outcome_of_adapter(rng, Path(folder))] += 1

    is_merged_as_peft_does()
    assert len(outcomes) > 2 or count < 200
