"""Options of ``megatron-vl demo``."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.common.options import CommandOptions, option


@dataclass(kw_only=True)
class DemoOptions(CommandOptions):
    """Train a small Qwen2.5-VL with tensor and pipeline parallelism on CPU, and check every step."""

    dir: Path = option(Path(".demo"), metavar="DIR")
    """Write all files to this folder."""
    steps: int = option(40, metavar="N", minimum=12)
    """Train for N steps; fewer than 40 may not be enough to learn the answers."""
