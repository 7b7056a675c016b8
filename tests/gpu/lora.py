"""LoRA in bfloat16 with Transformer Engine on real GPUs, against float32 on a CPU.

    python -m tests.gpu.lora --ranks 1 [--out FOLDER]

Each family trains adapters of the language model, the tower, the mergers and the experts for two steps. Then
logits of merged weights are compared with those of base and adapters. Exit code 1 when a loss or logits are
further off than rounding to bfloat16 explains, or when a bit of the base has changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.parity import FAMILY_SIZES, SELECTIVE, SIZES
from tests.gpu.results import Results, option_parser, work_folders
from tests.parity.cases import FULL, TP2_SP
from tests.support.tiny_run import torchrun
from tests.support.tiny_trainer import gather, save, train, trainer_of
from tests.training.test_context_parallel import ROWS
from tests.training.test_lora import changed_base, distance, local_logits, logits_when_merged
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint

PARTS = ["language", "vision", "merger"]
FAMILIES = dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_5"), PARTS) | {"qwen3_5_moe": [*PARTS, "experts"]}
FP8: dict[str, Any] = {"fp8": {"recipe": "delayed", "vision": True}}
FULL_RECOMPUTE: dict[str, Any] = {"recompute": FULL}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one rank": {},
        "full recompute": FULL_RECOMPUTE,
        "FP8, tower too": {"fp8": {"recipe": "tensorwise", "vision": True}},
        "selective recompute": {"overlap": True, "recompute": SELECTIVE},
        "full recompute in FP8": FULL_RECOMPUTE | FP8,
    },
    2: {
        "DP2 with overlap": {"overlap": True},
        "TP2 + SP": TP2_SP,
        "PP2": {"pp": 2},
        "CP2, decoupled": {"cp": 2, "decoupled": True},
        "EP2": {"ep": 2, "overlap": True},
        "TP2 + SP in FP8": TP2_SP | FP8,
        "DP2 with full recompute in FP8": FULL_RECOMPUTE | FP8,
    },
}
MAX_LOSS_ERROR = 0.01
"""Relative error of a loss of about 6.8. Two layouts in bfloat16 differ by about 0.002."""

MAX_LOGIT_DISTANCE = 0.02
"""Of the norm of the logits. Merged weights are rounded to bfloat16, and so are products with adapters."""


def run_as_rank(work: Path, family: str, platform_name: str) -> None:
    """Trains one family in all layouts of this number of ranks, and writes the results on rank 0."""
    is_moe, has_linear_attention = family.endswith("_moe"), family.startswith("qwen3_5")
    all_layouts = LAYOUTS[int(os.environ["WORLD_SIZE"])] if platform_name == "cuda" else {"one rank": {}}
    layouts = {
        name: layout
        for name, layout in all_layouts.items()
        if (is_moe or "ep" not in layout) and not (has_linear_attention and {"fp8", "tp"} <= layout.keys())
    }
    lora = {"rank": 16, "targets": FAMILIES[family]}
    hf, results = work / family, {}
    for name, layout in layouts.items():
        fields = {**layout, "platform_name": platform_name}
        fields["dtype"] = "bfloat16" if platform_name == "cuda" else "float32"
        trainer = trainer_of(hf, lora=lora, **fields)
        before = [live.parameter.detach().clone() for live in trainer.live_tensors]
        # Pipelines and decoupled towers have no logits of a row in one call; those in FP8 are rounded.
        has_logits = not {"pp", "decoupled", "fp8"} & layout.keys()
        base_logits = local_logits(trainer) if has_logits else None
        losses = [result.loss for result in train(trainer, ROWS, range(2))]
        run = work / f"{family}_{platform_name}" / name.replace(" ", "_")
        save(trainer, run)
        changed = sum(gather(changed_base(trainer, before)), [])
        results[name] = {"losses": losses, "base_changed": sorted(set(changed))}
        if base_logits is not None:
            trained = local_logits(trainer)
            results[name]["merged"] = distance(logits_when_merged(run, hf, **fields), trained)
            results[name]["base"] = distance(base_logits, trained)
    if dist.get_rank() == 0:
        (work / f"{family}_{platform_name}.json").write_text(json.dumps(results))


def main() -> int:
    parser = option_parser(__doc__, ranks=1)
    parser.add_argument("--only", default="", help="families whose name contains this")
    args = parser.parse_args()
    (work, out), outcome = work_folders(args.out, "gpu-lora"), Results()
    for family in [family for family in FAMILIES if args.only in family]:
        sizes: dict[str, Any] = FAMILY_SIZES.get(family, SIZES)
        write_tiny_checkpoint(work / family, family, dtype=torch.float32, **sizes)
        for platform_name, ranks in (("cpu", 1), ("cuda", args.ranks)):
            program = ["-m", "tests.gpu.lora", str(work), family, platform_name]
            subprocess.run([*torchrun(ranks), *program], check=False)

        expected = json.loads((work / f"{family}_cpu.json").read_text())["one rank"]["losses"]
        results_path = work / f"{family}_cuda.json"
        results = json.loads(results_path.read_text()) if results_path.exists() else {}
        for name, result in results.items():
            errors = [abs(loss / known - 1) for loss, known in zip(result["losses"], expected, strict=True)]
            is_good = max(errors) < MAX_LOSS_ERROR and not result["base_changed"]
            distances = {key: result[key] for key in ("merged", "base") if key in result}
            is_good &= distances.get("merged", 0.0) < MAX_LOGIT_DISTANCE
            found = (
                f"losses {result['losses']}, float32 {expected}, base changed {len(result['base_changed'])};"
                f" logits from those with adapters {distances}"
            )
            outcome.add(f"{family} | {name}", is_good, found)
        outcome.has_failed |= not results
        (out / f"lora_{family}_{args.ranks}.json").write_text(json.dumps(results, indent=1))
    return outcome.exit_code()


if __name__ == "__main__":
    sys.exit(run_as_rank(Path(sys.argv[1]), *sys.argv[2:4]) if "RANK" in os.environ else main())
