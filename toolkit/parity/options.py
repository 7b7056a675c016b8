"""Options of ``megatron-vl parity``."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megatron_vl.spec.families import FAMILIES
from megatron_vl.system.errors import UserError
from toolkit.common.layouts import LAYOUT_GRAMMAR, LayoutSpec, parse_layouts
from toolkit.common.options import CommandOptions, option


@dataclass(kw_only=True)
class ParityOptions(CommandOptions):
    """Compare loss, logits, layers and gradients of any layout with transformers, on real images.

    Names the first layer that departs. Exit code 1 if a layout departs.
    """

    epilog: ClassVar[str] = f"""Layouts: {LAYOUT_GRAMMAR}.

Memory. transformers runs first and alone, in float32, on a GPU that holds it and otherwise on CPU. It needs
8 bytes per parameter for weights and gradients, and activations without recomputation. Then each rank of a
layout holds 8 bytes (float32) or 6 bytes (bfloat16) per parameter of its own. A 7B model needs 66 GiB for
transformers, then 46 GiB / (tp x pp) in bfloat16. Gradients go through files in the temporary folder
(TMPDIR), at most 8 bytes per parameter.
"""

    hf: str = option(metavar="HF")
    """Hugging Face checkpoint folder; or a family such as qwen2_5_vl, of which a small model with random
    weights is compared."""
    layouts: str = option(metavar="LIST")
    """Layouts to compare, separated by commas, such as 1,tp2sp,tp2pp2vpp2; see below."""
    checkpoint: Path | None = option(
        None, metavar="DIR", must_exist=True, shown_default="a fresh conversion of --hf"
    )
    """Compare these Megatron weights (in any layout), or those of a run, with the folder of --hf. If they
    were trained with model.rope_scaling, transformers has it too."""
    dtype: Literal["float32", "bfloat16"] = option("float32")
    """Data type of the layouts. float32 must agree with transformers within rounding. bfloat16 may depart
    from float32 at most 1.5 times as far as transformers in bfloat16; use it on GPUs. (On CPU,
    Megatron-core rounds RoPE's factors to bfloat16, and transformers does not. torch's LayerNorm sums its
    gradients in bfloat16 there, here over all images of a row.)"""
    lora: int = option(0, metavar="RANK", minimum=1)
    """Give every matrix a random LoRA adapter of this rank, made by peft, and compare the gradients of the
    adapters instead."""

    @property
    def family(self) -> str:
        """The family of a small model with random weights; empty for a checkpoint."""
        return self.hf if self.hf in FAMILIES and not Path(self.hf).exists() else ""

    @property
    def layout_specs(self) -> list[LayoutSpec]:
        return parse_layouts(self.layouts)

    def check(self) -> None:
        parse_layouts(self.layouts)
        if self.family and self.checkpoint:
            raise UserError("--checkpoint needs a folder as --hf: a family gets weights of its own")
