"""What the programs of this folder share: a line for each result, and the options of all."""

import argparse
import tempfile
from pathlib import Path


class Results:
    def __init__(self) -> None:
        self.has_failed = False

    def add(self, name: str, passed: bool, found: str) -> bool:
        self.has_failed |= not passed
        print(f"{'ok    ' if passed else 'FAILED'} {name}: {found}", flush=True)
        return passed

    def exit_code(self) -> int:
        return int(self.has_failed)


def option_parser(
    description: str | None, *, ranks: int | None = None, platform: bool = False
) -> argparse.ArgumentParser:
    """A parser with ``--out`` and, if they are asked for, ``--ranks`` and ``--platform``."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for logs and results; a temporary one if left out")
    if ranks:
        parser.add_argument("--ranks", type=int, default=ranks, help="GPUs, or processes on cpu")
    if platform:
        parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    return parser


def work_folders(out: Path | None, name: str) -> tuple[Path, Path]:
    """A temporary folder, and the folder for results, which is the same if ``--out`` is left out."""
    work = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    out = out or work
    out.mkdir(parents=True, exist_ok=True)
    return work, out
