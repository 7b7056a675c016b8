"""Runs a piece of training code in processes of its own: the CPU platform changes torch for the rest of its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

TAIL = """
import json, torch.distributed as dist
first = not dist.is_initialized() or dist.get_rank() == 0
if dist.is_initialized():
    from megatron_vl.parallel.grid import end_distributed
    end_distributed()
if first:
    print("RESULT", json.dumps(RESULT))
"""


def run_single(code: str, **variables: Any) -> Any:
    """Executes ``code`` with ``variables`` defined and returns what it left in ``RESULT``."""
    return _result([sys.executable, "-c", _whole(code, variables)], {"MASTER_PORT": str(20000 + os.getpid() % 20000)})


def run_ranks(ranks: int, code: str, **variables: Any) -> Any:
    """The same in that many processes that torchrun starts; returns what the first of them left."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(_whole(code, variables))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return _result([*launch, str(script)], {})


def _whole(code: str, variables: dict[str, Any]) -> str:
    return "".join(f"{name} = {value!r}\n" for name, value in variables.items()) + code + TAIL


def _result(command: list[str], settings: dict[str, str]) -> Any:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **settings}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))
