"""Runs a piece of training code in a process of its own: the CPU platform changes torch for the rest of its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def run_single(code: str, **variables: Any) -> Any:
    """Executes ``code`` with ``variables`` defined and returns what it left in ``RESULT``."""
    head = "".join(f"{name} = {value!r}\n" for name, value in variables.items())
    tail = (
        "\nimport json, torch.distributed as dist\n"
        "if dist.is_initialized(): dist.destroy_process_group()\n"
        "print('RESULT', json.dumps(RESULT))\n"
    )
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
    }
    done = subprocess.run(
        [sys.executable, "-c", head + code + tail], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))
