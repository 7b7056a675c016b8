"""One dataclass tree = one YAML = the ``--help`` text of ``python -m megatron_vl.train``.

Every field has its unit in its help text. :func:`parse` reads the YAML and the dotted overrides;
:func:`validate` refuses what cannot work before any process group starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import os
import re
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from megatron_vl.config_file import ConfigFileError, field_lines
from megatron_vl.errors import UserError

RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "activation")
"""Valid entries of ``recompute.language_modules``."""
VideoPositions = Literal["released", "transformers_5_3"]
"""The rules for positions after and within a video; :attr:`DataConfig.video_positions` explains them."""
VideoPrompt = Literal["released", "transformers_5_10"]
"""The rules for the text around a video; :attr:`DataConfig.video_prompt` explains them."""
RULES_BEFORE = {"video_positions": "transformers_5_3", "video_prompt": "transformers_5_10"}
"""The rules of checkpoints that name none: of the time before these fields of :class:`DataConfig`."""


class RunConfigError(UserError, ValueError):
    """A value that is unknown or impossible; the message names the field and what would be valid."""


@dataclass
class ModelConfig:
    """The model and what of it is trained."""

    checkpoint: str = ""
    """Megatron weights to start from (output of `megatron-vl convert` or `split`, any layout). Empty: random
    weights."""
    hf: str = ""
    """Hugging Face folder of origin: config, tokenizer, chat template and image processor are read from
    it."""
    freeze_vision: bool = False
    """Keep the vision tower (patch embedding and blocks) as it is."""
    freeze_merger: bool = False
    """Keep the merger (vision features to language width) as it is."""
    freeze_language: bool = False
    """Keep the language model as it is."""
    moe_aux_loss: float | None = None
    """Coefficient of the experts' load-balancing loss, averaged over the layers (transformers: of the layers'
    average; equal for one layer); 0: none; empty: router_aux_loss_coef of the Hugging Face config where its
    output_router_logits is true, none otherwise."""
    vision_attention: Literal["auto", "sdpa", "torch_varlen", "flash_attn", "te", "triton"] = "auto"
    """Packed attention of the vision tower; auto: the fastest measured on the platform (CPU: sdpa); triton:
    our kernels, RoPE included (CUDA, bfloat16)."""
    window_attention: Literal["auto", "fused", "backend"] = "auto"
    """Window layers of the vision tower: fused (one kernel, RoPE included; CUDA, bfloat16) or backend (as
    vision_attention); auto: fused on CUDA."""
    language_attention: Literal["auto", "sdpa", "torch_varlen", "flash_attn", "te"] = "auto"
    """Packed attention of the language model; auto: the fastest measured on the platform (CPU: sdpa)."""


@dataclass
class ParallelConfig:
    """How the model is spread over ranks; data parallel is what is left of the world size."""

    tp: int = 1
    """Tensor parallel size (ranks)."""
    pp: int = 1
    """Pipeline parallel size (stages)."""
    vpp: int = 1
    """Virtual chunks of each pipeline stage (interleaved 1F1B when above 1)."""
    layers: list[int] | None = None
    """Decoder layers of each of the pp * vpp chunks, in model order; empty: even."""
    ep: int = 1
    """Expert parallel size (ranks that share a layer's experts); 1 for models without experts."""
    etp: int = 1
    """Expert tensor parallel size (ranks that share each expert's matrices); independent of tp."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel blocks along the sequence (needs tp > 1)."""
    tp_comm_overlap: bool = False
    """Run the decoder layers' tensor-parallel collectives beside their matrix products (CUDA; needs
    sequence_parallel)."""
    distributed_optimizer: bool = True
    """Spread optimizer state over data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = True
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool = True
    """Gather updated parameters while the next forward pass runs (needs distributed_optimizer)."""
    bucket_size: int | None = None
    """Gradient bucket size in parameters; empty: Megatron-core's default."""


@dataclass
class RecomputeConfig:
    """Activation recompute, for the language model and the vision tower apart."""

    language: Literal["none", "selective", "full"] = "none"
    """none; selective (language_modules); full (every layer)."""
    language_modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """What selective recompute covers: core_attn, mlp (or router and experts), activation (of the MLP, nearly
    free; of experts on CUDA only), layernorm (needs Transformer Engine)."""
    vision: Literal["none", "activation", "full"] = "none"
    """none, activation (of the MLP; nearly free) or full (every vision layer)."""


@dataclass
class Fp8Config:
    """Matrix products of the layers in FP8 (Transformer Engine on Hopper or later); weights and gradients
    stay as they are."""

    recipe: Literal["none", "tensorwise", "delayed", "blockwise"] = "none"
    """How tensors are scaled: tensorwise (by their present maximum), delayed (by earlier maxima), blockwise
    (128 elements)."""
    vision: bool = False
    """The vision tower's layers too, which gains nothing: casts cost what products win. Off: the language
    model's alone."""


@dataclass
class DataConfig:
    """The data set and how rows are made of it."""

    path: str = ""
    """Folder written by `megatron-vl data convert`, or an Energon metadataset YAML."""
    seq_len: int = 4096
    """Tokens of a row."""
    pack: bool = True
    """Put several samples into a row; off: one sample a row."""
    packing_buffer: int = 64
    """Samples among which the packer chooses."""
    max_patches: int = 0
    """Upper bound of vision patches in a row; 0: none but seq_len."""
    min_pixels: int = 0
    """Smallest image area in pixels after resizing; 0: the checkpoint's image processor decides."""
    max_pixels: int = 0
    """Largest image area in pixels after resizing; 0: the checkpoint's image processor decides."""
    video_fps: float = 2.0
    """Frames a second taken from a video."""
    video_max_frames: int = 32
    """Most frames taken from a video."""
    video_max_pixels: int = 0
    """Largest frame area in pixels after resizing (Qwen3-VL: of all frames together); 0: as for images
    (Qwen3-VL: the checkpoint's video processor decides)."""
    video_positions: VideoPositions = "released"
    """M-RoPE positions at videos of Qwen2-VL and Qwen2.5-VL. released: text goes on after the video's largest
    position, its time included, as in the released models' own code and in vLLM. transformers_5_3: text goes
    on after the video's height and width alone, and the seconds of a frame group are cut to whole ones, as in
    transformers 5.3 to 5.17; for runs that began before this field existed."""
    video_prompt: VideoPrompt = "released"
    """Text at videos of Qwen3-VL. released: <|vision_start|> and <|vision_end|> stand around each frame group
    only, as the processor writes them that the model was released with (transformers 4.57).
    transformers_5_10: a second pair stands around the whole video, as in transformers from 5.10 on; for runs
    that began before this field existed."""
    num_workers: int = 2
    """Loader processes of each data-parallel rank; 0: in the training process."""
    shuffle_buffer: int = 1000
    """Most samples in the shuffle buffer of each loader process; 0: the order of the data set."""
    shuffle_buffer_gib: float = 2.0
    """Most GiB of samples, with their media as stored, in the shuffle buffer of each loader process: long
    videos reach this before shuffle_buffer. 0: no bound in bytes."""
    balance: bool = False
    """Swap rows between data-parallel ranks so that all have about as many patches in a step: for data in
    which rows differ much in their pictures. Each of these ranks holds a connection to every other one, so it
    takes as many open files."""
    max_bad_share: float = 0.01
    """Stop when more than this share of the samples could not be used (0 to 1)."""
    seed: int = 1234
    """Seed of the sample order."""


def video_rule(data: DataConfig, timestamps: bool) -> dict[str, str]:
    """The field, with its value, of the rule that a model's videos follow; the other one means nothing to it.

    Args:
        timestamps: whether the family writes times into the text (``VisionSpec.video_timestamps``).
    """
    name = "video_prompt" if timestamps else "video_positions"
    return {name: getattr(data, name)}


@dataclass
class OptimizerConfig:
    """AdamW, schedules, and learning rates of the model's parts."""

    lr: float = 1e-5
    """Peak learning rate of the language model (and of the parts below when they are not set)."""
    vision_lr: float | None = None
    """Peak learning rate of the vision tower; 0: it stays as it is (model.freeze_vision also saves its
    gradients and moments); empty: lr."""
    merger_lr: float | None = None
    """Peak learning rate of the merger; 0: it stays as it is; empty: lr."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a part of the peak (cosine)."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape after warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    weight_decay: float = 0.1
    """Applied to matrices, not to biases and norms."""
    beta1: float = 0.9
    """Adam: decay of the first moment."""
    beta2: float = 0.95
    """Adam: decay of the second moment."""
    eps: float = 1e-8
    """Adam: term added to the denominator."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    cpu_offload: bool = False
    """Keep optimizer state in host memory and update there (CUDA only)."""
    cpu_offload_fraction: float = 1.0
    """Part of the optimizer state that is kept in host memory."""


@dataclass
class CheckpointConfig:
    """Saving and resuming one's own run."""

    dir: str = ""
    """Folder of the run's checkpoints; empty: nothing is saved."""
    interval: int = 0
    """Steps between checkpoints; 0: at the end only."""
    keep: int = 2
    """Latest checkpoints kept; 0: all. Those that a roll-back left behind are not counted and not deleted,
    nor is the one that the last roll-back went back to."""
    keep_every: int = 0
    """Checkpoints of multiples of this step are kept for good; 0: only the latest ones."""
    resume: bool = True
    """Go on from the latest checkpoint in dir, the one saved last, when there is one."""
    step: int | None = None
    """Roll back to this step's checkpoint; what the run then saves becomes the latest. Done once: a start
    with the same step goes on with what was saved since."""
    branch: str = ""
    """Branch of step, as `megatron-vl checkpoint show` names it, where several have saved that step; empty:
    the present one's, else the one saved last."""
    restart_data: bool = False
    """When resuming, read the data set from its start: for a changed number of data-parallel ranks, workers
    or rows. Done once: a later start with the option on goes on in the data, also after starts without it."""
    attempt: int = 1
    """Raise this number to have step or restart_data done once more."""
    background: bool = True
    """Write checkpoints while training goes on; off: wait for each."""


@dataclass
class EvalConfig:
    """Validation while the training runs: before the first step, every so many steps, and at the end."""

    interval: int = 0
    """Steps between evaluations; 0: none."""
    split: str = "val"
    """Split of the data set (`megatron-vl data convert --val-fraction` makes val)."""
    rows: int = 64
    """Rows whose loss is taken, the first ones of the split, over all ranks; they stay in host memory (pixels
    included)."""
    samples: int = 0
    """Prompts of the split that are answered each time, the first ones; in eval.jsonl beside the checkpoints
    and as text in TensorBoard."""
    max_new_tokens: int = 64
    """Most tokens of an answer."""


@dataclass
class LogConfig:
    """What is shown and written."""

    interval: int = 1
    """Steps between printed lines. In them, of models with experts: busiest expert 3.44x = its tokens are
    3.44 times the mean of its layer's experts, in the layer where that is most (1: even; padding is not
    counted)."""
    tensorboard: str = ""
    """Folder of TensorBoard events; empty: none."""
    samples: bool = False
    """Write the keys of each step's samples to samples.jsonl in checkpoint.dir."""
    peak_tflops: float = 0.0
    """Peak of one accelerator in TFLOP/s for MFU; 0: known by the device's name (989 for H100/H200 bf16)."""


@dataclass
class TrainConfig:
    """A training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    steps: int = 100
    """Optimizer steps of the whole run; the schedule ends here."""
    stop_after: int | None = None
    """Stop (and save) at this step although the schedule goes on to `steps`."""
    global_batch_size: int = 8
    """Rows of one optimizer step, over all data-parallel ranks."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Computation type; bfloat16 keeps float32 master weights and gradients."""
    platform: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: cuda when there is a GPU."""
    seed: int = 1234
    """Seed of random weights."""
    max_bad_steps: int = 10
    """Steps in a row with a non-finite loss or gradient, or without any token that bears loss, after which
    the run stops. Each is skipped: weights and moments stay, data and schedules go on."""


PROGRAM = "python -m megatron_vl.train"


def build_parser() -> ArgumentParser:
    """The command line: ``--config RUN.yaml`` and one dotted option a field, each explained by the field's
    docstring."""
    # Off by default: without it the docstrings below the fields do not reach --help.
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} --config RUN.yaml [--section.field value ...]",
        description="Train a Qwen-VL model. Start it with torchrun, one process a GPU.",
        exit_on_error=False,
        allow_abbrev=False,  # a field added later must not change what a shortened name means
    )
    parser.add_argument("--config", action="config", help="YAML of the run; later options override it.")
    parser.add_class_arguments(TrainConfig)
    return parser


def fields(config: type = TrainConfig, prefix: str = "") -> list[str]:
    """Dotted names of all fields, in order."""
    names: list[str] = []
    for item in dataclasses.fields(config):
        section = item.default_factory
        nested = isinstance(section, type) and dataclasses.is_dataclass(section)
        names += fields(section, f"{prefix}{item.name}.") if nested else [prefix + item.name]  # type: ignore[arg-type]
    return names


def sections() -> list[str]:
    """Fields that hold fields."""
    return list(dict.fromkeys(name.partition(".")[0] for name in fields() if "." in name))


def parse_config(argv: list[str] | None = None) -> TrainConfig:
    """Reads ``--config RUN.yaml`` and ``--section.field value`` overrides.

    Raises:
        RunConfigError: a field is unknown or its value has the wrong type; the message says what would be
            valid.
        SystemExit: ``--help`` was asked for.
    """
    parser = build_parser()
    namespace = read_arguments(parser, argv)
    config = parser.instantiate_classes(namespace)
    return TrainConfig(**{item.name: getattr(config, item.name) for item in dataclasses.fields(TrainConfig)})


def read_arguments(parser: ArgumentParser, argv: list[str] | None) -> Namespace:
    """What a parser that holds the fields of a run reads; raises RunConfigError as :func:`parse_config`
    does."""
    argv = sys.argv[1:] if argv is None else argv
    for path in _config_files(argv):
        _check_file(parser, path)
    try:
        namespace = parser.parse_args(argv)
    except (ArgumentError, ValueError, TypeError, OSError) as error:
        raise RunConfigError(_explain(str(error))[0]) from error
    for section in sections():
        if not isinstance(namespace.get(section), Namespace):
            raise RunConfigError(
                f"field {section!r} is a section; give its fields, as in --{section}.FIELD value"
            )
    namespace.pop("config", None)
    return namespace


def _config_files(argv: list[str]) -> list[str]:
    """What is given as ``--config``; jsonargparse takes YAML in place of a file's name too."""
    given = [after for word, after in zip(argv, argv[1:], strict=False) if word == "--config"]
    given += [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
    return [path for path in given if "\n" not in path and len(path) < 4096 and Path(path).is_file()]


def _check_file(parser: ArgumentParser, path: str) -> None:
    """Reads one YAML by itself, so that what is wrong in it is told with its name and the line."""
    lines: dict[str, int] = {}
    try:
        lines = field_lines(Path(path), sections())
        parser.parse_args(["--config", path])
    except ConfigFileError as error:
        raise RunConfigError(str(error)) from error
    except (ArgumentError, ValueError, TypeError, OSError) as error:
        message, name = _explain(str(error))
        # jsonargparse names a section's unknown field with or without the section.
        inner = (line for full, line in lines.items() if full.endswith(f".{name}"))
        line = lines.get(name) or lines.get(name.partition(".")[0]) or next(inner, None)
        raise RunConfigError(f"{path}{f', line {line}' if line else ''}: {message}") from error


def parse(argv: list[str] | None = None) -> TrainConfig:
    """:func:`parse_config` for the entry point: prints what is wrong, once for all ranks, and exits with code
    2."""
    try:
        return parse_config(argv)
    except RunConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{PROGRAM}: {error}\nAll fields: {PROGRAM} --help", file=sys.stderr)
        raise SystemExit(2) from error


def _explain(message: str) -> tuple[str, str]:
    """jsonargparse's message in one line, and the field's name; with the nearest names where a field is
    unknown."""
    known = fields()
    unknown = re.search(
        r"unrecognized arguments: --([\w.]+)|'([\w.]+)' is not accepted|not accept option '(\w+)'", message
    )
    if unknown:
        name = next(group for group in unknown.groups() if group)
        inside = re.search(rf"Group '([\w.]+)' does not accept option '{re.escape(name)}'", message)
        name = f"{inside[1]}.{name}" if inside else name
        leaf = {field.split(".")[-1]: field for field in known}
        near = difflib.get_close_matches(name, [*known, "config"], 3)
        near = near or [leaf[close] for close in difflib.get_close_matches(name.split(".")[-1], leaf, 3)]
        section = [field for field in known if field.startswith(name.split(".")[0] + ".")]
        advice = f"did you mean {', '.join(near)}?" if near else f"valid: {', '.join(section or known)}"
        return f"field {name!r} is unknown; {advice}", name
    positional = re.match(r"unrecognized arguments: ([^-\s]\S*\.ya?ml)$", message)
    if positional:
        return f"unrecognized argument: {positional[1]}; did you mean --config {positional[1]}?", ""
    empty = re.match(r"argument --([\w.]+): expected one argument", message)
    if empty:
        return (
            f"--{empty[1]} needs a value behind it, as in --{empty[1]} VALUE (switches too: true or false)",
            empty[1],
        )
    ill_typed = re.match(r'Parser key "([\w.]+)":\s*(.*)', message, re.DOTALL)
    if not ill_typed:
        return " ".join(message.split()), ""
    name, rest = ill_typed[1], " ".join(ill_typed[2].split())
    if name in known:
        section_of, _, leaf_name = name.rpartition(".")
        hint = typing.get_type_hints(type(getattr(TrainConfig(), section_of)) if section_of else TrainConfig)[
            leaf_name
        ]
        value = re.search(r".*(?:Got|Given) value: (.*)", rest)
        return (
            f"field {name!r}: expected {_in_words(hint)}" + (f", got {value[1]}" if value else f"; {rest}"),
            name,
        )
    if name in sections():
        return f"field {name!r} is a section; give its fields, as in --{name}.FIELD value", name
    rest = re.sub(r"typing\.Literal\[(.*?)\]\.", r"one of \1.", rest).replace("<class 'int'>", "whole number")
    return f"--{name}: {rest}", name


_WORDS: dict[Any, str] = {
    **{
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "nothing (null)",
    },
    **{list[int]: "a list of whole numbers", list[str]: "a list of words such as [one,two]"},
}


def _in_words(hint: Any) -> str:
    """A field's type as a user would say it."""
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(hint)))}"
    if hint in _WORDS:
        return _WORDS[hint]
    return " or ".join(_in_words(part) for part in typing.get_args(hint))


def validate(config: TrainConfig, world_size: int) -> int:
    """Checks what needs no model and no files. Returns the data-parallel size.

    Raises:
        RunConfigError: names the field and what would be valid.
    """
    _check_ranges(config)
    p = config.parallel
    ranks = p.tp * p.pp
    if world_size % ranks:
        raise RunConfigError(
            f"parallel: tp {p.tp} x pp {p.pp} = {ranks} ranks do not divide the world size {world_size}"
        )
    dp = world_size // ranks
    if p.tp * dp % (p.ep * p.etp):
        fitting = p.pp * math.lcm(p.tp, p.ep * p.etp)
        raise RunConfigError(
            f"parallel: ep {p.ep} x etp {p.etp} = {p.ep * p.etp} ranks do not divide the {p.tp * dp} ranks of"
            f" a pipeline stage (tp {p.tp} x dp {dp}); lower parallel.ep or etp, or start a multiple of"
            f" {fitting} processes"
        )
    if config.global_batch_size < 1 or config.global_batch_size % dp:
        raise RunConfigError(
            f"global_batch_size {config.global_batch_size} must be a multiple of the data-parallel size {dp}"
        )
    micro_batches = config.global_batch_size // dp
    if p.vpp > 1 and (p.pp < 2 or micro_batches % p.pp):
        raise RunConfigError(
            f"parallel.vpp {p.vpp} needs pp of at least 2 and a multiple of pp ({p.pp}) rows on each"
            f" data-parallel rank, not {micro_batches}"
        )
    if p.sequence_parallel and p.tp == 1:
        raise RunConfigError("parallel.sequence_parallel needs parallel.tp of at least 2")
    if p.tp_comm_overlap and not p.sequence_parallel:
        raise RunConfigError("parallel.tp_comm_overlap needs parallel.sequence_parallel")
    if p.sequence_parallel and config.data.seq_len % p.tp:
        raise RunConfigError(
            f"data.seq_len {config.data.seq_len} must be a multiple of parallel.tp {p.tp} with"
            " sequence_parallel"
        )
    if p.overlap_param_gather and not p.distributed_optimizer:
        raise RunConfigError("parallel.overlap_param_gather needs parallel.distributed_optimizer")
    if p.layers is not None and len(p.layers) != p.pp * p.vpp:
        raise RunConfigError(
            f"parallel.layers {p.layers} has {len(p.layers)} entries; pp {p.pp} x vpp {p.vpp} needs"
            f" {p.pp * p.vpp}"
        )
    if config.optimizer.warmup_steps >= config.steps and config.optimizer.warmup_steps:
        raise RunConfigError(
            f"optimizer.warmup_steps {config.optimizer.warmup_steps} must be below steps {config.steps}"
        )
    if config.stop_after is not None and config.stop_after > config.steps:
        raise RunConfigError(
            f"stop_after {config.stop_after} must not be above steps {config.steps}; raise steps to go on"
        )
    c = config.checkpoint
    if c.step is not None and not (c.dir and c.resume):
        raise RunConfigError(
            f"checkpoint.step {c.step} needs checkpoint.dir, where that step was saved, and checkpoint.resume"
        )
    if c.branch and c.step is None:
        raise RunConfigError(
            f"checkpoint.branch {c.branch} needs checkpoint.step, the step of that branch to go back to"
        )
    pixels = config.data.min_pixels, config.data.max_pixels
    if min(pixels) > 0 and pixels[0] > pixels[1]:
        raise RunConfigError(f"data.min_pixels {pixels[0]} must not be above data.max_pixels {pixels[1]}")
    m = config.model
    if m.freeze_vision and m.freeze_merger and m.freeze_language:
        raise RunConfigError(
            "model.freeze_vision, freeze_merger and freeze_language leave nothing to train; set one to false"
        )
    return dp


_RANGES: tuple[tuple[float, float, str], ...] = (
    (
        1,
        math.inf,
        (
            "parallel.tp parallel.pp parallel.vpp parallel.bucket_size data.seq_len data.packing_buffer"
            " data.video_max_frames"
        ),
    ),
    (1, math.inf, "parallel.ep parallel.etp eval.rows eval.max_new_tokens"),
    (0, math.inf, "eval.interval eval.samples"),
    (1, math.inf, "steps stop_after global_batch_size log.interval max_bad_steps checkpoint.attempt"),
    (
        0,
        math.inf,
        (
            "data.max_patches data.min_pixels data.max_pixels data.video_max_pixels data.num_workers"
            " data.shuffle_buffer"
        ),
    ),
    (0, math.inf, "data.shuffle_buffer_gib"),
    (
        0,
        math.inf,
        "optimizer.lr optimizer.vision_lr optimizer.merger_lr optimizer.warmup_steps optimizer.weight_decay",
    ),
    (0, math.inf, "model.moe_aux_loss optimizer.eps checkpoint.keep_every checkpoint.step"),
    (0, 2**32 - 1, "seed data.seed"),
    (0, 1, "data.max_bad_share"),
    (0, math.inf, "optimizer.clip_grad checkpoint.interval checkpoint.keep log.peak_tflops"),
    (0, 1, "optimizer.min_lr_ratio optimizer.beta1 optimizer.beta2 optimizer.cpu_offload_fraction"),
)
"""Smallest and largest value of fields; an empty (None) field is not checked."""


def _check_ranges(config: TrainConfig) -> None:
    for low, high, names in _RANGES:
        for name in names.split():
            value = operator.attrgetter(name)(config)
            if value is not None and not low <= value <= high:  # a NaN fails both
                valid = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
                raise RunConfigError(f"{name} {value} must be {valid}")
    if not config.data.video_fps > 0:
        raise RunConfigError(f"data.video_fps {config.data.video_fps} must be above 0")
    unknown = set(config.recompute.language_modules) - set(RECOMPUTE_MODULES)
    if unknown:
        raise RunConfigError(
            f"recompute.language_modules {sorted(unknown)} are unknown; valid: {', '.join(RECOMPUTE_MODULES)}"
        )
