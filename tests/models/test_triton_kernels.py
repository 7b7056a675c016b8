"""The Triton kernels compute what torch computes. On CPU, hence in Triton's interpreter (benchmarks/kernels.py: on a GPU)."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_kernels_equal_torch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.triton_checks"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == 4
    for name, error in errors.items():
        assert error < 5e-6, (name, error)
