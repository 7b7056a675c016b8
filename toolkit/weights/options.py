"""Options of the commands about weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megatron_vl.system.errors import UsageError
from toolkit.common.options import CommandOptions, option

SIZE_FIELDS = ("tp", "pp", "vpp", "ep", "etp")
ONE_RANK: dict[str, Any] = {**dict.fromkeys(SIZE_FIELDS, 1), "layers": None}


@dataclass(kw_only=True)
class LayoutOptions(CommandOptions):
    """Weights in the layout of a run: of its YAML, or of the fields parallel.* on the command line."""

    run_fields: ClassVar[bool] = True

    @property
    def layout_arguments(self) -> dict[str, Any] | None:
        """Arguments of :func:`megatron_vl.spec.layout.make_layout`; None when no layout is given."""
        if not self.fields:
            return None
        from megatron_vl.config import parse_config

        config = parse_config(self.fields)
        arguments = {name: getattr(config.parallel, name) for name in (*SIZE_FIELDS, "layers")}
        if not isinstance(config.parallel.layers, list):
            arguments["layers"] = None
            if config.parallel.pp > 1 and "--config" in self.fields:  # the run gets the planned split
                from megatron_vl.estimate.split import planned_layout
                from megatron_vl.spec.families import read_spec

                spec = read_spec(getattr(self, "hf", None) or config.model.hf)
                arguments["layers"] = list(planned_layout(config, spec).layers_per_chunk)
        return arguments


@dataclass(kw_only=True)
class WeightOutputOptions(CommandOptions):
    """Options of all commands that write weights."""

    out: Path = option(metavar="DIR")
    """Write to this folder, which must be new or empty. It appears when it is complete; until then,
    the output is in DIR.partial, and a command that was interrupted starts again."""
    force: bool = False
    """Replace the checkpoint in --out."""


@dataclass(kw_only=True)
class ConvertOptions(WeightOutputOptions, LayoutOptions):
    """Convert a Hugging Face folder to Megatron weights, unsplit or, if a layout is given, split."""

    hf: Path = option(metavar="HF_DIR", must_exist="model")
    """Hugging Face checkpoint folder (safetensors)."""
    add_tokens: Path | None = option(None, metavar="FILE", must_exist=True)
    """Write a Hugging Face folder with these tokens more (one in each line) and a row for each token, instead
    of Megatron weights. An empty FILE only makes the number of rows one that parallel.tp divides."""

    def check(self) -> None:
        if self.add_tokens is not None and self.fields:
            raise UsageError("--add-tokens writes a Hugging Face folder; leave out the layout")


@dataclass(kw_only=True)
class CheckpointOptions(WeightOutputOptions):
    """Options of the commands that read Megatron weights."""

    checkpoint: Path = option(metavar="DIR", must_exist=True)
    """Megatron weights in any layout, a training run's folder (its latest step), or one of
    its step folders; `export --merge` also takes a PEFT folder."""


@dataclass(kw_only=True)
class SplitOptions(CheckpointOptions, LayoutOptions):
    """Split Megatron weights of any layout into one file per tensor or expert x pipeline rank."""


@dataclass(kw_only=True)
class MergeOptions(CheckpointOptions):
    """Merge Megatron weights of any layout into unsplit Megatron weights."""


@dataclass(kw_only=True)
class ExportOptions(CheckpointOptions):
    """Export Megatron weights of any layout to a Hugging Face folder with the same files as the original.

    A run with LoRA has adapters only: say with --adapter or --merge what becomes of them.
    """

    hf: Path = option(metavar="HF_DIR", must_exist="model")
    """Hugging Face folder that the weights came from. It determines tensor names, types and files; config,
    tokenizer, processor and chat template are copied from it."""
    adapter: bool = False
    """Write the adapters of a run with LoRA as a folder that PEFT loads."""
    merge: bool = False
    """Add the adapters to the weights of --hf (in float32, rounded once) and write a whole model."""
    fp8: bool = False
    """Write the decoder's matrices in FP8 with a scale for each block of 128 x 128, as vLLM reads the
    released *-FP8 folders. Blocks that are equal to those of a FP8 folder in --hf keep their bytes."""

    def check(self) -> None:
        if self.adapter and (self.merge or self.fp8):
            raise UsageError(
                f"--adapter writes the adapters alone, {'--merge' if self.merge else '--fp8'} a whole model;"
                " give one of the two"
            )


@dataclass(kw_only=True)
class VerifyOptions(CommandOptions):
    """Compare the tensors of two checkpoints bit for bit. Exit code 1 when they differ."""

    a: Path = option(metavar="A", positional=True, must_exist=True)
    """Hugging Face folder, or Megatron weights of any layout."""
    b: Path | None = option(None, metavar="B", positional=True, must_exist=True)
    """Second folder. Hugging Face folders may differ in naming style (model.layers,
    model.language_model.layers). Without it, the Megatron weights A are checked against their hashes."""
