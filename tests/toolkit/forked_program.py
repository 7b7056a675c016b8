"""A rank that says what it was given, or fails.

python -m tests.toolkit.forked_program OUT_FOLDER [failing rank]
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


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
