"""Options of ``megatron-vl generate``."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megatron_vl.system.errors import UsageError
from toolkit.common.options import CommandOptions, option


@dataclass(kw_only=True)
class GenerateOptions(CommandOptions):
    """Answer a prompt, or the prompts of a data set, with transformers.

    A training run is exported first, with its LoRA adapters merged. The export stays in the run's folder and
    is used again while its weights are the same. Answers are greedy, and media are encoded as in training, by
    the fields data.* of the run.
    """

    run_fields: ClassVar[bool] = True

    checkpoint: Path = option(metavar="DIR", must_exist="model")
    """A Hugging Face folder, a training run's folder (its latest step), or one of its step folders. A run
    needs --model.hf, or --config with its YAML."""
    prompt: str = option("", metavar="TEXT")
    """What the user says after the images and videos."""
    image: list[Path] = option([], metavar="FILE", several=True, must_exist=True)
    """Images for --prompt."""
    video: list[Path] = option([], metavar="FILE", several=True, must_exist=True)
    """Videos for --prompt."""
    out: Path | None = option(None, metavar="FILE")
    """Answer the data set data.path, its split eval.split, instead of a prompt: each sample up to its first
    answer that is trained on. JSON lines are written to FILE: key, prompt, reference and answer of each."""
    max_new_tokens: int | None = option(
        None, metavar="N", minimum=1, shown_default="128; 2048 if the model thinks"
    )
    """Generate at most N tokens per answer, including what the model thinks."""
    thinking: Literal["on", "off"] | None = option(None, shown_default="what the chat template does")
    """Whether the model thinks before it answers --prompt (enable_thinking of the chat template). What it
    thinks goes to standard error."""

    def check(self) -> None:
        has_prompt = bool(self.prompt.strip() or self.image or self.video)
        if (self.out is not None) == has_prompt:
            raise UsageError(
                "give either --prompt with its images and videos (--image, --video), or --out FILE for the"
                " answers to the data set --data.path"
            )
        if self.out is not None and self.out.exists():
            raise UsageError(f"--out {self.out} exists; remove it or name another file")
