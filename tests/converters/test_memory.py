"""The memory of a conversion depends on the size of its chunks, not of its tensors."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from converters import make_conversion_rules
from megatron_vl.spec.families import read_spec

from .helpers import small_config

SCRIPT = """
import json, sys
from converters.convert import convert_weights, export_weights
import safetensors, torch
print("ready", flush=True)
sys.stdin.readline()
convert_weights(sys.argv[1], sys.argv[2] + "/shards", json.loads(sys.argv[3]), workers=2)
export_weights(sys.argv[2] + "/shards", sys.argv[1], sys.argv[2] + "/back", workers=2)
"""
BOUNDS = {"RssAnon": 40 << 20, "VmRSS": 220 << 20}
"""Two workers with chunks of 4 MiB and a few copies of each; 16 MiB mapped of each of five files;
torch's own pages."""


def big_folder(folder: Path) -> int:
    """A tied model of about 380 MB in two layers and one file. Returns the bytes of its weights.

    It has an embedding of 123 MB, and stacks of 84 and 42 MB of experts as wide as 30B-A3B's.
    """
    config = small_config("Qwen3-VL-30B-A3B-Instruct", layers=2) | {"tie_word_embeddings": True}
    sizes = {"hidden_size": 2048, "num_experts": 14, "moe_intermediate_size": 768, "vocab_size": 30_000}
    config["text_config"] |= sizes
    config["vision_config"]["out_hidden_size"] = 2048
    shapes = [shape for rule in make_conversion_rules(read_spec(config)) for shape in rule.hf_shapes.items()]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def memory(process: psutil.Process) -> dict[str, int]:
    """``RssAnon`` is memory that no file backs; ``VmRSS`` also counts mapped pages of files."""
    found = process.memory_info()
    return {"RssAnon": found.rss - found.shared, "VmRSS": found.rss}


@pytest.mark.slow
@pytest.mark.skipif(not psutil.LINUX, reason="only Linux reports file-backed memory apart from other memory")
def test_memory_is_bounded(tmp_path: Path, repository: Path) -> None:
    size = big_folder(tmp_path / "hf")
    assert size > 370e6
    layout = json.dumps({"tp": 2, "pp": 2, "ep": 2})
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "hf"), str(tmp_path), layout]
    process = psutil.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=repository)
    assert process.stdout.readline() == "ready\n"
    before, samples = memory(process), []
    process.stdin.write("go\n")
    process.stdin.close()
    with suppress(psutil.NoSuchProcess):
        while process.poll() is None:
            samples.append(memory(process))
            time.sleep(0.005)
    assert process.wait() == 0 and len(samples) > 20
    for field, bound in BOUNDS.items():
        assert max(sample[field] for sample in samples) - before[field] < bound < size, field
    back, original = (tmp_path / name / "model.safetensors" for name in ("back", "hf"))
    assert back.read_bytes() == original.read_bytes()
