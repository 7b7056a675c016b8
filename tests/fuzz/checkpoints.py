"""Damages Megatron checkpoints in many ways and reads them.

    python -m tests.fuzz.checkpoints --count 500

Four checkpoints are made: unsplit weights, shards, a run's folder as one rank saved it, and one as four ranks
would have. Each round copies one, damages it, then merges and exports it as the command does and, for runs,
resumes with the trainer's own function into a built model. What comes out must be, bit for bit, what the
undamaged checkpoint gives, or a refusal that names the damaged file, or the tensor or field in it. Anything
else is a fault, printed with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from converters.convert import convert_weights
from megatron_vl.config import parse_config
from megatron_vl.spec.layout import make_layout
from megatron_vl.spec.tensors import UNSHARDED, Sharding, tensor_table
from megatron_vl.system.json_files import manifest_digest
from megatron_vl.weights.manifest import MANIFEST_FILE, write_manifest, write_rank_file
from megatron_vl.weights.matrix_blocks import cut_shard
from megatron_vl.weights.run_folder import find_latest_checkpoint
from megatron_vl.weights.tensor_files import WeightsError, read_safetensors_header
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.cli import main as command
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint

CHECKPOINTS = ("full", "shards", "run", "run_of_four")


# --- What is damaged ----------------------------------------------------------------------------------------


@dataclass
class Damage:
    """What was done to a checkpoint: a description, and the names that a refusal may give."""

    kind: str
    what: str
    names: set[str] = field(default_factory=set)


def replace(path: Path, data: bytes) -> None:
    """New content under a name that may be a hard link to the undamaged file."""
    path.unlink()
    path.write_bytes(data)


class Mutator:
    """Damages of a folder, drawn from a generator."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self.draw = folder, draw
        self.files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        self.tensors = [path for path in self.files if path.suffix == ".safetensors"]
        self.json = [path for path in self.files if path.suffix == ".json"]

    def damage(self) -> Damage:
        kinds = [self.flip, self.cut, self.extend, self.delete, self.swap, self.zeros, self.header]
        kinds += [self.rename_tensors, self.edit, self.edit, self.signed_edit]
        kinds += [self.older_file, self.older_part, self.empty, self.junk]
        while True:
            kind = self.draw.choice(kinds)
            done = kind()
            if done is not None:
                names = {part for name in done[1] for part in (name, Path(name).name)}
                return Damage(kind.__name__, done[0], names)

    def pick(self) -> Path:
        """Small files are drawn as often as large ones; half of the time it is a JSON file."""
        return self.draw.choice(self.draw.choice([self.files, self.json]))

    def name(self, path: Path) -> str:
        return str(path.relative_to(self.folder))

    def flip(self) -> tuple[str, list[str]]:
        path = self.pick()
        data = bytearray(path.read_bytes())
        places = [
            (self.draw.randrange(len(data)), self.draw.randrange(8))
            for _ in range(self.draw.choice([1, 1, 2, 8]))
        ]
        for at, bit in places:
            data[at] ^= 1 << bit
        replace(path, bytes(data))
        return f"{self.name(path)}: bits {places} flipped", [self.name(path)]

    def cut(self) -> tuple[str, list[str]]:
        path = self.pick()
        data = path.read_bytes()
        size = self.draw.choice([self.draw.randrange(len(data)), len(data) - 1, len(data) // 2, 8, 4096])
        replace(path, data[:size])
        return f"{self.name(path)}: cut to {size} bytes", [self.name(path)]

    def extend(self) -> tuple[str, list[str]]:
        path = self.pick()
        extra = self.draw.choice([b"\0", b" ", b"\n{}", self.draw.randbytes(self.draw.randrange(1, 5000))])
        replace(path, path.read_bytes() + extra)
        return f"{self.name(path)}: {len(extra)} bytes added", [self.name(path)]

    def delete(self) -> tuple[str, list[str]]:
        path = self.pick()
        path.unlink()
        return f"{self.name(path)}: deleted", [self.name(path)]

    def empty(self) -> tuple[str, list[str]]:
        path = self.pick()
        replace(path, b"")
        return f"{self.name(path)}: emptied", [self.name(path)]

    def junk(self) -> tuple[str, list[str]]:
        path = self.pick()
        replace(
            path, self.draw.choice([self.draw.randbytes(2000), b"null", b"[]", b"{}", b"\xff\xfe", b'"x"'])
        )
        return f"{self.name(path)}: replaced by junk", [self.name(path)]

    def swap(self) -> tuple[str, list[str]] | None:
        a = self.pick()
        others = [path for path in self.files if path != a and path.suffix == a.suffix]
        if not others:
            return None
        b = self.draw.choice(others)
        first = a.read_bytes()
        second = b.read_bytes()
        replace(a, second)
        replace(b, first)
        return f"{self.name(a)} and {self.name(b)} exchanged", [
            self.name(a),
            self.name(b),
            *self.described_by(a),
        ]

    def zeros(self) -> tuple[str, list[str]]:
        path = self.draw.choice(self.tensors)
        data = bytearray(path.read_bytes())
        page = self.draw.randrange(len(data) // 4096 + 1) * 4096
        data[page : page + 4096] = bytes(len(data[page : page + 4096]))
        replace(path, bytes(data))
        return f"{self.name(path)}: page at {page} zeroed", [self.name(path)]

    def header(self) -> tuple[str, list[str]]:
        """A field of one tensor in a header, which is then written anew in whatever length it has."""
        path = self.draw.choice(self.tensors)
        old = read_safetensors_header(path)
        entries = json.loads(old[8:])
        name = self.draw.choice([name for name in entries if name != "__metadata__"])
        entry = entries[name]
        change = self.draw.choice(["dtype", "shape", "offsets", "drop", "name", "metadata", "transpose"])
        if change == "dtype":
            entry["dtype"] = self.draw.choice(["F32", "BF16", "F16", "I32", "I64", "F4", "U8"])
        elif change == "shape":
            entry["shape"] = self.draw.choice(
                [[1, *entry["shape"]], entry["shape"][:-1], [n + 1 for n in entry["shape"]]]
            )
        elif change == "transpose":
            entry["shape"] = entry["shape"][::-1]
        elif change == "offsets":
            entry["data_offsets"][self.draw.randrange(2)] += self.draw.choice([-4, 4, 1, 1 << 40])
        elif change == "drop":
            del entries[name]
        elif change == "name":
            entries[name + "x"] = entries.pop(name)
        else:
            entries["__metadata__"] = {"tp": str(self.draw.randrange(9)), "format": "tf"}

        self.put_header(path, len(old), entries)
        return f"{self.name(path)}: header, {change} of {name}", [self.name(path), name]

    def put_header(self, path: Path, old: int, entries: dict) -> None:
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        replace(path, len(text).to_bytes(8, "little") + text + path.read_bytes()[old:])

    def rename_tensors(self) -> tuple[str, list[str]] | None:
        """Two tensors of one shape and type exchange their names: every length still fits."""
        path = self.draw.choice(self.tensors)
        old = read_safetensors_header(path)
        entries = json.loads(old[8:])
        names = [name for name in entries if name != "__metadata__"]
        self.draw.shuffle(names)
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                if all(entries[a][key] == entries[b][key] for key in ("dtype", "shape")):
                    entries[a]["data_offsets"], entries[b]["data_offsets"] = (
                        entries[b]["data_offsets"],
                        entries[a]["data_offsets"],
                    )
                    self.put_header(path, len(old), entries)
                    return f"{self.name(path)}: {a} and {b} exchanged in the header", [self.name(path), a, b]
        return None

    def edit(self) -> tuple[str, list[str]] | None:
        """Changes one value in a JSON file; what a run says about itself has most to lose."""
        own = [path for path in self.json if path.name == "run.json"]
        path = self.draw.choice(self.draw.choice([own or self.json, self.json]))
        content = json.loads(path.read_text())
        where = self.edit_value(content, lambda place: True)
        if where is None:
            return None
        replace(path, json.dumps(content).encode())
        return f"{self.name(path)}: {'.'.join(map(str, where))} edited", [self.name(path), *map(str, where)]

    def signed_edit(self) -> tuple[str, list[str]] | None:
        """Edits a manifest and makes its digest fit; fields that config, files and hashes determine
        are still compared."""
        path = self.draw.choice([path for path in self.json if path.name == MANIFEST_FILE])
        content = json.loads(path.read_text())
        decided = ("kind", "family", "layout", "tensors", "files", "format", "version")
        where = self.edit_value(content, lambda place: place[0] in decided)
        if where is None:
            return None
        content["digest"] = manifest_digest(content)
        replace(path, json.dumps(content).encode())
        return f"{self.name(path)}: {'.'.join(map(str, where))} edited and signed", [
            self.name(path),
            *map(str, where),
        ]

    def edit_value(self, content: Any, wanted: Callable[[tuple], bool]) -> tuple | None:
        """Changes one value in place, outer ones as often as the many inner ones. Returns its path."""
        node = content
        place = ()
        while isinstance(node, dict | list) and node:
            parent = node
            keys = [
                key for key in (node if isinstance(node, dict) else range(len(node))) if wanted((*place, key))
            ]
            if not keys:
                return None
            key = self.draw.choice(keys)
            place = (*place, key)
            node = node[key]
            if self.draw.random() < 0.15:
                break

        if not place:
            return None
        if self.draw.random() < 0.2:
            del parent[key]
        else:
            parent[key] = self.other(node)

        return place

    def other(self, value: Any) -> Any:
        choices: list[Any] = [None, [], {}, "x", -1, 1 << 70, 0.5, True]
        if isinstance(value, bool):
            choices += [not value] * 8
        elif isinstance(value, int | float):
            choices += [value + 1, value - 1, value * 2, -value, 0] * 3
        elif isinstance(value, str):
            choices += [value + "x", value[:-1], value[::-1]] * 4
        elif isinstance(value, list):
            choices += [value[1:], value + value[:1], value[::-1]] * 3
        return self.draw.choice([choice for choice in choices if choice != value])

    def older_file(self) -> tuple[str, list[str]] | None:
        """A file of the newest step replaced by the same file of the step before it."""
        steps = sorted(self.folder.glob("step_*"))
        if len(steps) < 2:
            return None
        path = self.draw.choice([path for path in self.files if steps[-1] in path.parents])
        older = steps[0] / path.relative_to(steps[-1])
        if older.read_bytes() == path.read_bytes():
            return None
        replace(path, older.read_bytes())
        return f"{self.name(path)}: that of {steps[0].name}", [
            self.name(path),
            MANIFEST_FILE,
            *self.described_by(path),
        ]

    def described_by(self, path: Path) -> list[str]:
        """If a description is another step's, it and the files that it describes disagree, and either
        may be named."""
        described = path.name in ("run.json", MANIFEST_FILE)
        return [self.name(file) for file in self.files if described and path.parent in file.parents]

    def older_part(self) -> tuple[str, list[str]] | None:
        """Replaces weights, optimizer or loader as a whole by those of the step before."""
        steps = sorted(self.folder.glob("step_*"))
        if len(steps) < 2:
            return None
        part = self.draw.choice(["weights", "optimizer", "loader"])
        files = [str(path.relative_to(self.folder)) for path in (steps[-1] / part).iterdir()]
        shutil.rmtree(steps[-1] / part)
        shutil.copytree(steps[0] / part, steps[-1] / part, copy_function=os.link)
        return f"{steps[-1].name}/{part}: that of {steps[0].name}", [part, *files]


# --- What reads it ------------------------------------------------------------------------------------------


class Refused(Exception):
    """The message of a refusal."""


class Bench:
    """The undamaged checkpoints, a built run to resume into, and what they give."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hf = write_tiny_checkpoint(
            folder / "hf",
            "qwen2_5_vl",
            tied=True,
            dtype=torch.float32,
            layers=2,
            vision_layers=2,
            full_attention_layers=(1,),
        )

        convert_weights(self.hf, folder / "full", workers=1)
        convert_weights(self.hf, folder / "shards", {"tp": 2, "pp": 2}, workers=1)
        self.run = self._trained()
        self._as_four_ranks()
        self.good = {
            (name, action): work(folder / name)
            for name in CHECKPOINTS
            for action, work in self.actions(name).items()
        }

    def actions(self, checkpoint: str) -> dict[str, Callable[[Path], str]]:
        actions = {"merge": self.merge, "export": self.export, "load": self.load}
        return actions | {"resume": self.resume} if checkpoint.startswith("run") else actions

    def _trained(self) -> Any:
        """A run of two steps on one rank with a checkpoint after each, as the trainer writes them,
        and its model."""
        from megatron_vl.parallel.start import join_ranks
        from megatron_vl.train import train
        from megatron_vl.training.resolve import resolve_run
        from megatron_vl.training.trainer import Trainer

        data = self._data()
        words = ["--model.hf", self.hf, "--model.checkpoint", self.folder / "full"]
        words += ["--data.path", data, "--checkpoint.dir", self.folder / "run"]
        words += "--data.seq_len 64 --data.num_workers 0 --optimizer.lr 1e-3".split()
        words += "--global_batch_size 1 --steps 2 --checkpoint.interval 1 --checkpoint.keep 2".split()
        words += "--dtype float32 --platform cpu".split()
        config = parse_config([str(word) for word in words])
        with contextlib.redirect_stdout(io.StringIO()):
            train(config)
            trainer = Trainer(resolve_run(config, 1), join_ranks(config))
            trainer.build()
            trainer.restore()
        return trainer

    def _data(self) -> Path:
        from data_tools.convert import ConversionOptions
        from data_tools.convert import convert_dataset as convert_data

        turns = [{"from": "human", "value": "What is this?"}, {"from": "gpt", "value": "A cat."}]
        (self.folder / "data.json").write_text(
            json.dumps([{"id": str(i), "conversations": turns} for i in range(12)])
        )
        with contextlib.redirect_stdout(io.StringIO()):
            convert_data(
                [self.folder / "data.json"],
                ConversionOptions(out=self.folder / "data", media_root=self.folder, workers=1),
            )
        return self.folder / "data"

    def _as_four_ranks(self) -> None:
        """The run's checkpoints as TP2 x PP2 would have written them."""
        from megatron_vl.system.json_files import write_json
        from megatron_vl.training.state.load import read_run_metadata
        from megatron_vl.training.state.optimizer_state import (
            INDEX_FILE,
            STATE_KINDS,
            OptimizerStateReader,
            list_index_entries,
            write_hashed_safetensors,
            write_slice_index,
        )
        from megatron_vl.weights.run_folder import step_dir_path

        layout = make_layout(self.run.spec, tp=2, pp=2)
        table = tensor_table(self.run.spec)
        for step in (1, 2):
            source = step_dir_path(self.folder / "run", step)
            out = step_dir_path(self.folder / "run_of_four", step)
            saved = read_run_metadata(source)
            weights = WeightReader(source / "weights")
            shutil.copytree(source / "loader", out / "loader")
            (out / "optimizer").mkdir()
            files = {name: facts for name, facts in saved["files"].items() if name.startswith("loader/")}
            states = {
                name[10:]: facts for name, facts in saved["files"].items() if name.startswith("optimizer/")
            }
            state = OptimizerStateReader(source / "optimizer", states, UNSHARDED)
            entries = []
            slices = {}

            for rank, (pp, tp) in enumerate((pp, tp) for pp in range(2) for tp in range(2)):
                tensors = {}
                infos = [info for info in table.values() if layout.owning_pipeline_rank(info) == pp]
                for info in infos:
                    count = torch.Size(info.shard_shape(layout.sharding)).numel()
                    for kind in STATE_KINDS:
                        moment = state.read_range(info, kind, tp, layout.sharding, 0, count)
                        assert moment is not None
                        tensors[f"{info.name}[0:{count}]/{kind}"] = moment
                    tensors[f"{info.name}[0:{count}]/step"] = torch.tensor([state.adam_step_count(info.name)])
                name = f"optimizer/rank_{rank:05d}.safetensors"
                files[name] = write_hashed_safetensors(
                    out / name, tensors, {"tp": str(tp), "pp": str(pp), "dp": "0"}
                )
                slices[Path(name).name] = list_index_entries(tensors, tp, 0)
                shards = {
                    info.name: cut_shard(weights.read_shard(info.name), info, tp, layout.sharding)
                    for info in infos
                }
                entries.append(write_rank_file(out / "weights", shards, tp=tp, pp=pp))

            files[f"optimizer/{INDEX_FILE}"] = write_slice_index(out / "optimizer", slices)
            weights_digest = write_manifest(
                out / "weights", self.run.spec, layout, entries, weights.manifest["origin"]
            )
            facts = {**saved, "layout": layout.as_dict(), "files": files}
            # What the trainer adds so that run.json, the weights' manifest and the folder belong together.
            facts |= {"weights": weights_digest} if "weights" in saved else {}
            facts |= {"digest": manifest_digest(facts)} if "digest" in saved else {}
            write_json(out / "run.json", facts)

    def merge(self, checkpoint: Path) -> str:
        return self._command("merge", "--checkpoint", checkpoint)

    def export(self, checkpoint: Path) -> str:
        return self._command("export", "--checkpoint", checkpoint, "--hf", self.hf)

    def _command(self, *words: Any) -> str:
        """The hash of everything that a command writes."""
        out = self.folder / "out"
        error = io.StringIO()
        shutil.rmtree(out, ignore_errors=True)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
            code = command([*map(str, words), "--out", str(out)])
        if code:
            if out.is_dir() and any(out.iterdir()):
                raise AssertionError(
                    f"refused, but {out} was left with {sorted(path.name for path in out.iterdir())}"
                )
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

        run = self.run
        parameters = self.run.saved_tensors
        torch.manual_seed(0)
        with torch.no_grad():
            for tensor in [live.parameter for live in parameters] + [
                piece.main_param for piece in optimizer_slices(run.optimizer, parameters)
            ]:
                tensor.fill_(7)
            for piece in optimizer_slices(run.optimizer, parameters):
                for key, value in piece.adam_state.items():
                    piece.adam_state[key] = torch.full_like(value, 7)

        try:
            newest = find_latest_checkpoint(checkpoint)
            if newest is None:
                raise Refused("None: the run would start anew")
            step = newest.step
            restored = saved.load_checkpoint(
                newest.path,
                live_tensors=parameters,
                optimizer=run.optimizer,
                spec=run.spec,
                grid=run.grid,
            )
            loader = restored.loader_state
        except (saved.CheckpointError, WeightsError, FileNotFoundError) as error:
            raise Refused(str(error)) from error

        digest = hashlib.sha256(
            json.dumps([step, loader, restored.bad_sample_counts], sort_keys=True).encode()
        )
        digest.update(torch.get_rng_state().numpy().tobytes())
        for name, parameter, _ in parameters:
            digest.update(name.encode() + parameter.detach().numpy().tobytes())

        for piece in optimizer_slices(run.optimizer, parameters):
            for key in sorted(piece.adam_state):
                digest.update(key.encode() + torch.as_tensor(piece.adam_state[key]).numpy().tobytes())
            digest.update(piece.main_param.detach().numpy().tobytes())

        return digest.hexdigest()


# --- Rounds -------------------------------------------------------------------------------------------------


@dataclass
class Round:
    seed: str
    checkpoint: str
    damage: Damage
    outcomes: dict[str, str]
    faults: list[str]


def play(bench: Bench, seed: str) -> Round:
    """Damages one checkpoint and reads it in all ways."""
    draw = random.Random(seed)
    name = draw.choice(CHECKPOINTS)
    copy = bench.folder / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(bench.folder / name, copy, copy_function=os.link)
    damage = Mutator(copy, draw).damage()
    outcomes = {}
    faults = []

    for action, work in bench.actions(name).items():
        try:
            outcome = "same" if work(copy) == bench.good[name, action] else "WRONG"
            if outcome == "WRONG":
                faults.append(f"{action}: loaded, but not what the undamaged checkpoint gives")
        except Refused as refusal:
            outcome = "refused"
            if not any(part in str(refusal) for part in damage.names):
                faults.append(f"{action}: refused without naming what is damaged: {refusal}")
        except Exception as error:  # what was not foreseen is what is looked for
            outcome = "ERROR"
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            own = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)][
                -4:
            ]
            faults.append(f"{action}: {type(error).__name__} at {place} ({' > '.join(own)}): {error}")

        outcomes[action] = outcome

    return Round(seed, name, damage, outcomes, faults)


def rounds(bench: Bench, count: int, seed: int) -> Iterator[Round]:
    for i in range(count):
        yield play(bench, f"{seed}:{i}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500, help="damaged checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one round again, by the seed that a fault was printed with")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    outcomes: Counter[tuple[str, str]] = Counter()
    kinds: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        begin = shown = time.monotonic()
        for done, result in enumerate(
            [play(bench, args.only)] if args.only else rounds(bench, args.count, args.seed), 1
        ):
            outcomes.update(result.outcomes.items())
            kinds[result.damage.kind] += 1
            for fault in result.faults:
                damage = {"checkpoint": result.checkpoint, "damage": result.damage.what}
                faults.append({"seed": result.seed, **damage, "fault": fault})
                told = f"FAULT {result.seed} {result.checkpoint}: {result.damage.what}\n  {fault}"
                print(told, file=sys.stderr, flush=True)

            if time.monotonic() - shown > 20:
                shown = time.monotonic()
                rate = done / (shown - begin)
                print(
                    f"{done} of {args.count}, {rate:.1f} a second, {(args.count - done) / rate:.0f} s left",
                    file=sys.stderr,
                )

        seconds = time.monotonic() - begin

    table = {
        action: {o: n for (a, o), n in sorted(outcomes.items()) if a == action}
        for action in sorted({a for a, _ in outcomes})
    }
    if args.json:
        counts = {"damaged": done, "seconds": seconds, "outcomes": table, "kinds": dict(kinds)}
        print(json.dumps(counts | {"faults": faults}))
    else:
        print(
            f"{done} damaged checkpoints in {seconds:.0f} s, {len(faults)} faults; damage: "
            f"{dict(kinds.most_common())}"
        )
        for action, counts in table.items():
            print(f"  {action:<7} {', '.join(f'{n} {o}' for o, n in counts.items())}")

    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
