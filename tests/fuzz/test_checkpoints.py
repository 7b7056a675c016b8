"""Damages Megatron checkpoints in many ways and reads them.

Those are unsplit weights, shards, and folders of runs of one and of four ranks. Each is merged and exported
as the command does and, of runs, resumed with the trainer's own function. What comes out must be, bit for
bit, what the undamaged checkpoint gives, or a refusal that names the damaged file, tensor or field.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from converters.convert import convert_weights
from megatron_vl.config import parse_config
from megatron_vl.spec.tensors import Sharding
from megatron_vl.system.json_files import manifest_digest
from megatron_vl.weights.manifest import MANIFEST_FILE
from megatron_vl.weights.run_folder import find_latest_checkpoint
from megatron_vl.weights.tensor_files import WeightsError, read_safetensors_header
from megatron_vl.weights.weight_reader import WeightReader
from tests.fuzz.mutations import cut, edited, extended, flipped, noise, zeroed
from tests.support.ranks import call
from tests.support.tiny_run import environment, options_of, prepare
from toolkit.cli import main as command
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint

CHECKPOINTS = ("full", "shards", "run", "run_of_four")
DECIDED = ("kind", "family", "layout", "tensors", "files", "format", "version")
"""Fields of a manifest that the config, files and hashes determine."""


# --- What is damaged ----------------------------------------------------------------------------------------


def replace(path: Path, data: bytes) -> None:
    """New content under a name that may be a hard link to the undamaged file."""
    path.unlink()
    path.write_bytes(data)


class Mutator:
    """Damages of a folder. Each returns what a refusal may name, or None if it cannot be done here."""

    def __init__(self, folder: Path, random: Random) -> None:
        self.folder, self.random = folder, random
        self.files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        self.tensors = [path for path in self.files if path.suffix == ".safetensors"]
        self.json = [path for path in self.files if path.suffix == ".json"]

    def damage(self) -> set[str]:
        kinds = [self.change_bytes] * 5 + [self.edit] * 2
        kinds += [self.signed_edit, self.delete, self.swap, *[self.header] * 2, *[self.older] * 2]
        names = None
        while not names:
            kind = self.random.choice(kinds)
            names = kind()
        note(f"{kind.__name__}: {', '.join(names)}")
        return {part for name in names for part in (name, Path(name).name)}

    def pick(self) -> Path:
        """Small files are drawn as often as large ones; half of the time it is a JSON file."""
        return self.random.choice(self.random.choice([self.files, self.json]))

    def name(self, path: Path) -> str:
        return str(path.relative_to(self.folder))

    def change_bytes(self) -> list[str]:
        path = self.pick()
        change = self.random.choice([flipped, cut, extended, noise, zeroed])
        note(change.__name__)
        replace(path, change(path.read_bytes(), self.random))
        return [self.name(path)]

    def delete(self) -> list[str]:
        path = self.pick()
        path.unlink()
        return [self.name(path)]

    def swap(self) -> list[str] | None:
        """Two files of one kind exchange their content."""
        a = self.pick()
        others = [path for path in self.files if path != a and path.suffix == a.suffix]
        if not others:
            return None
        b = self.random.choice(others)
        first, second = a.read_bytes(), b.read_bytes()
        replace(a, second)
        replace(b, first)
        return [self.name(a), self.name(b), *self.described_by(a)]

    def header(self) -> list[str] | None:
        """A field of one tensor in a header, which is then written anew in whatever length it has; or two
        tensors of one shape and type exchange their names: every length still fits."""
        path = self.random.choice(self.tensors)
        old = read_safetensors_header(path)
        entries = json.loads(old[8:])
        names = [name for name in entries if name != "__metadata__"]
        changed = [name := self.random.choice(names)]
        entry, shape = entries[name], entries[name]["shape"]
        change = self.random.choice(
            ["dtype", "shape", "offsets", "drop", "name", "metadata", *["exchange"] * 5]
        )
        if change == "exchange":
            alike = [n for n in names if all(entries[n][key] == entry[key] for key in ("dtype", "shape"))]
            changed.append(other := self.random.choice(alike))
            if other == name:
                return None
            entries[name], entries[other] = entries[other], entry
        elif change == "dtype":
            entry["dtype"] = self.random.choice(["F32", "BF16", "F16", "I32", "I64", "F4", "U8"])
        elif change == "shape":
            shapes = [[1, *shape], shape[:-1], [n + 1 for n in shape], shape[::-1]]
            entry["shape"] = self.random.choice(shapes)
        elif change == "offsets":
            entry["data_offsets"][self.random.randrange(2)] += self.random.choice([-4, 4, 1, 1 << 40])
        elif change == "metadata":
            entries["__metadata__"] = {"tp": str(self.random.randrange(9)), "format": "tf"}
        else:
            del entries[name]
            entries |= {name + "x": entry} if change == "name" else {}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        replace(path, len(text).to_bytes(8, "little") + text + path.read_bytes()[len(old) :])
        return [self.name(path), *changed]

    def edit(self) -> list[str] | None:
        """Changes one value in a JSON file; what a run says about itself has most to lose."""
        own = [path for path in self.json if path.name == "run.json"]
        path = self.random.choice(self.random.choice([own or self.json, self.json]))
        content, where = edited(json.loads(path.read_text()), self.random)
        replace(path, json.dumps(content).encode())
        return [self.name(path), *map(str, where)]

    def signed_edit(self) -> list[str] | None:
        """Edits a manifest and makes its digest fit."""
        path = self.random.choice([path for path in self.json if path.name == MANIFEST_FILE])
        content = json.loads(path.read_text())
        key = self.random.choice([key for key in DECIDED if key in content])
        value, where = edited({key: content.pop(key)}, self.random)
        content |= value if isinstance(value, dict) else {}
        content["digest"] = manifest_digest(content)
        replace(path, json.dumps(content).encode())
        return [self.name(path), key, *map(str, where)]

    def older(self) -> list[str] | None:
        """A file of the newest step, or all its weights, optimizer or loader, as the step before has them."""
        steps = sorted(self.folder.glob("step_*"))
        if len(steps) < 2:
            return None
        older_step, newest = steps[-2:]
        if self.random.random() < 0.5:
            part = self.random.choice(["weights", "optimizer", "loader"])
            files = [self.name(path) for path in (newest / part).iterdir()]
            shutil.rmtree(newest / part)
            shutil.copytree(older_step / part, newest / part, copy_function=os.link)
            return [part, *files]
        path = self.random.choice([path for path in self.files if newest in path.parents])
        data = (older_step / path.relative_to(newest)).read_bytes()
        if data == path.read_bytes():
            return None
        replace(path, data)
        return [self.name(path), MANIFEST_FILE, *self.described_by(path)]

    def described_by(self, path: Path) -> list[str]:
        """If a description is another step's, either it or a file that it describes may be named."""
        described = path.name in ("run.json", MANIFEST_FILE)
        return [self.name(file) for file in self.files if described and path.parent in file.parents]


# --- What reads it ------------------------------------------------------------------------------------------


class Refused(Exception):
    """The message of a refusal."""


class Bench:
    """The undamaged checkpoints, a built run to resume into, and what they give."""

    def __init__(self, folder: Path, checkpoints: tuple[str, ...] = CHECKPOINTS) -> None:
        self.folder = folder
        self.hf = write_tiny_checkpoint(folder / "hf", "qwen2_5_vl", tied=True, dtype=torch.float32)
        convert_weights(self.hf, folder / "full", workers=1)
        convert_weights(self.hf, folder / "shards", {"tp": 2, "pp": 2}, workers=1)
        with contextlib.redirect_stdout(io.StringIO()):
            self.run = self._trained("run_of_four" in checkpoints)
        self.good = {
            (name, action): work(folder / name)
            for name in checkpoints
            for action, work in self.actions(name).items()
        }

    def actions(self, checkpoint: str) -> dict[str, Callable[[Path], str]]:
        actions = {"merge": self.merge, "export": self.export, "load": self.load}
        return actions | {"resume": self.resume} if checkpoint.startswith("run") else actions

    def _trained(self, with_four_ranks: bool) -> Any:
        """Runs of two steps with a checkpoint after each, on one rank and on four. Returns the former."""
        from megatron_vl.parallel.start import join_ranks
        from megatron_vl.train import train
        from megatron_vl.training.resolve import resolve_run
        from megatron_vl.training.trainer import Trainer

        prepared = prepare(self.folder / "prepared", self.hf, 12) | {"weights": self.folder / "full"}
        more = "--data.num_workers 0 --global_batch_size 1 --optimizer.warmup_steps 0"
        more = [*more.split(), "--checkpoint.interval", "1"]
        if with_four_ranks:
            words = options_of(prepared, self.folder / "run_of_four", *more, steps=2)
            words += ["--parallel.tp", "2", "--parallel.pp", "2"]
            launch = "-m megatron_vl.launch --standalone --nproc-per-node 4 -m megatron_vl.train".split()
            subprocess.run([sys.executable, *launch, *words], env=environment(), check=True, stdout=2)
        config = parse_config(options_of(prepared, self.folder / "run", *more, steps=2))
        train(config)
        trainer = Trainer(resolve_run(config, 1), join_ranks(config))
        trainer.build()
        trainer.restore()
        return trainer

    def merge(self, checkpoint: Path) -> str:
        return self._command("merge", "--checkpoint", checkpoint)

    def export(self, checkpoint: Path) -> str:
        return self._command("export", "--checkpoint", checkpoint, "--hf", self.hf)

    def _command(self, *words: Any) -> str:
        out = self.folder / "out"
        error = io.StringIO()
        shutil.rmtree(out, ignore_errors=True)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
            code = command([*map(str, words), "--out", str(out)])
        if code:
            assert not [*out.glob("*")], "refused, but something was left"
            raise Refused(error.getvalue())
        digest = hashlib.sha256()
        for path in sorted(out.rglob("*")):
            if path.is_file():
                digest.update(str(path.relative_to(out)).encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()

    def load(self, checkpoint: Path) -> str:
        """Weights as a new run with TP 2 reads them."""
        digest = hashlib.sha256()
        try:
            reader = WeightReader(checkpoint)
            for name in reader.tensor_names():
                for rank in range(2):
                    digest.update(reader.read_shard(name, rank, Sharding(2)).numpy().tobytes())
        except (WeightsError, FileNotFoundError) as error:
            raise Refused(str(error)) from error
        return digest.hexdigest()

    def resume(self, checkpoint: Path) -> str:
        """Resumes with the trainer's own function into a model and optimizer full of other numbers."""
        from megatron_vl.training.state import load as saved
        from megatron_vl.training.state.optimizer_state import optimizer_slices

        run, parameters = self.run, self.run.saved_tensors
        torch.manual_seed(0)
        with torch.no_grad():
            for live in parameters:
                live.parameter.fill_(7)
            for piece in optimizer_slices(run.optimizer, parameters):
                piece.main_param.fill_(7)
                for key, value in piece.adam_state.items():
                    piece.adam_state[key] = torch.full_like(value, 7)

        try:
            newest = find_latest_checkpoint(checkpoint)
            if newest is None:
                raise Refused("None: the run would start anew")
            metadata, loader = saved.load_checkpoint(
                newest.path, live_tensors=parameters, optimizer=run.optimizer, spec=run.spec, grid=run.grid
            )
        except (saved.CheckpointError, WeightsError, FileNotFoundError) as error:
            raise Refused(str(error)) from error

        state = [newest.step, loader, metadata.get("bad_samples")]
        digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
        digest.update(torch.get_rng_state().numpy().tobytes())
        for name, parameter, _ in parameters:
            digest.update(name.encode() + parameter.detach().numpy().tobytes())
        for piece in optimizer_slices(run.optimizer, parameters):
            for key in sorted(piece.adam_state):
                digest.update(key.encode() + torch.as_tensor(piece.adam_state[key]).numpy().tobytes())
            digest.update(piece.main_param.detach().numpy().tobytes())
        return digest.hexdigest()


# --- Rounds -------------------------------------------------------------------------------------------------


def read_damaged(bench: Bench, name: str, random: Random) -> dict[str, str]:
    """Damages a copy of a checkpoint and reads it in all ways. Returns ``same`` or ``refused`` by action."""
    copy = bench.folder / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(bench.folder / name, copy, copy_function=os.link)
    names = Mutator(copy, random).damage()
    outcomes = {}
    for action, work in bench.actions(name).items():
        try:
            assert work(copy) == bench.good[name, action], f"{action}: not what the undamaged one gives"
            outcomes[action] = "same"
        except Refused as refusal:
            assert any(part in str(refusal) for part in names), f"{action} does not name it: {refusal}"
            outcomes[action] = "refused"
    return outcomes


def count_outcomes(folder: str, count: int) -> dict[str, int]:
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    bench = Bench(Path(folder))

    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
    @given(st.sampled_from(CHECKPOINTS), st.randoms())
    def damage_is_refused_by_name_or_does_not_matter(name: str, random: Random) -> None:
        outcomes.update(" ".join(each) for each in read_damaged(bench, name, random).items())

    damage_is_refused_by_name_or_does_not_matter()
    return outcomes


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.xfail(reason="merge and export read a step without run.json as plain weights", strict=False)
def test_damaged_checkpoint_is_refused_by_name_or_unharmed(tmp_path: Path) -> None:
    """In a process of its own: the trainer's CPU platform changes torch for the rest of it."""
    counts = call(count_outcomes, folder=str(tmp_path), count=500, timeout_s=3000)
    # Both must occur: damage that nothing sees would mean that nothing looks.
    for action in ("merge", "export", "load", "resume"):
        assert counts[f"{action} refused"] > 5 and counts[f"{action} same"] > 5
