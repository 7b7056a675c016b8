"""Loss and gradients in bf16 with Transformer Engine against transformers in bf16, on real GPUs.

    python -m tests.gpu.parity --ranks 1 [--out FOLDER]

Head dimensions are the released ones (80 in the tower, 72 in Qwen3-VL's; 128 in the language model, 256
and 128 in Qwen3.5's), every row has at least two samples and two images, RoPE is the fused one. Exit code 1
when a case fails.

Cases of multi-token prediction ("mtp") are compared with the plain layer of
:mod:`tests.models.mtp_reference`: losses, targets, and gradients.

With ``--platform cpu``, a tower with LayerNorm, such as Qwen3-VL's, fails in the gradients of its norms:
torch 2.11 sums these over rows in bf16 there, so their error grows with the rows in a call (2 % for 400
patches, 4 to 6 % for 1,600), and the tower takes all images of a row in one call.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from converters.convert import convert_weights
from megatron_vl.platform import Platform
from tests.gpu.results import option_parser, work_folders
from tests.models import mtp_reference
from tests.parity.cases import FULL, MOE, MOE35, Q2, Q3, Q25, Q35, TP2_SP
from tests.support.tiny_run import torchrun
from tests.tiny import with_yarn
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint
from toolkit.parity import worker
from toolkit.parity.case import ParityCase, write_cases

SIZES = {
    **{"hidden_size": 1024, "heads": 8, "kv_heads": 4, "mrope_section": (16, 24, 24)},
    **{"ffn_hidden_size": 2752, "vision_ffn_hidden_size": 1710, "vision_hidden_size": 640, "vision_heads": 8},
}
QWEN3_SIZES = {
    **SIZES,
    **{"head_dim": 128, "interleaved_section": (24, 20, 20), "position_table_side": 48},
    **{"vision_hidden_size": 576, "vision_ffn_hidden_size": 2152},
}
HYBRID_SIZES = {
    **QWEN3_SIZES,
    **{"kv_heads": 2, "hybrid_head_dim": 256, "hybrid_section": (11, 11, 10)},
    **{f"linear_{kind}_heads": heads for kind, heads in (("key", 4), ("value", 8))},
    **dict.fromkeys(("linear_key_dim", "linear_value_dim"), 128),
}
EXPERTS = {"experts": 16, "expert_ffn_hidden_size": 384}
MOE_SIZES = {**QWEN3_SIZES, **EXPERTS}
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
    "qwen3_5_moe": {**HYBRID_SIZES, **EXPERTS, "experts_per_token": 16, "shared_ffn_hidden_size": 384},
}
ROWS = [
    ["two_images", "mixed"],
    ["image", "image_between", "text"],
    ["two_images", "video", "short_text"],
    ["mixed", "image"],
]
TEXT_LAST = [*ROWS[:3], ["text", "short_text"]]
THREE_STEPS = [TEXT_LAST, ROWS, TEXT_LAST]

TP2_PP2 = {**TP2_SP, "pp": 2, "overlap": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OFFLOADED = {**FULL, "offload_inputs": True}
SELECTIVE = {"language": "selective", "language_modules": ["core_attn", "layernorm", "activation"]}
SELECTIVE_MLP = SELECTIVE | {"language_modules": ["core_attn", "layernorm", "mlp"]}
MTP: dict[str, Any] = {"mtp": {"loss": 0.3, "trains": "all"}, "optimizer": False}
MTP_HEAD: dict[str, Any] = {"mtp": {"loss": 0.3}, "optimizer": False}


def case(name: str, family: str = Q25, steps: Sequence[Any] = (ROWS,), **fields: Any) -> dict[str, Any]:
    return {"name": name, "family": family, "steps": list(steps), **fields}


CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        case("one rank", steps=[ROWS] * 2),
        case("one rank, qwen2_vl", Q2),
        case("one rank, qwen3_vl", Q3, steps=[ROWS] * 2),
        case("full recompute, inputs in host memory, qwen3_vl", Q3, recompute=OFFLOADED),
        case("one rank, experts", MOE, steps=[ROWS] * 2),
        case("one rank, experts, routed", "qwen3_vl_moe, routed", steps=[ROWS] * 2),
        case("experts, selective recompute", MOE, recompute=SELECTIVE),
        case("experts, full recompute", MOE, recompute={"language": "full"}),
        case("one rank, tied", tied=True, steps=[TEXT_LAST]),
        case("vision frozen", freeze=["vision"]),
        case("full recompute", recompute=FULL),
        case("selective recompute", recompute=SELECTIVE_MLP),
        case("the tower's activation recomputed", recompute={"vision": "activation"}),
        case("the tower's activation recomputed, qwen3_vl", Q3, recompute={"vision": "activation"}),
        case("overlap, three steps", overlap=True, steps=THREE_STEPS),
        case("one rank, qwen3_5", Q35, steps=[ROWS] * 2),
        case("full recompute, inputs in host memory, qwen3_5", Q35, recompute=OFFLOADED),
        case("selective recompute, qwen3_5", Q35, recompute=SELECTIVE),
        case("one rank, qwen3_5 with experts", MOE35, steps=[ROWS] * 2),
        case("mtp, one rank, qwen3_5", Q35, **MTP),
        case("mtp, head, one rank, qwen3_5", Q35, **MTP_HEAD),
        case("mtp, full recompute, inputs in host memory, qwen3_5", Q35, **MTP, recompute=OFFLOADED),
        case("mtp, one rank, qwen3_5 with experts", MOE35, **MTP),
    ],
    2: [
        case("CP2, YaRN, qwen3_5", Q35, cp=2, yarn=YARN),
        case("TP2 + SP, YaRN, qwen3_vl", Q3, **TP2_SP, yarn=YARN),
        case("TP2 + SP", **TP2_SP),
        case("PP2 x VPP2", pp=2, vpp=2),
        case("PP2 x VPP2, full recompute, inputs in host memory", pp=2, vpp=2, recompute=OFFLOADED),
        case("EP2, experts, overlap", MOE, ep=2, overlap=True, steps=THREE_STEPS),
        case("TP2 + SP, qwen3_vl", Q3, **TP2_SP),
        case("PP2, qwen3_vl", Q3, pp=2, layers=[1, 3]),
        case("PP2, decoupled, overlap", pp=2, decoupled=True, overlap=True, patches=600, steps=THREE_STEPS),
        case("TP2 + SP, decoupled, qwen3_vl", Q3, **TP2_SP, decoupled=True),
        case("DP2, overlap", overlap=True, steps=THREE_STEPS),
        case("CP2, overlap", cp=2, overlap=True, steps=THREE_STEPS),
        case("CP2, qwen3_vl", Q3, cp=2),
        case("CP2, decoupled, qwen3_vl", Q3, cp=2, decoupled=True),
        case("CP2, EP2, experts", MOE, cp=2, ep=2, steps=[ROWS, TEXT_LAST]),
        case("CP2 beyond the heads, qwen3_vl", "qwen3_vl, seven heads", cp=2),
        case("CP2 beyond the heads, qwen3_5", "qwen3_5, seven heads", cp=2),
        case("TP2 + SP, qwen3_5", Q35, **TP2_SP),
        case("TP2, qwen3_5", Q35, tp=2),
        case("PP2, qwen3_5", Q35, pp=2, layers=[1, 3]),
        case("DP2, qwen3_5, overlap", Q35, overlap=True, steps=THREE_STEPS),
        case("EP2, qwen3_5 with experts, overlap", MOE35, ep=2, overlap=True, steps=THREE_STEPS),
        case("mtp, TP2 + SP, qwen3_5", Q35, **MTP, **TP2_SP),
        case("mtp, PP2 x VPP2, qwen3_5", Q35, **MTP, pp=2, vpp=2),
        case("mtp, CP2, qwen3_5", Q35, **MTP, cp=2),
        case("mtp, head, CP2, EP2, qwen3_5 with experts", MOE35, **MTP_HEAD, cp=2, ep=2),
    ],
    4: [
        case("CP2 x TP2 + SP", cp=2, **TP2_SP, steps=[ROWS, TEXT_LAST]),
        case("CP4, qwen3_vl", Q3, cp=4, overlap=True, steps=[ROWS, TEXT_LAST]),
        case("TP2 x PP2 + SP", **TP2_PP2, layers=[1, 3], steps=[ROWS, TEXT_LAST]),
        case("TP2 x PP2 x VPP2 + SP, tied", **TP2_PP2, tied=True, vpp=2, steps=[TEXT_LAST, ROWS]),
        case("TP2 x PP2 x VPP2 + SP, qwen3_vl", Q3, **TP2_PP2, vpp=2, steps=[TEXT_LAST, ROWS]),
        case("EP4, experts", MOE, ep=4, overlap=True, steps=THREE_STEPS),
        case("EP4, experts, routed", "qwen3_vl_moe, routed", ep=4, overlap=True, steps=[ROWS, TEXT_LAST]),
        case("EP2 x PP2, experts", MOE, pp=2, ep=2, layers=[1, 3], overlap=True, steps=[TEXT_LAST, ROWS]),
        case("EP2 x PP2 x VPP2, experts", MOE, pp=2, vpp=2, ep=2),
        case("EP2 x TP2 + SP, experts", MOE, **TP2_SP, ep=2),
        case("EP4 x TP2 + SP, experts", MOE, **TP2_SP, ep=4),
        case("EP2 x TP2 + SP, ETP2, experts", MOE, **TP2_SP, ep=2, etp=2),
        case("TP4 + SP", tp=4, sequence_parallel=True),
        case("PP2 x DP2, overlap", pp=2, overlap=True, steps=THREE_STEPS),
        case("DP4, qwen2_vl", Q2, overlap=True, steps=[ROWS, TEXT_LAST, ROWS]),
    ],
    8: [
        case("TP2 x PP2 x DP2 + SP", **TP2_PP2, layers=[1, 3], steps=THREE_STEPS),
        case("TP4 x PP2 + SP", **(TP2_PP2 | {"tp": 4}), steps=[ROWS, TEXT_LAST]),
        case("TP2 x PP2 x VPP2 x DP2 + SP, tied", **TP2_PP2, tied=True, vpp=2, steps=THREE_STEPS),
        case("EP8, experts", MOE, ep=8, overlap=True, steps=[ROWS * 2, TEXT_LAST * 2]),
        case("EP4 x TP2 x PP2 + SP, experts", MOE, **TP2_PP2, ep=4, steps=[TEXT_LAST, ROWS]),
        case("DP8, qwen2_vl", Q2, overlap=True, steps=[ROWS * 2, TEXT_LAST * 2, ROWS * 2]),
        case("TP2 x PP2 x VPP2 x DP2 + SP, qwen3_vl", Q3, **TP2_PP2, vpp=2, steps=[TEXT_LAST, ROWS]),
        case("TP2 x PP4", tp=2, pp=4),
    ],
}


def main() -> int:
    parser = option_parser(__doc__, ranks=1, platform=True)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    (work, folder), cases = work_folders(args.out, "gpu-parity"), []

    for entry in [entry for entry in CASES[args.ranks] if args.only in entry["name"]]:
        fields = dict(entry)
        family, tied = fields.pop("family", "qwen2_5_vl"), fields.pop("tied", False)
        hf = work / f"{family.replace(', ', '_')}{'_tied' if tied else ''}"
        if not hf.exists():
            sizes: dict[str, Any] = FAMILY_SIZES.get(family, SIZES)
            write_tiny_checkpoint(hf, family.split(",")[0], tied=tied, dtype=torch.float32, **sizes)
            convert_weights(hf, work / f"{hf.name}_full")
        start_weights = str(work / f"{hf.name}_full")
        if yarn := fields.pop("yarn", None):
            hf = with_yarn(hf, work / f"{hf.name}_yarn", yarn)
        cases.append(ParityCase(hf=str(hf), weights=start_weights, dtype="bfloat16", seq_len=512, **fields))

    write_cases(cases, work / "cases.json")
    out = folder / f"parity_{args.ranks}.json"
    program = ["-m", "tests.gpu.parity", str(work / "cases.json"), str(out), args.platform]
    done = subprocess.run([*torchrun(args.ranks), *program], check=False)
    for name, result in json.loads(out.read_text()).items():
        for number, step in enumerate(result.get("steps", [])):
            print(
                f"{'ok    ' if step['ok'] else 'FAILED'} {name} | step {number} | loss {step['loss']:.6f} "
                f"transformers {step['reference']:.6f} ({step['loss_error']:.1e}) | gradient error "
                f"{step['gradient_error']:.3f} transformers {step['transformers_bf16_gradient_error']:.3f} "
                f"| worst {next(iter(step['worst']))}",
                *(f"| {key} {step[key]}" for key in ("mtp", "departs") if step.get(key)),
            )
    return done.returncode


def run_as_rank(arguments: list[str]) -> int:
    run_plain_case = worker.run_case

    def run_case(case: ParityCase, platform: Platform) -> dict[str, Any]:
        return mtp_reference.run_case(case, platform) if case.mtp else run_plain_case(case, platform)

    worker.run_case = run_case
    return worker.main(arguments)


if __name__ == "__main__":
    sys.exit(run_as_rank(sys.argv[1:]) if "RANK" in os.environ else main())
