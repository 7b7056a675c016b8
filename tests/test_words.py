"""Numbers with their nouns."""

from __future__ import annotations

from pathlib import Path

from megatron_vl.system.plurals import pluralize
from toolkit.cli import main


def test_one_is_written_in_the_singular(capsys):
    assert [pluralize(n, "file") for n in (0, 1, 2)] == ["0 files", "1 file", "2 files"]
    assert [pluralize(n, "micro-batch") for n in (1, "1 ± 0")] == ["1 micro-batch", "1 ± 0 micro-batches"]

    hf = Path(__file__).parent / "hf_configs" / "Qwen2-VL-2B-Instruct.json"
    run_args = f"plan --hf {hf} --gpus 1 --gpu H200 --global_batch_size 1 --parallel.tp 1"
    assert main(run_args.split()) == 0
    assert " tokens, 1 row a step\n" in capsys.readouterr().out
