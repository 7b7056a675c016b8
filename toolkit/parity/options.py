"""Options of ``megatron-vl parity``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megatron_vl.errors import UsageError, UserError
from toolkit.layouts import GRAMMAR, LayoutTextError, parse_layouts
from toolkit.options import CommandOptions, exactly_one, option

MEMORY = """
Memory. transformers runs first, alone, on one device: 8 bytes a parameter for weights and gradients
in float32 (bfloat16 needs that too: it is judged by how far it takes transformers from float32),
and activations without recomputation. Then each rank of a layout holds 8 bytes (float32) or 6 bytes
(bfloat16) of each of its own parameters; --steps adds AdamW's state, 8 or 12 bytes. A 7B model: 66
GiB for transformers, then 46 GiB / (tp x pp) in bfloat16. Gradients and activations go over files
in the temporary folder (TMPDIR): 12 bytes a parameter at most. Where transformers does not fit,
--reference-device cpu.
"""


@dataclass(kw_only=True)
class ParityOptions(CommandOptions):
    """Compare loss, logits, layers and gradients of any layout with transformers, on real pictures.

    Names the first layer that departs. Exit code 1 when a layout departs.
    """

    epilog: ClassVar[str] = f"Layouts: {GRAMMAR}.\n{MEMORY}"

    hf: Path | None = option(None, metavar="HF_DIR", must_exist=True)
    """Hugging Face checkpoint folder."""
    family: str = option("", metavar="NAME")
    """A small model of this family with random weights instead of --hf: qwen2_5_vl, ..."""
    layouts: str = option(metavar="LIST")
    """Layouts with commas between, such as 1,tp2sp,tp2pp2vpp2; see below."""
    checkpoint: Path | None = option(
        None, metavar="DIR", must_exist=True, shown_default="a fresh conversion of --hf"
    )
    """Compare these Megatron weights (any layout, or a run) with the folder of --hf."""
    image: list[Path] = option([], metavar="FILE", repeat=True, must_exist=True)
    """A picture of your own. May be repeated."""
    dtype: Literal["float32", "bfloat16"] = option("float32")
    """float32: within rounding. bfloat16, for GPUs: not further from float32 than transformers in bfloat16,
    times 1.5. (On CPU Megatron-core rounds RoPE's factors to bfloat16, which transformers does not.)"""
    platform: Literal["auto", "cpu", "cuda"] = option("auto", shown_default="cuda where there is a GPU")
    """Where the ranks run."""
    reference_device: str = option("", metavar="DEVICE", shown_default="as --platform")
    """Where transformers runs."""
    steps: int = option(0, metavar="N", least=1)
    """Compare N optimizer steps instead: losses, gradient norms, weights and Adam's moments at the end
    (float32)."""
    json: bool = False
    """Print the results as JSON."""

    def check(self) -> None:
        exactly_one(self, "hf", "family")
        try:
            parse_layouts(self.layouts)
        except LayoutTextError as error:
            raise UsageError(f"--layouts: {error}") from error
        if self.steps and self.dtype != "float32":
            raise UserError(
                f"--steps {self.steps}: the number of steps of a float32 comparison; leave --dtype at float32"
            )
        if self.family and self.checkpoint:
            raise UserError("--checkpoint needs --hf: weights of --family are made for this comparison alone")
