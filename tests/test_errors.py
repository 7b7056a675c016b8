"""A user's error is one line; a bug keeps its traceback. The same holds for each rank of a training."""

import errno
import re
from pathlib import Path

import pytest

from megatron_vl.config import RunConfigError
from megatron_vl.system.errors import (
    UsageError,
    UserError,
    describe_error,
    exit_code_of_error,
    is_machine_fault,
    is_user_fixable,
)
from megatron_vl.train import main

RECORDS = ["ENOENT", "ENOTDIR", "EACCES", "ELOOP", "ENAMETOOLONG"]
MACHINES = ["EIO", "EMFILE", "ENFILE", "ESTALE", "ENOMEM", "ETIMEDOUT", "ENOSPC", "EBUSY"]
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("megatron_vl", "converters", "data_tools", "toolkit")
BUILT_IN = {"Exception", "ValueError", "RuntimeError", "OSError", "KeyError", "TypeError"}
OF_A_SAMPLE = {"PositionError", "SampleTimeoutError", "StalledReadError"}
"""The loader counts the sample as unusable."""
NOT_SHOWN = OF_A_SAMPLE | {"_StateNotSaved", "_SeekMismatchError", "_StoppedError"}
"""The caller names what a checkpoint lacks, decodes the whole video, or ends a thread."""


def test_refusals_have_one_base():
    texts = (path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    found = [named for text in texts for named in re.findall(r"^class (\w+)\(([\w, ]+)", text, re.MULTILINE)]
    known = {name: set(bases.split(", ")) for name, bases in found}

    def is_users(name: str) -> bool:
        return name == "UserError" or any(is_users(base) for base in known.get(name, ()))

    errors = {name for name, bases in known.items() if bases & BUILT_IN and name != "UserError"}
    assert {name for name in errors if not is_users(name)} == NOT_SHOWN
    assert {"RunConfigError", "WeightsError", "CheckpointError", "LoaderError", "UnusableError"} <= errors


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's."""


@pytest.mark.parametrize(
    ("error", "fixable", "code"),
    [
        (UserError("a"), True, 1),
        (UsageError("a"), True, 2),
        (RunConfigError("a"), True, 1),
        (FileNotFoundError(2, "a"), True, 1),
        (MemoryError("a"), True, 1),
        (OutOfMemoryError("a"), True, 1),
        (RuntimeError("[..third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed"), True, 1),
        (RuntimeError("shapes do not match"), False, 1),
        (ValueError("a"), False, 1),
        (AssertionError(), False, 1),
    ],
)
def test_errors_that_a_user_can_fix(error, fixable, code):
    assert is_user_fixable(error) == fixable and exit_code_of_error(error) == code
    assert ("please report" in describe_error(error)) != fixable
    assert ("\n" not in describe_error(error)) == fixable


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError("a holds no checkpoint"), "a holds no checkpoint\n"),
        # It may not say who wanted the file.
        (OSError(5, "broken", "a"), "[Errno 5] broken: 'a'\n(MEGATRON_VL_TRACEBACK=1 shows where)\n"),
        (
            OSError(28, "No space left on device", "runs/a"),
            "runs/a: No space left on device; make room on its disk, or give a folder on another one\n"
            "(MEGATRON_VL_TRACEBACK=1 shows where)\n",
        ),
        (KeyError("rows"), ""),
    ],
)
def test_rank_tells_a_message_or_a_traceback(monkeypatch, capfd, tmp_path, error, message):
    def fail(config):
        raise error

    monkeypatch.setattr("megatron_vl.train.train", fail)
    # It collects garbage, which takes seconds in a process of the tests.
    monkeypatch.setattr("megatron_vl.parallel.process_groups.destroy_groups", lambda: None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    assert main(["--steps", "3"]) == 1
    said = capfd.readouterr().err
    if message:
        assert said == f"megatron_vl.train: rank 0: {message}"
    else:
        assert said.startswith("megatron_vl.train: rank 0: KeyError: 'rows'\nTraceback")
    assert main(["--steps", "3"]) == 1  # another rank of this node, with the same
    assert capfd.readouterr().err == ""


def test_faults_of_paths_are_the_records_and_all_others_the_machines() -> None:
    for name in RECORDS + MACHINES:
        assert is_machine_fault(OSError(getattr(errno, name), "")) == (name in MACHINES), name
