"""Options of ``megatron-vl evaluate``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.common.options import CommandOptions, option


@dataclass(kw_only=True)
class EvaluateOptions(CommandOptions):
    """Compare a converted checkpoint with its original, and score both, and a trained one, with VLMEvalKit.

    Tensors are compared bit for bit, and all answers; scores are shown side by side. Nothing is
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
    with the columns index, image (base64), question, A to D and answer. Tables of VLMEvalKit are read from
    $LMUData (or ~/LMUData), sets of videos from Hugging Face's cache ($HF_HOME)."""
    limit: int | None = option(None, metavar="N", minimum=1, shown_default="all")
    """Ask only the first N questions."""
    out: Path = option(metavar="DIR")
    """Folder for report.json, exports and work/, which has all answers."""
    judge: str = option("", metavar="NAME@URL", shown_default="the answers are matched exactly")
    """Model that judges the answers, and the address on this machine of the OpenAI-compatible server that has
    it: my-judge@http://localhost:8000/v1."""
    thinking: Literal["on", "off"] | None = option(None, shown_default="what the chat template does")
    """Whether models think before they answer (enable_thinking of the chat template)."""
    max_new_tokens: int | None = option(None, metavar="N", minimum=1, shown_default="256; thinking 32768")
    """Generate at most N tokens per answer, including what the model thinks."""
