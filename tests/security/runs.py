"""Sends hostile versions of a real run's checkpoint through merge, export, load and resume;
prints the outcomes.

It needs its own process, because the trainer's CPU platform changes torch globally.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_vl.system.json_files import manifest_digest
from megatron_vl.weights.manifest import MANIFEST_FILE
from tests.fuzz.checkpoints import Bench, Refused
from tests.security.payload import Mark


def signed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edits a description and makes its digest fit, as anybody can."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content | {"digest": manifest_digest(content)}))


def replaced(step: Path, name: str, data: bytes) -> None:
    """Replaces the content of a file of ``run.json`` and makes its hash fit."""
    (step / name).unlink()
    (step / name).write_bytes(data)
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    signed(step / "run.json", lambda saved: saved["files"].update({name: facts}))


def renamed(step: Path, old: str, new: str) -> None:
    """Renames a file of ``run.json``; the file exists and its hash is right."""
    target = step / new
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(step / old, target)
    signed(step / "run.json", lambda saved: saved["files"].update({new: saved["files"].pop(old)}))


def pickles(step: Path, mark: Mark) -> None:
    """Puts pickles wherever Megatron-core, torch and Energon would look for theirs."""
    names = "optimizer/.metadata optimizer/__0_0.distcp optimizer/common.pt optimizer/rank_00000.pt .metadata"
    names += " loader/dp_00000.pkl loader/dp_00000.pt rng.pth run.pkl weights/model.pt weights/tp00_pp00.bin"
    names += " ../latest.pkl ../latest_checkpointed_iteration.txt common.pt metadata.json.pkl"
    for name in names.split():
        (step / name).write_bytes(mark.pickle())

    mark.torch(step / "optimizer" / "optim.pt")


def manifest_name(step: Path, name: str) -> None:
    file = next(iter(json.loads((step / "weights" / MANIFEST_FILE).read_text())["files"]))
    target = step / "weights" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(step / "weights" / file, target)
    signed(
        step / "weights" / MANIFEST_FILE,
        lambda content: content["files"].update({name: content["files"].pop(file)}),
    )


def hostile(mark: Mark, elsewhere: Path) -> dict[str, Callable[[Path], None]]:
    """Maps each name to what is done to the latest step's folder."""
    state, loader = "optimizer/rank_00000.safetensors", "loader/dp_00000.json"
    mark.torch(elsewhere / "payload.pt")
    payload = (elsewhere / "payload.pt").read_bytes()
    return {
        "pickles beside": lambda step: pickles(step, mark),
        "optimizer is a pickle": lambda step: replaced(step, state, payload),
        "loader is a pickle": lambda step: replaced(step, loader, mark.pickle()),
        "optimizer above": lambda step: renamed(step, state, "optimizer/../../rank_00000.safetensors"),
        "optimizer absolute": lambda step: renamed(step, state, str(elsewhere / "rank_00000.safetensors")),
        "optimizer of another kind": lambda step: renamed(step, state, "optimizer/rank_00000.pt"),
        "loader above": lambda step: renamed(step, loader, "../dp_00000.json"),
        "weights above": lambda step: manifest_name(step, "../weights.safetensors"),
        "weights absolute": lambda step: manifest_name(step, str(elsewhere / "w.safetensors")),
        "weights of another kind": lambda step: manifest_name(step, "tp00_pp00.bin"),
        "layers without end": lambda step: signed(
            step / "weights" / MANIFEST_FILE,
            lambda content: content["hf_config"].update(num_hidden_layers=10**12),
        ),
    }


def outcome(work: Callable[[Path], str], checkpoint: Path, good: str) -> str:
    try:
        return "same" if work(checkpoint) == good else "OTHER"
    except Refused as refusal:
        return f"refused: {refusal}"
    except ValueError as error:  # what the trainer's main prints without a traceback, too
        return f"refused: {type(error).__name__}: {error}"


def main(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        bench = Bench(folder, ("run",))
    mark = Mark(folder / "executed")
    found = {}
    for name, change in hostile(mark, elsewhere).items():
        copy = shutil.copytree(folder / "run", folder / "copies" / name.replace(" ", "_") / "run")
        change(copy / "step_00000002")
        found[name] = {
            action: outcome(work, copy, bench.good["run", action])
            for action, work in bench.actions("run").items()
        } | {"executed": mark.path.exists()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
