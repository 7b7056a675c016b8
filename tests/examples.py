"""The shipped examples, and the statements in the first lines of their YAMLs."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_vl.config import TrainConfig, parse_config
from megatron_vl.spec.families import ModelSpec, read_spec

ROOT = Path(__file__).resolve().parent.parent
HF_CONFIGS = ROOT / "tests" / "hf_configs"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
FIRST_LINES = re.compile(
    r"# GPUs: (\d+) x (.*?), (\d+) GiB estimated on the fullest, when a row is all images\n"
    r"# Speed: ([\d,]+) tokens/s on image rows, "
    r"(?:estimated at (\d+) % MFU|measured on 4 of these GPUs \(([\d,]+) each, benchmarks/log/speed\.md\)); "
    r"([\d.]+) hours per billion tokens\n"
)


@dataclass(frozen=True)
class Example:
    name: str
    config: TrainConfig
    spec: ModelSpec
    hf_config: Path
    world: int
    gpu: str
    gib: int
    tokens_per_second: int
    mfu: float
    """0 if the speed was measured."""
    measured_per_gpu: int
    """0 if the speed is estimated."""
    hours: float


@cache
def read_example(path: Path) -> Example:
    """Fails the test unless the YAML begins with the two lines. The result is shared and read-only."""
    config = parse_config(["--config", str(path)])
    hf_config = HF_CONFIGS / f"{Path(config.model.hf).name}.json"
    stated = FIRST_LINES.match(path.read_text())
    assert stated, f"{path.name} does not begin with its GPUs and its speed"
    world, gpu, gib, tokens, mfu, measured, hours = stated.groups(default="0")
    run = path.stem, config, read_spec(hf_config), hf_config, int(world)
    speed = int(tokens.replace(",", "")), int(mfu) / 100, int(measured.replace(",", "")), float(hours)
    return Example(*run, gpu, int(gib), *speed)
