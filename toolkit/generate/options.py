"""Options of ``megatron-vl generate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from megatron_vl.errors import UserError
from toolkit.options import option, require_exactly_one
from toolkit.video_rules import VideoRuleOptions

GENERATE_NOTES = """
The answer is greedy: it takes the likeliest token each time, until a token ends the turn
(generation_config.json; without that file, config.json and the tokenizer say which tokens do) or
--max-new-tokens is reached. Answers alone go to standard output. Those of several prompts begin with
their number, as in [2], or [2, cut] where --max-new-tokens ended the answer, which a line on standard
error says too; for programs there is --json. The sampling that generation_config.json sets is not
used. In float32
the answer equals that of transformers' generate(do_sample=False, repetition_penalty=1.0), token for
token. What a model thinks is not part of its answer; an answer that ends while the model still
thinks is empty. Each rank keeps the keys and
values of earlier tokens (4 x layers x key/value heads x head dimension bytes per token in bfloat16,
divided by tp x pp) and encodes each picture once. Prompts are answered --batch at a time. A
checkpoint in another layout need not be split first. The command starts one process per rank on
this machine. With GPUs these are tp x pp processes, or a multiple of that if the experts are spread
further (--ep, --etp); each of these replicas answers its share of the prompts.
"""


@dataclass(kw_only=True)
class GenerateOptions(VideoRuleOptions):
    """Answer pictures, videos and text with Megatron weights in any tensor x pipeline x expert layout."""

    epilog: ClassVar[str] = GENERATE_NOTES

    checkpoint: Path = option(metavar="DIR", must_exist=True)
    """Megatron weights in any layout, a training run's folder (its latest step), or one of
    its step folders."""
    adapter: Path | None = option(None, metavar="DIR", must_exist=True)
    """Add these LoRA adapters to --checkpoint: a run with LoRA (its latest step), or a PEFT folder."""
    hf: Path = option(metavar="HF_DIR", must_exist=True)
    """Hugging Face folder of origin; gives tokenizer, chat template and processor."""
    prompt: list[str] = option([], metavar="TEXT", repeat=True)
    """What the user says after the pictures and videos. For several prompts, use --prompt-file."""
    prompt_file: list[Path] = option([], metavar="FILE", repeat=True, must_exist=True)
    """JSON or JSON lines of conversations, in OpenAI or ShareGPT style. The next turn of each is answered; a
    final assistant turn is left out. May be repeated."""
    image: list[Path] = option([], metavar="FILE", repeat=True, must_exist=True)
    """Picture for --prompt. May be repeated."""
    video: list[Path] = option([], metavar="FILE", repeat=True, must_exist=True)
    """Video for --prompt. May be repeated."""
    media_root: Path | None = option(None, metavar="DIR", shown_default="the file's folder")
    """Folder with the media of --prompt-file."""
    max_new_tokens: int | None = option(
        None, metavar="N", minimum=1, shown_default="128; 2048 if the model thinks"
    )
    """Generate at most N tokens per answer, including what the model thinks."""
    thinking: Literal["on", "off"] | None = option(None, shown_default="what the chat template does")
    """Whether the model thinks before it answers, for models that leave the choice to the request
    (enable_thinking of the chat template)."""
    show_thinking: bool = False
    """Also print what the model thinks."""
    tp: int = option(1, metavar="T", minimum=1)
    """Tensor parallel size in ranks."""
    pp: int = option(1, metavar="P", minimum=1)
    """Pipeline parallel size in stages."""
    ep: int = option(1, metavar="E", minimum=1)
    """Expert parallel size in ranks, for models with experts."""
    etp: int = option(1, metavar="R", minimum=1)
    """Expert tensor parallel size in ranks; each expert's matrices are split."""
    layers: list[int] | None = option(None, metavar="6,8,8,6", shown_default="even")
    """Decoder layers of each stage."""
    batch: int = option(8, metavar="N", minimum=1)
    """Answer N prompts together."""
    dtype: Literal["float32", "bfloat16"] | None = option(
        None, shown_default="bfloat16 on GPUs, float32 on CPU"
    )
    """Data type of the computation."""
    platform: Literal["auto", "cpu", "cuda"] = option("auto", shown_default="cuda where there is a GPU")
    """Where the ranks run."""
    video_fps: float = option(2.0, metavar="F")
    """Frames per second to take from a video."""
    video_max_frames: int = option(32, metavar="N", minimum=1)
    """Take at most N frames of a video."""
    json: bool = False
    """Print JSON with text, thinking (null without any), tokens, prompt_tokens and finished (false if
    --max-new-tokens ended it) of each answer."""

    @property
    def layout_arguments(self) -> dict[str, Any]:
        """Arguments of :func:`megatron_vl.spec.layout.make_layout`."""
        return {name: getattr(self, name) for name in ("tp", "pp", "layers", "ep", "etp")}

    def check(self) -> None:
        require_exactly_one(self, "prompt", "prompt_file")
        if len(self.prompt) > 1:
            raise UserError("--prompt is given more than once; several prompts go into a --prompt-file")
        if self.prompt and not (self.prompt[0].strip() or self.image or self.video):
            raise UserError("--prompt is empty; give a text, or a picture or video (--image, --video)")
        if self.prompt_file and (self.image or self.video):
            raise UserError("--image and --video need --prompt; records of a --prompt-file name their media")
