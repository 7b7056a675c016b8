"""Options of the commands about weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vl.errors import UsageError
from toolkit.options import CommandOptions, option

if TYPE_CHECKING:
    from megatron_vl.config import TrainConfig

SIZE_FIELDS = ("tp", "pp", "vpp", "ep", "etp")
ONE_RANK: dict[str, Any] = {**dict.fromkeys(SIZE_FIELDS, 1), "layers": None}


@dataclass(kw_only=True)
class LayoutOptions(CommandOptions):
    """Options that say how weights are split."""

    config: Path | None = option(None, metavar="RUN.yaml", must_exist=True)
    """Take the layout from the parallel section of this run; the options below override it."""
    tp: int | None = option(None, metavar="T", shown_default="1")
    """Tensor parallel size in ranks."""
    pp: int | None = option(None, metavar="P", shown_default="1")
    """Pipeline parallel size in stages."""
    vpp: int | None = option(None, metavar="V", shown_default="1")
    """Virtual pipeline chunks per stage."""
    layers: list[int] | None = option(None, metavar="6,8,8,6", shown_default="even; with --config, planned")
    """Decoder layers of each of the pp x vpp chunks, in model order."""
    ep: int | None = option(None, metavar="E", shown_default="1")
    """Expert parallel size in ranks, for models with experts."""
    etp: int | None = option(None, metavar="R", shown_default="1")
    """Expert tensor parallel size in ranks; each expert's matrices are split."""

    @property
    def layout_arguments(self) -> dict[str, Any] | None:
        """Arguments of :func:`megatron_vl.spec.layout.make_layout`; None when no layout is given."""
        given_sizes = {}
        for field_name in (*SIZE_FIELDS, "layers"):
            if getattr(self, field_name) is not None:
                given_sizes[field_name] = getattr(self, field_name)

        if self.config is None:
            return ONE_RANK | given_sizes if given_sizes else None
        from megatron_vl.config import parse_config

        run_config = parse_config(["--config", str(self.config)])
        run_config = dataclasses.replace(
            run_config, parallel=dataclasses.replace(run_config.parallel, **given_sizes)
        )
        run_layout_arguments = {name: getattr(run_config.parallel, name) for name in (*SIZE_FIELDS, "layers")}
        if not isinstance(run_config.parallel.layers, list):
            planned_layers = self._planned_layers(run_config) if run_config.parallel.pp > 1 else None
            run_layout_arguments["layers"] = planned_layers
        return run_layout_arguments

    def _planned_layers(self, run_config: TrainConfig) -> list[int]:
        """The planned split, which a run without ``parallel.layers`` gets."""
        from megatron_vl.estimate.split import planned_layout
        from megatron_vl.spec.families import read_spec

        hf_path = getattr(self, "hf", None) or run_config.model.hf
        try:
            spec = read_spec(hf_path)
        except OSError as error:
            raise UsageError(
                f"{self.config} has no parallel.layers, and the split cannot be planned without the model's"
                f" sizes ({error}): correct model.hf, or give the split with --layers"
            ) from error
        return list(planned_layout(run_config, spec).layers_per_chunk)


@dataclass(kw_only=True)
class WeightCommandOptions(CommandOptions):
    """Options of all commands about weights."""

    workers: int = option(0, metavar="N", shown_default="one a core, at most 8")
    """Read and write with N threads."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(kw_only=True)
class WeightOutputOptions(WeightCommandOptions):
    """Options of all commands that write weights."""

    out: Path = option(metavar="DIR")
    """Write to this folder. It must be new, empty, or left by the same command when that was interrupted; the
    command then continues from there."""
    force: bool = False
    """Replace the checkpoint or unfinished conversion in --out."""


@dataclass(kw_only=True)
class ConvertOptions(WeightOutputOptions, LayoutOptions):
    """Convert a Hugging Face folder to Megatron weights, unsplit or, if a layout is given, split."""

    hf: Path = option(metavar="HF_DIR", must_exist=True)
    """Hugging Face checkpoint folder (safetensors)."""
    adapter: Path | None = option(None, metavar="PEFT_DIR", must_exist=True)
    """Convert this LoRA adapter of --hf, in PEFT's files, instead of the model. lora.adapter of a run takes
    the result."""


@dataclass(kw_only=True)
class SplitOptions(WeightOutputOptions, LayoutOptions):
    """Split Megatron weights of any layout into one file per tensor or expert x pipeline rank."""

    checkpoint: Path = option(metavar="DIR", must_exist=True)
    """Megatron weights in any layout, a training run's folder (its latest step), or one of
    its step folders."""


@dataclass(kw_only=True)
class MergeOptions(WeightOutputOptions):
    """Merge Megatron weights of any layout into unsplit Megatron weights."""

    checkpoint: Path = option(metavar="DIR", must_exist=True)
    """Megatron weights in any layout, a training run's folder (its latest step), or one of
    its step folders."""


@dataclass(kw_only=True)
class ExportOptions(WeightOutputOptions):
    """Export Megatron weights of any layout to a Hugging Face folder with the same files as the original.

    A run with LoRA has adapters only: say with --adapter or --merge what becomes of them.
    """

    checkpoint: Path = option(metavar="DIR", must_exist=True)
    """Megatron weights in any layout, a training run's folder (its latest step), or one of
    its step folders. With --merge also a PEFT folder."""
    hf: Path = option(metavar="HF_DIR", must_exist=True)
    """Hugging Face folder that the weights came from. It determines tensor names, types and files; config,
    tokenizer, processor and chat template are copied from it."""
    adapter: bool = False
    """Write the adapters of a run with LoRA as a folder that PEFT loads."""
    merge: bool = False
    """Add the adapters to the weights of --hf (in float32, rounded once) and write a whole model."""


@dataclass(kw_only=True)
class VerifyOptions(WeightCommandOptions):
    """Compare the tensors of two checkpoints bit for bit. Exit code 1 when they differ."""

    a: Path = option(metavar="A", positional=True, must_exist=True)
    """Hugging Face folder, or Megatron weights of any layout."""
    b: Path | None = option(None, metavar="B", positional=True, must_exist=True)
    """Second folder. Hugging Face folders may differ in naming style (model.layers,
    model.language_model.layers). Without it, the Megatron weights A are checked against their hashes."""
    show: int = option(10, metavar="N")
    """Name at most N differing tensors."""
