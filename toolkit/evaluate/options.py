"""Options of ``megatron-vl evaluate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.options import option
from toolkit.video_rules import VideoRuleOptions


@dataclass(kw_only=True)
class EvaluateOptions(VideoRuleOptions):
    """Compare a converted checkpoint with its original down to a benchmark's scores (VLMEvalKit), and score a
    trained one.

    Four gates, in this order: tensors bit for bit, logits of some prompts, generated answers, scores. Nothing
    is downloaded. Exit code 1 when a gate fails or a score is missing, 2 when the arguments cannot be used.
    """

    original: Path = option(metavar="HF_DIR")
    """Hugging Face folder that was converted."""
    converted: Path = option(metavar="HF_DIR")
    """Hugging Face folder exported again, before any training."""
    trained: Path | None = option(None, metavar="HF_DIR")
    """Hugging Face folder exported after training: scored, not judged."""
    data: str = option(metavar="NAME")
    """The name of a data set of VLMEvalKit (of videos too: Video-MME_8frame), or the path of a table of your
    own, FOLDER/NAME.tsv: tabs between columns, multiple choice with index, image (base64), question, A to D,
    answer."""
    lmu_data: Path | None = option(None, metavar="DIR", shown_default="$LMUData, or ~/LMUData")
    """Folder that holds NAME.tsv, or of a set of videos its repository, DIR/Video-MME."""
    limit: int | None = option(None, metavar="N", shown_default="all")
    """Questions to ask."""
    out: Path = option(metavar="DIR")
    """Folder for report.html, report.json and work/."""
    judge: str = option("exact_matching", metavar="NAME", shown_default="exact_matching, which needs none")
    """Model that judges."""
    judge_base_url: str | None = option(None, metavar="URL")
    """Where --judge is served on this machine, as by OpenAI: http://localhost:8000/v1."""
    no_scores: bool = False
    """End with the answers: for data sets that a model would judge."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = option(
        None, shown_default="the original's weights'"
    )
    """Type of all models."""
    device: Literal["cpu", "cuda"] | None = option(None, shown_default="cuda where there is a GPU")
    """Where the models run."""
    processes: int | None = option(None, metavar="N", shown_default="one a GPU; CPU: one")
    """Processes that share the questions."""
    gpus_per_process: int = option(1, metavar="N", shown_default="1; 72B: 4")
    """GPUs that one model is spread over."""
    min_pixels: int | None = option(None, metavar="N", shown_default="the checkpoint's")
    """Smallest picture or frame, pixels."""
    max_pixels: int | None = option(None, metavar="N", shown_default="the checkpoint's")
    """Largest picture or frame, pixels."""
    video_fps: float | None = option(None, metavar="F", shown_default="the checkpoint's")
    """Frames a second where the data set does not say."""
    video_max_frames: int | None = option(None, metavar="N", shown_default="the checkpoint's")
    """Most frames taken by frames a second."""
    max_new_tokens: int = option(256, metavar="N")
    """Longest answer in tokens."""
    logit_questions: int = option(4, metavar="N")
    """Prompts whose logits are compared."""
    keep_going: bool = False
    """Run all gates even when an earlier one has failed."""
    json: bool = False
    """Print the report as JSON."""
