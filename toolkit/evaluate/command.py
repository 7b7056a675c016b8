"""``megatron-vl evaluate``: compares a converted checkpoint with its original and scores a trained one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vl.errors import UsageError

from .options import EvaluateOptions

if TYPE_CHECKING:
    from toolkit.evaluate.comparison import Result


def evaluate(options: EvaluateOptions) -> int:
    """Runs the gates and writes the report. Returns the exit code."""
    from toolkit.evaluate.early import check_data, find_data

    usual = Path(os.environ.get("LMUData") or Path.home() / "LMUData")
    try:
        options.data, lmu_data = find_data(options.data, options.lmu_data, usual)
        check_data(options.data, lmu_data, not options.no_scores)
        result = _evaluate(options, lmu_data)
    # A folder without a checkpoint is a wrong argument too.
    except (UsageError, ValueError, FileNotFoundError) as error:
        print(f"megatron-vl evaluate: {error}", file=sys.stderr)
        return 2
    from toolkit.evaluate.report import print_report, write_html

    (options.out / "report.json").write_text(json.dumps(result.as_json(), indent=2) + "\n")
    write_html(result, options.out / "report.html")
    if options.json:
        print(json.dumps(result.as_json()))
    else:
        print_report(result, options.out)
    return 0 if result.passed else 1


def _evaluate(given: EvaluateOptions, lmu_data: Path) -> Result:
    """Raises like :func:`toolkit.evaluate.comparison.evaluate`."""
    from toolkit.evaluate.comparison import EvaluationOptions, evaluate

    roles = {"original": given.original, "converted": given.converted, "trained": given.trained}
    same = (
        "data out limit judge dtype device processes gpus_per_process min_pixels max_pixels max_new_tokens "
        "logit_questions keep_going video_fps video_max_frames"
    )
    options = EvaluationOptions(
        checkpoints={role: folder for role, folder in roles.items() if folder is not None},
        judge_url=given.judge_base_url,
        scores=not given.no_scores,
        thinking=given.thinking,
        video_rules=given.asked_rules(),
        lmu_data=lmu_data,
        **{name: getattr(given, name) for name in same.split()},
    )
    return evaluate(options, lambda line: print(line, file=sys.stderr, flush=True))
