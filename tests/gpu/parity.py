"""Loss and gradients in bf16 with Transformer Engine against transformers in bf16, on real GPUs.

    python -m tests.gpu.parity --ranks 1 [--out FOLDER]

Head dimensions are the released ones (80 in the tower, 72 in Qwen3-VL's; 128 in the language model, 256
and 128 in Qwen3.5's), every row has at least two samples and two pictures, RoPE is the fused one. Exit code 1
when a case fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from converters.convert import convert_weights
from tests.training.small_run import torchrun
from toolkit.parity.case import ParityCase, write_cases
from toolkit.tiny_checkpoint import write_tiny_checkpoint

SIZES = {
    "hidden_size": 1024,
    "heads": 8,
    "kv_heads": 4,
    "mrope_section": (16, 24, 24),
    "ffn_hidden_size": 2752,
    "vision_hidden_size": 640,
    "vision_heads": 8,
    "vision_ffn_hidden_size": 1710,
}
QWEN3_SIZES = {
    **SIZES,
    "head_dim": 128,
    "interleaved_section": (24, 20, 20),
    "vision_hidden_size": 576,
    "vision_ffn_hidden_size": 2152,
    "position_table_side": 48,
}
HYBRID_SIZES = {
    **QWEN3_SIZES,
    "kv_heads": 2,
    "hybrid_head_dim": 256,
    "hybrid_section": (11, 11, 10),
    "linear_key_heads": 4,
    "linear_value_heads": 8,
    "linear_key_dim": 128,
    "linear_value_dim": 128,
}
MOE_SIZES = {**QWEN3_SIZES, "experts": 16, "expert_ffn_hidden_size": 384}
FAMILY_SIZES = {
    "qwen3_vl": QWEN3_SIZES,
    # Rounding to bf16 turns near ties between experts around, in transformers as here, and then says nothing
    # of anything else: where gradients are compared tensor by tensor, every token goes to all experts.
    "qwen3_vl_moe": {**MOE_SIZES, "experts_per_token": 16},
    "qwen3_vl_moe, routed": {**MOE_SIZES, "experts_per_token": 4},
    "qwen3_5": HYBRID_SIZES,
    # Two ranks cannot divide these heads, so they gather keys and values.
    "qwen3_vl, seven heads": {**QWEN3_SIZES, "heads": 7, "kv_heads": 1},
    "qwen3_5, seven heads": {**HYBRID_SIZES, "heads": 7, "kv_heads": 1},
    "qwen3_5_moe": {
        **HYBRID_SIZES,
        "experts": 16,
        "experts_per_token": 16,
        "expert_ffn_hidden_size": 384,
        "shared_ffn_hidden_size": 384,
    },
}
ROWS = [
    ["two_images", "mixed"],
    ["image", "image_between", "text"],
    ["two_images", "video", "short_text"],
    ["mixed", "image"],
]
TEXT_LAST = [*ROWS[:3], ["text", "short_text"]]

TP2_PP2 = {"tp": 2, "pp": 2, "sequence_parallel": True, "overlap": True}

CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"name": "one rank", "steps": [ROWS] * 2},
        {"name": "one rank, qwen2_vl", "family": "qwen2_vl", "steps": [ROWS]},
        {"name": "one rank, qwen3_vl", "family": "qwen3_vl", "steps": [ROWS] * 2},
        {
            "name": "full recompute, inputs in host memory, qwen3_vl",
            "family": "qwen3_vl",
            "recompute": {"language": "full", "vision": "full", "offload_inputs": True},
            "steps": [ROWS],
        },
        {"name": "one rank, experts", "family": "qwen3_vl_moe", "steps": [ROWS] * 2},
        {"name": "one rank, experts, routed", "family": "qwen3_vl_moe, routed", "steps": [ROWS] * 2},
        {
            "name": "experts, selective recompute",
            "family": "qwen3_vl_moe",
            "recompute": {
                "language": "selective",
                "language_modules": ["core_attn", "layernorm", "activation"],
            },
            "steps": [ROWS],
        },
        {
            "name": "experts, full recompute",
            "family": "qwen3_vl_moe",
            "recompute": {"language": "full"},
            "steps": [ROWS],
        },
        {"name": "one rank, tied", "tied": True, "steps": [TEXT_LAST]},
        {"name": "vision frozen", "freeze": ["vision"], "steps": [ROWS]},
        {"name": "full recompute", "recompute": {"language": "full", "vision": "full"}, "steps": [ROWS]},
        {
            "name": "selective recompute",
            "recompute": {"language": "selective", "language_modules": ["core_attn", "layernorm", "mlp"]},
            "steps": [ROWS],
        },
        {"name": "overlap, three steps", "overlap": True, "steps": [TEXT_LAST, ROWS, TEXT_LAST]},
        {"name": "one rank, qwen3_5", "family": "qwen3_5", "steps": [ROWS] * 2},
        {
            "name": "full recompute, inputs in host memory, qwen3_5",
            "family": "qwen3_5",
            "recompute": {"language": "full", "vision": "full", "offload_inputs": True},
            "steps": [ROWS],
        },
        {
            "name": "selective recompute, qwen3_5",
            "family": "qwen3_5",
            "recompute": {
                "language": "selective",
                "language_modules": ["core_attn", "layernorm", "activation"],
            },
            "steps": [ROWS],
        },
        {"name": "one rank, qwen3_5 with experts", "family": "qwen3_5_moe", "steps": [ROWS] * 2},
    ],
    2: [
        {"name": "TP2 + SP", "tp": 2, "sequence_parallel": True, "steps": [ROWS]},
        {
            "name": "TP2 + SP, collectives beside products",
            "tp": 2,
            "sequence_parallel": True,
            "tp_comm_overlap": True,
            "steps": [ROWS, TEXT_LAST],
        },
        {"name": "PP2 x VPP2", "pp": 2, "vpp": 2, "steps": [ROWS]},
        {
            "name": "PP2 x VPP2, full recompute, inputs in host memory",
            "pp": 2,
            "vpp": 2,
            "recompute": {"language": "full", "vision": "full", "offload_inputs": True},
            "steps": [ROWS],
        },
        {
            "name": "EP2, experts, overlap",
            "family": "qwen3_vl_moe",
            "ep": 2,
            "overlap": True,
            "steps": [TEXT_LAST, ROWS, TEXT_LAST],
        },
        {
            "name": "TP2 + SP, qwen3_vl",
            "family": "qwen3_vl",
            "tp": 2,
            "sequence_parallel": True,
            "steps": [ROWS],
        },
        {"name": "PP2, qwen3_vl", "family": "qwen3_vl", "pp": 2, "layers": [1, 3], "steps": [ROWS]},
        {
            "name": "PP2, decoupled, overlap",
            "pp": 2,
            "decoupled": True,
            "overlap": True,
            "patches": 600,
            "steps": [TEXT_LAST, ROWS, TEXT_LAST],
        },
        {
            "name": "TP2 + SP, decoupled, qwen3_vl",
            "family": "qwen3_vl",
            "tp": 2,
            "sequence_parallel": True,
            "decoupled": True,
            "steps": [ROWS],
        },
        {"name": "DP2, overlap", "overlap": True, "steps": [TEXT_LAST, ROWS, TEXT_LAST]},
        {"name": "CP2, overlap", "cp": 2, "overlap": True, "steps": [TEXT_LAST, ROWS, TEXT_LAST]},
        {"name": "CP2, qwen3_vl", "family": "qwen3_vl", "cp": 2, "steps": [ROWS]},
        {
            "name": "CP2, decoupled, qwen3_vl",
            "family": "qwen3_vl",
            "cp": 2,
            "decoupled": True,
            "steps": [ROWS],
        },
        {"name": "CP2, EP2, experts", "family": "qwen3_vl_moe", "cp": 2, "ep": 2, "steps": [ROWS, TEXT_LAST]},
        {
            "name": "CP2 beyond the heads, qwen3_vl",
            "family": "qwen3_vl, seven heads",
            "cp": 2,
            "steps": [ROWS],
        },
        {"name": "CP2 beyond the heads, qwen3_5", "family": "qwen3_5, seven heads", "cp": 2, "steps": [ROWS]},
        {
            "name": "TP2 + SP, qwen3_5",
            "family": "qwen3_5",
            "tp": 2,
            "sequence_parallel": True,
            "steps": [ROWS],
        },
        {"name": "TP2, qwen3_5", "family": "qwen3_5", "tp": 2, "steps": [ROWS]},
        {"name": "PP2, qwen3_5", "family": "qwen3_5", "pp": 2, "layers": [1, 3], "steps": [ROWS]},
        {
            "name": "DP2, qwen3_5, overlap",
            "family": "qwen3_5",
            "overlap": True,
            "steps": [TEXT_LAST, ROWS, TEXT_LAST],
        },
        {
            "name": "EP2, qwen3_5 with experts, overlap",
            "family": "qwen3_5_moe",
            "ep": 2,
            "overlap": True,
            "steps": [TEXT_LAST, ROWS, TEXT_LAST],
        },
    ],
    4: [
        {"name": "CP2 x TP2 + SP", "cp": 2, "tp": 2, "sequence_parallel": True, "steps": [ROWS, TEXT_LAST]},
        {"name": "CP4, qwen3_vl", "family": "qwen3_vl", "cp": 4, "overlap": True, "steps": [ROWS, TEXT_LAST]},
        {"name": "TP2 x PP2 + SP", **TP2_PP2, "layers": [1, 3], "steps": [ROWS, TEXT_LAST]},
        {
            "name": "TP2 x PP2 x VPP2 + SP, tied",
            **TP2_PP2,
            "tied": True,
            "vpp": 2,
            "steps": [TEXT_LAST, ROWS],
        },
        {
            "name": "TP2 x PP2 x VPP2 + SP, qwen3_vl",
            **TP2_PP2,
            "family": "qwen3_vl",
            "vpp": 2,
            "steps": [TEXT_LAST, ROWS],
        },
        {
            "name": "EP4, experts",
            "family": "qwen3_vl_moe",
            "ep": 4,
            "overlap": True,
            "steps": [TEXT_LAST, ROWS, TEXT_LAST],
        },
        {
            "name": "EP4, experts, routed",
            "family": "qwen3_vl_moe, routed",
            "ep": 4,
            "overlap": True,
            "steps": [ROWS, TEXT_LAST],
        },
        {
            "name": "EP2 x PP2, experts",
            "family": "qwen3_vl_moe",
            "pp": 2,
            "ep": 2,
            "layers": [1, 3],
            "overlap": True,
            "steps": [TEXT_LAST, ROWS],
        },
        {
            "name": "EP2 x PP2 x VPP2, experts",
            "family": "qwen3_vl_moe",
            "pp": 2,
            "vpp": 2,
            "ep": 2,
            "steps": [ROWS],
        },
        {
            "name": "EP2 x TP2 + SP, experts",
            "family": "qwen3_vl_moe",
            "tp": 2,
            "sequence_parallel": True,
            "ep": 2,
            "steps": [ROWS],
        },
        {
            "name": "EP4 x TP2 + SP, experts",
            "family": "qwen3_vl_moe",
            "tp": 2,
            "sequence_parallel": True,
            "ep": 4,
            "steps": [ROWS],
        },
        {
            "name": "EP2 x TP2 + SP, ETP2, experts",
            "family": "qwen3_vl_moe",
            "tp": 2,
            "sequence_parallel": True,
            "ep": 2,
            "etp": 2,
            "steps": [ROWS],
        },
        {"name": "TP4 + SP", "tp": 4, "sequence_parallel": True, "steps": [ROWS]},
        {"name": "PP2 x DP2, overlap", "pp": 2, "overlap": True, "steps": [TEXT_LAST, ROWS, TEXT_LAST]},
        {"name": "DP4, qwen2_vl", "family": "qwen2_vl", "overlap": True, "steps": [ROWS, TEXT_LAST, ROWS]},
    ],
    8: [
        {"name": "TP2 x PP2 x DP2 + SP", **TP2_PP2, "layers": [1, 3], "steps": [TEXT_LAST, ROWS, TEXT_LAST]},
        {"name": "TP4 x PP2 + SP", **TP2_PP2, "tp": 4, "steps": [ROWS, TEXT_LAST]},
        {
            "name": "TP2 x PP2 x VPP2 x DP2 + SP, tied",
            **TP2_PP2,
            "tied": True,
            "vpp": 2,
            "steps": [TEXT_LAST, ROWS, TEXT_LAST],
        },
        {
            "name": "EP8, experts",
            "family": "qwen3_vl_moe",
            "ep": 8,
            "overlap": True,
            "steps": [ROWS * 2, TEXT_LAST * 2],
        },
        {
            "name": "EP4 x TP2 x PP2 + SP, experts",
            **TP2_PP2,
            "family": "qwen3_vl_moe",
            "ep": 4,
            "steps": [TEXT_LAST, ROWS],
        },
        {
            "name": "DP8, qwen2_vl",
            "family": "qwen2_vl",
            "overlap": True,
            "steps": [ROWS * 2, TEXT_LAST * 2, ROWS * 2],
        },
        {
            "name": "TP2 x PP2 x VPP2 x DP2 + SP, qwen3_vl",
            **TP2_PP2,
            "family": "qwen3_vl",
            "vpp": 2,
            "steps": [TEXT_LAST, ROWS],
        },
        {"name": "TP2 x PP4", "tp": 2, "pp": 4, "steps": [ROWS]},
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=sorted(CASES), default=1)
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for results; a temporary one when not given"
    )
    parser.add_argument("--platform", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="gpu-parity-"))
    cases = []

    for entry in [entry for entry in CASES[args.ranks] if args.only in entry["name"]]:
        fields = dict(entry)
        family, tied = fields.pop("family", "qwen2_5_vl"), fields.pop("tied", False)
        hf = work / f"{family.replace(', ', '_')}{'_tied' if tied else ''}"
        if not hf.exists():
            sizes: dict[str, Any] = FAMILY_SIZES.get(family, SIZES)
            write_tiny_checkpoint(hf, family.split(",")[0], tied=tied, dtype=torch.float32, **sizes)
            convert_weights(hf, work / f"{hf.name}_full")
        cases.append(
            ParityCase(
                hf=str(hf), weights=str(work / f"{hf.name}_full"), dtype="bfloat16", seq_len=512, **fields
            )
        )

    write_cases(cases, work / "cases.json")
    out = (args.out or work) / f"parity_{args.ranks}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    worker = ["-m", "toolkit.parity.worker", str(work / "cases.json"), str(out), args.platform]
    done = subprocess.run([*torchrun(args.ranks), *worker], check=False)
    for name, result in json.loads(out.read_text()).items():
        for number, step in enumerate(result.get("steps", [])):
            error, theirs = step["gradient_error"], step["transformers_bf16_gradient_error"]
            print(
                f"{'ok    ' if step['ok'] else 'FAILED'} {name} | step {number} | loss {step['loss']:.6f} "
                f"transformers {step['reference']:.6f} ({step['loss_error']:.1e}) | gradient error "
                f"{error:.3f} transformers {theirs:.3f} | worst {next(iter(step['worst']))}"
            )

    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
