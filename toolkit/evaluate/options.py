"""Options of ``megatron-vl evaluate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.options import CommandOptions, option


@dataclass(kw_only=True)
class EvaluateOptions(CommandOptions):
    """Compare a converted checkpoint with its original, and score both, and a trained one, with VLMEvalKit.

    Tensors and the logits of some prompts are compared bit for bit; scores are shown side by side. Nothing is
    downloaded. Exit code 1 if something differs or a score is missing, 2 if the arguments are invalid.
    """

    original: Path = option(metavar="HF_DIR")
    """Hugging Face folder that was converted."""
    converted: Path = option(metavar="DIR", must_exist=True)
    """Megatron weights that were converted from it, or the Hugging Face folder that they were exported to."""
    trained: Path | None = option(None, metavar="DIR", must_exist=True)
    """A run, Megatron weights, LoRA adapters (a run's or a PEFT folder) or a Hugging Face folder; it is
    scored but not compared. What is no Hugging Face folder is exported to OUT/trained, adapters merged."""
    data: str = option(metavar="NAME")
    """Name of a VLMEvalKit data set (such as Video-MME_8frame), or path of your own table FOLDER/NAME.tsv
    with the columns index, image (base64), question, A to D and answer."""
    lmu_data: Path | None = option(None, metavar="DIR", shown_default="$LMUData, or ~/LMUData")
    """Folder that holds NAME.tsv. Sets of videos are read from Hugging Face's cache ($HF_HOME)."""
    limit: int | None = option(None, metavar="N", minimum=1, shown_default="all")
    """Ask only the first N questions."""
    out: Path = option(metavar="DIR")
    """Folder for report.json, exports and work/, which has all answers."""
    judge: str = option("exact_matching", metavar="NAME", shown_default="exact_matching, which needs none")
    """Model that judges the answers."""
    judge_base_url: str | None = option(None, metavar="URL")
    """Address on this machine of an OpenAI-compatible server for --judge: http://localhost:8000/v1."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = option(None, shown_default="the original's")
    """Data type of all models."""
    processes: int | None = option(None, metavar="N", minimum=1, shown_default="as GPUs hold models")
    """Processes that share the questions and the GPUs."""
    min_pixels: int | None = option(None, metavar="N", minimum=1, shown_default="the checkpoint's")
    """Smallest image in pixels; of Qwen2-VL and Qwen2.5-VL also smallest frame."""
    max_pixels: int | None = option(None, metavar="N", minimum=1, shown_default="the checkpoint's")
    """Largest image in pixels; of Qwen2-VL and Qwen2.5-VL also largest frame."""
    video_max_frames: int | None = option(None, metavar="N", minimum=1, shown_default="768, as released")
    """Sample at most N frames where the data set's name gives frames per second."""
    thinking: Literal["on", "off"] | None = option(None, shown_default="what the chat template does")
    """Whether models think before they answer (enable_thinking of the chat template)."""
    max_new_tokens: int | None = option(None, metavar="N", minimum=1, shown_default="256; thinking 32768")
    """Generate at most N tokens per answer, including what the model thinks."""
    json: bool = False
    """Print the report as JSON."""
