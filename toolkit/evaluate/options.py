"""Options of ``megatron-vl evaluate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_vl.errors import UsageError
from toolkit.options import CommandOptions, option


@dataclass(kw_only=True)
class EvaluateOptions(CommandOptions):
    """Compare a converted checkpoint with its original, up to benchmark scores (VLMEvalKit), and score
    a trained one.

    Four gates run in this order: tensors bit for bit, logits of some prompts, generated answers, scores.
    Nothing is downloaded. Exit code 1 if a gate fails or a score is missing, 2 if the arguments are invalid.
    """

    original: Path = option(metavar="HF_DIR")
    """Hugging Face folder that was converted."""
    converted: Path = option(metavar="HF_DIR")
    """Hugging Face folder that was exported again, before any training."""
    trained: Path | None = option(None, metavar="HF_DIR")
    """Hugging Face folder exported after training; it is scored but not compared."""
    adapter: Path | None = option(None, metavar="DIR", must_exist=True)
    """LoRA adapters of --original in place of --trained: a run with LoRA (its latest step), or a PEFT folder.
    They are merged into OUT/merged, which is scored."""
    data: str = option(metavar="NAME")
    """Name of a VLMEvalKit data set (also of videos, such as Video-MME_8frame), or path of your own table
    FOLDER/NAME.tsv: tab-separated multiple choice with the columns index, image (base64), question, A to
    D and answer."""
    lmu_data: Path | None = option(None, metavar="DIR", shown_default="$LMUData, or ~/LMUData")
    """Folder that holds NAME.tsv. Sets of videos are read from Hugging Face's cache ($HF_HOME)."""
    limit: int | None = option(None, metavar="N", minimum=1, shown_default="all")
    """Ask only the first N questions."""
    out: Path = option(metavar="DIR")
    """Folder for report.html, report.json and work/."""
    judge: str = option("exact_matching", metavar="NAME", shown_default="exact_matching, which needs none")
    """Model that judges the answers."""
    judge_base_url: str | None = option(None, metavar="URL")
    """Address on this machine of an OpenAI-compatible server for --judge: http://localhost:8000/v1."""
    no_scores: bool = False
    """Stop after the answers; use this for data sets that need a model as judge."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = option(
        None, shown_default="the original's weights'"
    )
    """Data type of all models."""
    device: Literal["cpu", "cuda"] | None = option(None, shown_default="cuda where there is a GPU")
    """Where the models run."""
    processes: int | None = option(None, metavar="N", minimum=1, shown_default="one a GPU; CPU: one")
    """Processes that share the questions."""
    gpus_per_process: int = option(1, metavar="N", minimum=1, shown_default="1; 72B: 4")
    """GPUs over which one model is spread."""
    min_pixels: int | None = option(None, metavar="N", minimum=1, shown_default="the checkpoint's")
    """Smallest picture or frame in pixels."""
    max_pixels: int | None = option(None, metavar="N", minimum=1, shown_default="the checkpoint's")
    """Largest picture or frame in pixels."""
    video_fps: float | None = option(None, metavar="F", shown_default="the checkpoint's")
    """Frames per second to sample where the data set does not say."""
    video_max_frames: int | None = option(None, metavar="N", minimum=1, shown_default="the checkpoint's")
    """Sample at most N frames when sampling by frames per second."""
    thinking: Literal["on", "off"] | None = option(None, shown_default="what the chat template does")
    """Whether models think before they answer, for those that leave the choice to the request
    (enable_thinking of the chat template). What they think is not part of the answer."""
    max_new_tokens: int | None = option(
        None, metavar="N", minimum=1, shown_default="256; 32768 if the model thinks, as in VLMEvalKit"
    )
    """Generate at most N tokens per answer, including what the model thinks."""
    logit_questions: int = option(4, metavar="N", minimum=1)
    """Compare the logits of N prompts."""
    keep_going: bool = False
    """Run all gates even if an earlier one fails."""
    json: bool = False
    """Print the report as JSON."""

    def check(self) -> None:
        if self.trained is not None and self.adapter is not None:
            raise UsageError("give --trained or --adapter, not both")

    @property
    def checkpoints(self) -> dict[str, Path]:
        """Role (``original``, ``converted``, ``trained``) -> Hugging Face folder."""
        roles = {"original": self.original, "converted": self.converted, "trained": self.trained}
        return {role: hf_folder for role, hf_folder in roles.items() if hf_folder is not None}

    @property
    def tables(self) -> Path:
        """The folder of the tables, once the command has found it."""
        assert self.lmu_data is not None
        return self.lmu_data.resolve()
