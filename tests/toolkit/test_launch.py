"""Groups of processes on CPU are forks of one process that has imported what they need.

python -m tests.toolkit.test_launch OUT_FOLDER [failing rank]: a rank that says what it was given, or fails.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_module
from toolkit.common.launch import last_output_lines, run_group

pytestmark = pytest.mark.ranks
PROGRAM = "tests.toolkit.test_launch"


def test_forked_ranks_have_the_stack_imported_and_show_one_traceback(tmp_path: Path, monkeypatch) -> None:
    def run_from_server(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """The launcher in a process that has the stack, as if it had imported it."""
        return run_module(words[2], words[3:], is_group=False)

    monkeypatch.setattr(subprocess, "run", run_from_server)
    done = run_group(PROGRAM, [tmp_path, "1"], 2, on_cpu=True)
    assert done.returncode == 1
    shown = last_output_lines(done)
    assert "RuntimeError: rank 1 fails here" in shown and shown.count("Traceback") == 1
    assert "ChildFailedError" not in done.stderr
    for rank in range(2):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        assert facts["world"] == "2" and facts["words"] == [str(tmp_path), "1"] and facts["threads"] == 1
        assert facts["session"] and facts["sigterm"], "a fork keeps nothing of the launcher's signals"
        assert PROGRAM not in facts["command"], "it is a fork"
        assert facts["imported"] == ["megatron.core", "transformers"]


def main() -> int:
    import torch

    rank = os.environ["RANK"]
    facts = {
        "world": os.environ["WORLD_SIZE"],
        "words": sys.argv[1:],
        "threads": torch.get_num_threads(),
        "session": os.getsid(0) == os.getpid(),
        "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "command": Path("/proc/self/cmdline").read_text().split("\0"),
        "imported": sorted({"megatron.core", "transformers"} & set(sys.modules)),
    }
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(facts))
    if sys.argv[2:] == [rank]:
        while len(list(Path(sys.argv[1]).glob("*.json"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)  # the launcher would end the other rank before it has written
        raise RuntimeError(f"rank {rank} fails here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
