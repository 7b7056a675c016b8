"""``megatron-vl evaluate``: a converted checkpoint against its original, and a trained one's scores."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.commands.arguments import add_video_rules

if TYPE_CHECKING:
    from toolkit.evaluate.run import Result


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    text = "compare a converted checkpoint with its original down to a benchmark's scores (VLMEvalKit), and score a trained one"
    parser = subparsers.add_parser(
        "evaluate",
        help=text,
        description=text[0].upper() + text[1:] + ". Four gates, in this order: tensors bit for bit, logits of some prompts, "
        "generated answers, scores. Nothing is downloaded. Exit code 1 when a gate fails or a score is missing, 2 when the "
        "arguments cannot be used.",
    )
    folder = {"type": Path, "metavar": "HF_DIR"}
    parser.add_argument("--original", **folder, required=True, help="Hugging Face folder that was converted")
    parser.add_argument("--converted", **folder, required=True, help="Hugging Face folder exported again, before any training")
    parser.add_argument("--trained", **folder, help="Hugging Face folder exported after training: scored, not judged")
    parser.add_argument(
        "--data",
        required=True,
        metavar="NAME",
        help="a data set of VLMEvalKit (of videos too: Video-MME_8frame), or NAME.tsv of your own: tabs between columns, "
        "multiple choice with index, image (base64), question, A to D, answer",
    )
    parser.add_argument(
        "--lmu-data",
        type=Path,
        metavar="DIR",
        help="folder that holds NAME.tsv, or of a set of videos its repository, DIR/Video-MME (default: $LMUData, or ~/LMUData)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="questions to ask (default: all)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for report.html, report.json and work/")
    parser.add_argument(
        "--judge", default="exact_matching", metavar="NAME", help="model that judges (default: exact_matching, which needs none)"
    )
    parser.add_argument(
        "--judge-base-url", metavar="URL", help="where --judge is served on this machine, as by OpenAI: http://localhost:8000/v1"
    )
    parser.add_argument("--no-scores", action="store_true", help="end with the answers: for data sets that a model would judge")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="type of all models (default: the original's weights')"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="processes that share the questions (default: one a GPU; CPU: one)"
    )
    parser.add_argument(
        "--gpus-per-process", type=int, default=1, metavar="N", help="GPUs that one model is spread over (default: 1; 72B: 4)"
    )
    parser.add_argument(
        "--min-pixels", type=int, metavar="N", help="smallest picture or frame, pixels (default: the checkpoint's)"
    )
    parser.add_argument(
        "--max-pixels", type=int, metavar="N", help="largest picture or frame, pixels (default: the checkpoint's)"
    )
    parser.add_argument(
        "--video-fps", type=float, metavar="F", help="frames a second where the data set does not say (default: the checkpoint's)"
    )
    parser.add_argument(
        "--video-max-frames", type=int, metavar="N", help="most frames taken by frames a second (default: the checkpoint's)"
    )
    add_video_rules(parser)
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer in tokens (default: 256)")
    parser.add_argument(
        "--logit-questions", type=int, default=4, metavar="N", help="prompts whose logits are compared (default: 4)"
    )
    parser.add_argument("--keep-going", action="store_true", help="run all gates even when an earlier one has failed")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from toolkit.evaluate.early import UsageError, check_data

    lmu_data = args.lmu_data or Path(os.environ.get("LMUData") or Path.home() / "LMUData")
    try:
        check_data(args.data, lmu_data, not args.no_scores)
        result = _evaluate(args, lmu_data)
    except (UsageError, ValueError, FileNotFoundError) as error:  # a folder that is no checkpoint is a wrong argument too
        print(f"megatron-vl evaluate: {error}", file=sys.stderr)
        return 2
    from toolkit.evaluate.report import print_report, write_html

    (args.out / "report.json").write_text(json.dumps(result.as_json(), indent=2) + "\n")
    write_html(result, args.out / "report.html")
    if args.json:
        print(json.dumps(result.as_json()))
    else:
        print_report(result, args.out)
    return 0 if result.passed else 1


def _evaluate(args: argparse.Namespace, lmu_data: Path) -> Result:
    """Raises as :func:`toolkit.evaluate.run.evaluate`."""
    from toolkit.evaluate.run import Options, evaluate

    roles = {"original": args.original, "converted": args.converted, "trained": args.trained}
    same = (
        "data out limit judge dtype device processes gpus_per_process min_pixels max_pixels max_new_tokens logit_questions "
        "keep_going video_fps video_max_frames video_positions video_prompt"
    )
    options = Options(
        checkpoints={role: folder for role, folder in roles.items() if folder is not None},
        judge_url=args.judge_base_url,
        scores=not args.no_scores,
        lmu_data=lmu_data,
        **{name: getattr(args, name) for name in same.split()},
    )
    return evaluate(options, lambda line: print(line, file=sys.stderr, flush=True))
