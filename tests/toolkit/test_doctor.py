"""Runs doctor on this machine, and on a broken installation."""

import json
import os
import subprocess
import sys

import pytest

from megatron_vl.estimate.gpus import GpuInfo, parse_nvidia_smi
from tests.support import ranks
from tests.support.ranks import python_path
from toolkit.doctor.machine_checks import check_all_reduce


@pytest.mark.full
@pytest.mark.ranks
def test_doctor_finds_a_broken_transformer_engine(tmp_path):
    """A package that fails at import, as Transformer Engine's parts do alone, is the only finding."""
    text = "raise AssertionError('Could not find `transformer-engine`.')\n"
    (tmp_path / "transformer_engine.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), python_path()])}
    command = [sys.executable, "-m", "toolkit", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    broken = {name for name, finding in found.items() if finding["state"] == "broken"}
    # A real import of Megatron-core fails with it.
    assert broken == {"transformer-engine", "megatron.core"}
    assert "no distribution, does not import: Ass" in found["transformer-engine"]["found"]
    assert "pip uninstall" in found["transformer-engine"]["advice"]


def test_gpus_as_nvidia_smi_lists_them():
    """With one that has fallen off the bus."""
    text = "0, NVIDIA H200, 143771, 4, 580.95.05\n1, NVIDIA H200, 143771, 70012, 580.95.05\n"
    assert parse_nvidia_smi(f"{text}2, [Unknown Error], [N/A], [N/A], 1\n") == [
        GpuInfo(0, "NVIDIA H200", 143771, 4, "580.95.05"),
        GpuInfo(1, "NVIDIA H200", 143771, 70012, "580.95.05"),
    ]


@pytest.mark.ranks
def test_all_reduce_over_two_processes(monkeypatch):
    monkeypatch.setattr("toolkit.common.launch.run_group", ranks.run_group)
    finding = check_all_reduce(0)
    assert finding.state == "ok" and "gloo over 2 ranks: correct" in finding.found
