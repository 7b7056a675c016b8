"""Grouped experts and their weights in DDP: values, gradients, and one reduction of each (tests/models/expert_checks.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_grouped_experts_equal_one_expert_after_another() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "tests.models.expert_checks"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 6
    for name, error in errors.items():
        assert error < 5e-6, (name, error)
