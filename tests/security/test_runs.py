"""Untrusted checkpoints of runs: no pickle is opened, no name leaves its folder, no state names a class."""

import contextlib
import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_vl.data.state_json import LoaderStateError, state_from_json, state_to_json
from megatron_vl.system.json_files import manifest_digest
from megatron_vl.weights.manifest import MANIFEST_FILE
from tests.fuzz.test_checkpoints import Bench, Refused
from tests.security.payload import Mark
from tests.support.ranks import call

WEIGHTS, RESUME = ("merge", "export", "load", "resume"), ("resume",)
STATE, LOADER = "optimizer/rank_00000.safetensors", "loader/dp_00000.json"


def signed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edits a description and makes its digest fit, as anybody can."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content | {"digest": manifest_digest(content)}))


def replaced(step: Path, name: str, data: bytes) -> None:
    (step / name).unlink()
    (step / name).write_bytes(data)
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    signed(step / "run.json", lambda saved: saved["files"].update({name: facts}))


def renamed(folder: Path, description: str, old: str, new: str) -> None:
    """Renames a file of a description; the file exists and its hash is right."""
    target = folder / new
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / old, target)
    signed(folder / description, lambda saved: saved["files"].update({new: saved["files"].pop(old)}))


def weights_renamed(step: Path, new: str) -> None:
    [old, *_] = json.loads((step / "weights" / MANIFEST_FILE).read_text())["files"]
    renamed(step / "weights", MANIFEST_FILE, old, new)


def pickles(step: Path, mark: Mark) -> None:
    """Puts pickles wherever Megatron-core, torch and Energon would look for theirs."""
    names = "optimizer/.metadata optimizer/__0_0.distcp optimizer/common.pt optimizer/rank_00000.pt .metadata"
    names += " loader/dp_00000.pkl loader/dp_00000.pt rng.pth run.pkl weights/model.pt weights/tp00_pp00.bin"
    names += " ../latest.pkl ../latest_checkpointed_iteration.txt common.pt metadata.json.pkl"
    for name in names.split():
        (step / name).write_bytes(mark.pickle())
    mark.torch(step / "optimizer" / "optim.pt")


def without_end(step: Path, _: Mark) -> None:
    hf_config = {"num_hidden_layers": 10**12}
    signed(step / "weights" / MANIFEST_FILE, lambda content: content["hf_config"].update(hf_config))


def torch_pickle(step: Path, mark: Mark) -> None:
    mark.torch(step / "payload.pt")
    replaced(step, STATE, (step / "payload.pt").read_bytes())


def state_named(old: str, new: str) -> Callable[[Path, Mark], None]:
    return lambda step, mark: renamed(step, "run.json", old, new.format(elsewhere=mark.path.parent))


def weights_named(new: str) -> Callable[[Path, Mark], None]:
    return lambda step, mark: weights_renamed(step, new.format(elsewhere=mark.path.parent))


HOSTILE: dict[str, tuple[Callable[[Path, Mark], None], tuple[str, ...], str]] = {
    "pickles beside": (pickles, (), ""),
    "optimizer is a pickle": (torch_pickle, RESUME, "rank_00000.safetensors"),
    "loader is a pickle": (lambda step, mark: replaced(step, LOADER, mark.pickle()), RESUME, ""),
    "optimizer above": (state_named(STATE, "optimizer/../../a.safetensors"), RESUME, "not a file name"),
    "optimizer absolute": (state_named(STATE, "{elsewhere}/a.safetensors"), RESUME, "not a file name"),
    "optimizer of another kind": (state_named(STATE, "optimizer/rank_00000.pt"), RESUME, "not a file name"),
    "loader above": (state_named(LOADER, "../dp_00000.json"), RESUME, "not a file name"),
    "weights above": (weights_named("../weights.safetensors"), WEIGHTS, "not a file name"),
    "weights absolute": (weights_named("{elsewhere}/w.safetensors"), WEIGHTS, "not a file name"),
    "weights of another kind": (weights_named("tp00_pp00.bin"), WEIGHTS, "not a file name"),
    "layers without end": (without_end, WEIGHTS, "num_hidden_layers"),
}
"""Name -> what is done to the latest step's folder, the uses that must refuse it, part of their message."""


def outcomes_of(folder: str) -> dict[str, dict[str, Any]]:
    """What merge, export, load and resume make of each; apart, as the CPU platform changes torch globally."""
    root = Path(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        bench = Bench(root, ("run",))
    found = {}
    for name, (change, refusing, _) in HOSTILE.items():
        mark = Mark(root / "executed")
        copy = shutil.copytree(root / "run", root / "copies" / name.replace(" ", "_") / "run")
        change(copy / "step_00000002", mark)
        found[name] = {
            action: outcome(work, copy, bench.good["run", action])
            for action, work in bench.actions("run").items()
            if action in refusing or not refusing  # what is beside weights is read by nothing but a resume
        } | {"executed": mark.path.exists()}
    return found


def outcome(work: Callable[[Path], str], checkpoint: Path, good: str) -> str:
    try:
        return "same" if work(checkpoint) == good else "OTHER"
    except (Refused, ValueError) as refusal:  # which the trainer's main prints without a traceback, too
        return f"refused: {refusal}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, Any]]:
    return call(outcomes_of, folder=str(tmp_path_factory.mktemp("runs")))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_checkpoints_are_refused_or_read_without_harm(outcomes, kind):
    _, refusing, said = HOSTILE[kind]
    assert not outcomes[kind].pop("executed")
    for action, outcome in outcomes[kind].items():
        if action in refusing:
            assert outcome.startswith("refused: ") and said in outcome, (action, outcome)
        else:
            assert outcome == "same", (action, outcome)


@pytest.mark.parametrize(
    "value",
    [
        {"object": "Popen", "fields": {"args": ["true"]}},
        {"object": "os.system", "fields": {}},
        {"object": "__import__", "fields": {"name": "os"}},
        {"array": "AAAAAAAAAAA=", "dtype": "O", "shape": [1]},
        {"pickle": "gASVIAAA"},
    ],
    ids=["class", "function", "import", "objects", "pickle"],
)
def test_loader_state_names_no_class_of_its_own(value):
    assert state_from_json(state_to_json({"a": [1, [2.5, "x"]]})) == {"a": [1, [2.5, "x"]]}
    with pytest.raises((LoaderStateError, ValueError)):
        state_from_json(state_to_json({"a": 1})["dict"] + [value])
