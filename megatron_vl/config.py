"""The options of a run: one tree of dataclasses defines the YAML and the ``--help`` text.

The docstring of a field is its help text and names its unit. :func:`parse` reads the YAML and the dotted
overrides. :func:`validate` refuses impossible values before any process group starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import os
import re
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from megatron_vl.config_file import ConfigFileError, field_lines
from megatron_vl.errors import UserError
from megatron_vl.words import counted

RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "activation")
"""Valid entries of ``recompute.language_modules``."""
VideoPositions = Literal["released", "transformers_5_3"]
"""The rules for positions after and within a video; :attr:`DataConfig.video_positions` explains them."""
VideoPrompt = Literal["released", "transformers_5_10"]
"""The rules for the text around a video; :attr:`DataConfig.video_prompt` explains them."""
LearntOrMasked = Literal["learnt", "masked"]
"""Whether something bears loss."""


class RunConfigError(UserError, ValueError):
    """A value that is unknown or impossible; the message names the field and what would be valid."""


@dataclass
class ModelConfig:
    """The model, and which of its parts are trained."""

    checkpoint: str = ""
    """Megatron weights to start from (output of `megatron-vl convert` or `split`, in any layout).
    Empty: random weights."""
    hf: str = ""
    """Hugging Face folder that the model comes from.
    Its config, tokenizer, chat template and image processor are read."""
    freeze_vision: bool = False
    """Do not train the vision tower (patch embedding and blocks)."""
    freeze_merger: bool = False
    """Do not train the merger (vision features to language width)."""
    freeze_language: bool = False
    """Do not train the language model."""
    moe_aux_loss: float | None = None
    """Coefficient of the experts' load-balancing loss, which is the mean of the layers' losses (transformers
    takes one loss of the layers' mean; both are equal for one layer). 0: no such loss.
    Empty: router_aux_loss_coef of the Hugging Face config if its output_router_logits is true,
    otherwise no such loss."""
    vision_attention: Literal["auto", "sdpa", "torch_varlen", "flash_attn", "te", "triton"] = "auto"
    """Implementation of packed attention in the vision tower. auto: the fastest one measured on the platform
    (CPU: sdpa). triton: the kernels of this project, which also apply RoPE (CUDA, bfloat16)."""
    window_attention: Literal["auto", "fused", "backend"] = "auto"
    """Implementation of the vision tower's window layers. fused: one kernel, which also applies RoPE (CUDA,
    bfloat16). backend: the same as vision_attention. auto: fused on CUDA, otherwise backend."""
    language_attention: Literal["auto", "sdpa", "torch_varlen", "flash_attn", "te"] = "auto"
    """Implementation of packed attention in the language model.
    auto: the fastest one measured on the platform (CPU: sdpa)."""


@dataclass
class ParallelConfig:
    """How the model is spread over ranks. The data-parallel size is the world size divided by tp * pp."""

    tp: int = 1
    """Tensor parallel size (ranks)."""
    pp: int = 1
    """Pipeline parallel size (stages)."""
    vpp: int = 1
    """Virtual chunks of each pipeline stage. Above 1, the schedule is interleaved 1F1B."""
    layers: list[int] | Literal["auto"] | None = None
    """Number of decoder layers in each of the pp * vpp chunks, in model order. Empty or auto: the split that
    `megatron-vl plan` finds, with which all stages take about equally long; a run that resumes keeps the one
    that it was saved with."""
    ep: int = 1
    """Expert parallel size (ranks that share a layer's experts). Leave at 1 for models without experts."""
    etp: int = 1
    """Expert tensor parallel size (ranks that share each expert's matrices). It is independent of tp."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel blocks along the sequence (needs tp > 1)."""
    tp_comm_overlap: bool = False
    """Overlap the tensor-parallel collectives of decoder layers
    with their matrix products (CUDA; needs sequence_parallel)."""
    distributed_optimizer: bool = True
    """Spread optimizer state over data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = True
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool = True
    """Gather updated parameters while the next forward pass runs (needs distributed_optimizer)."""
    bucket_size: int | None = None
    """Gradient bucket size in parameters. Empty: Megatron-core's default."""


@dataclass
class VisionConfig:
    """Where the vision tower runs."""

    placement: Literal["first_stage", "decoupled"] = "first_stage"
    """first_stage: on the first pipeline stage, tensor-parallel with the language model. decoupled: on every
    rank. The ranks of a data-parallel replica then encode the pictures of a step together before its pipeline
    runs, so that its stages hold decoder layers only. A run may change this when it resumes."""
    encode_patches: int = 131072
    """decoupled: about how many patches a rank encodes in one call, without keeping activations."""
    backward_patches: int = 32768
    """decoupled: about how many patches a rank runs forward and backward in one call. Each keeps the tower's
    activations, which limits the memory."""
    keep_patches: int = 0
    """decoupled: for about how many patches a rank keeps the tower's activations while the pipeline runs, so
    that they do not run forward a second time. 0: for none, which takes the least memory."""


@dataclass
class RecomputeConfig:
    """Activation recompute, set separately for the language model and the vision tower."""

    language: Literal["none", "selective", "full"] = "none"
    """Language model: none, selective (what language_modules lists) or full (every layer)."""
    language_modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """What selective recompute covers: core_attn, mlp (or router and experts), activation (of the MLP: costs
    almost nothing; of experts: CUDA only), layernorm (needs Transformer Engine)."""
    vision: Literal["none", "activation", "full"] = "none"
    """Vision tower: none, activation (of the MLP; costs almost nothing) or full (every layer)."""


@dataclass
class Fp8Config:
    """Matrix products of the layers in FP8 (Transformer Engine on Hopper or later).

    Weights and gradients keep their types.
    """

    recipe: Literal["none", "tensorwise", "delayed", "blockwise"] = "none"
    """How tensors are scaled: tensorwise (by their current maximum), delayed (by earlier maxima) or blockwise
    (blocks of 128 elements). none: no FP8."""
    vision: bool = False
    """Use FP8 in the vision tower too. This gains nothing: the casts cost as much time as the products save.
    Off: FP8 in the language model only."""


@dataclass
class DataConfig:
    """The data set, and how rows are made from it."""

    path: str = ""
    """Folder written by `megatron-vl data convert`, or an Energon metadataset YAML; here or in an object
    store (`msc://PROFILE/FOLDER`)."""
    on_changed_blend: Literal["refuse", "continue"] = "refuse"
    """What a run does that resumes with another blend of data sets than its checkpoint had. refuse: it ends
    and says what has changed. continue: it goes on. Sources that stay continue where they were, new ones
    begin at their start, those that left are dropped, and new weights count from that step on. Without a
    change, both do the same."""
    seq_len: int = 4096
    """Tokens of a row."""
    pack: bool = True
    """Put several samples into a row. Off: one sample per row."""
    packing_buffer: int = 64
    """Number of samples among which the packer chooses."""
    max_patches: int = 0
    """Largest number of vision patches in a row. 0: limited by seq_len only."""
    min_pixels: int = 0
    """Smallest image area in pixels after resizing. 0: the checkpoint's image processor decides."""
    max_pixels: int = 0
    """Largest image area in pixels after resizing. 0: the checkpoint's image processor decides."""
    video_fps: float = 2.0
    """Frames taken from each second of a video."""
    video_max_frames: int = 32
    """Largest number of frames taken from a video."""
    video_max_pixels: int = 0
    """Largest area of a video frame in pixels after resizing (Qwen3-VL: of all frames together). 0: the same
    as for images (Qwen3-VL: the checkpoint's video processor decides)."""
    video_positions: VideoPositions = "released"
    """M-RoPE positions at videos, for Qwen2-VL and Qwen2.5-VL. released: text continues after the largest
    position of the video, time included, as in the released models' own code and in vLLM. transformers_5_3:
    text continues after the video's height and width only, and the time of a frame group is truncated to
    whole seconds, as in transformers 5.3 to 5.17."""
    video_prompt: VideoPrompt = "released"
    """Text around videos, for Qwen3-VL. released: <|vision_start|> and <|vision_end|> surround each frame
    group only, as the processor released with the model writes them (transformers 4.57). transformers_5_10: a
    second pair surrounds the whole video, as in transformers 5.10 and later."""
    empty_think: LearntOrMasked = "masked"
    """Loss on the empty block of thinking that the chat templates of thinking models write into an answer
    without thinking. masked: none, as a request without thinking already contains the block. learnt: the
    model learns to close the block at once, so that it answers without thinking where it may think."""
    earlier_answers: LearntOrMasked = "learnt"
    """Loss on the answers before the last question, from which the chat templates of thinking models leave
    out the thinking. learnt: they are learnt as the template writes them, without thinking. masked: only the
    answers after the last question are learnt, which look as the served model writes them."""
    num_workers: int = 2
    """Loader processes of each data-parallel rank. 0: load in the training process."""
    streams: int = 0
    """Number of parts of the data set that are shuffled and packed on their own. They determine the order of
    samples, and a run keeps them when it goes on with other data-parallel ranks or workers. 0: one for each
    loader process of the first start. Give a multiple of global_batch_size x num_workers if the run will
    move to many more ranks or workers: otherwise several of them read the same stream, although each decodes
    only its own pictures."""
    shuffle_buffer: int = 1000
    """Largest number of samples in the shuffle buffer of each stream (see streams).
    0: keep the order of the data set."""
    shuffle_buffer_gib: float = 2.0
    """Largest size of the shuffle buffer of each stream in GiB, with media as they are stored. Long videos
    reach this limit before shuffle_buffer. 0: no limit in bytes."""
    balance: bool = False
    """Give data-parallel ranks about the same number of patches in each step. Use it for data whose rows
    differ much in their pictures. If `megatron-vl data index` has written the sizes of the samples, batches
    are planned from these without communication, and each rank reads only its own samples; streams and their
    buffers then have no effect. Otherwise rows are swapped while the run trains, for which each rank holds a
    connection, and so an open file, to every other one."""
    max_bad_share: float = 0.01
    """Stop the run when more than this share of the samples could not be used (0 to 1)."""
    sample_timeout_s: float = 300.0
    """Seconds that reading a sample, and then decoding its pictures and videos, may take. A sample that takes
    longer cannot be used. 0: wait without end."""
    seed: int = 1234
    """Seed of the sample order."""


def video_rule(data: DataConfig, timestamps: bool) -> dict[str, str]:
    """The field and value of the rule that a model's videos follow.
    The other rule does not apply to the model.

    Args:
        timestamps: whether the family writes timestamps into the text (``VisionSpec.video_timestamps``).
    """
    name = "video_prompt" if timestamps else "video_positions"
    return {name: getattr(data, name)}


@dataclass
class OptimizerConfig:
    """AdamW, its schedules, and the learning rates of the model's parts."""

    lr: float = 1e-5
    """Peak learning rate of the language model (and of the parts below when they are not set)."""
    vision_lr: float | None = None
    """Peak learning rate of the vision tower. Empty: lr. 0: its weights do not change (model.freeze_vision
    also saves the memory of its gradients and moments)."""
    merger_lr: float | None = None
    """Peak learning rate of the merger. Empty: lr. 0: its weights do not change."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of the peak (cosine)."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    weight_decay: float = 0.1
    """Weight decay of matrices; biases and norms have none."""
    beta1: float = 0.9
    """Adam: decay of the first moment."""
    beta2: float = 0.95
    """Adam: decay of the second moment."""
    eps: float = 1e-8
    """Adam: term added to the denominator."""
    clip_grad: float = 1.0
    """Largest global gradient norm. 0: no clipping."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which Adam's two moments are kept. bfloat16 halves the optimizer state of a bf16 model (6 bytes
    a parameter, not 12). Adam still computes in float32; moments are rounded stochastically, with the same
    bits in every layout. A run may resume with the other type: then moments are converted."""
    offload_fraction: float | Literal["auto"] = 0.0
    """Share of the optimizer state that is kept in host memory and streamed through the GPU when weights are
    updated (0 to 1). Numbers do not change, nor do checkpoints: a run may resume with any other share.
    auto: as little as fits by the memory estimate."""


@dataclass
class CheckpointConfig:
    """Saving and resuming the run."""

    dir: str = ""
    """Folder for the run's checkpoints. Empty: save nothing."""
    interval: int = 0
    """Steps between checkpoints. 0: save at the end only."""
    keep: int = 2
    """Number of latest checkpoints to keep. 0: keep all. Checkpoints that a roll-back abandoned are neither
    counted nor deleted, nor is the one that the last roll-back went back to."""
    keep_every: int = 0
    """Never delete checkpoints of multiples of this step. 0: keep only the latest ones."""
    resume: bool = True
    """Resume from the checkpoint in dir that was saved last, if there is one."""
    step: int | None = None
    """Roll back to this step's checkpoint. What the run saves from then on becomes the latest. This happens
    once: a later start with the same step resumes from what was saved since."""
    branch: str = ""
    """Branch of step, as `megatron-vl checkpoint show` names it, if several branches have saved that step.
    Empty: the current branch if it has saved the step, otherwise the one saved last."""
    restart_data: bool = False
    """When resuming, read the data set from its start. Use it after a change of the data set, or of what
    determines its rows (data.seq_len, data.seed). This happens once: a later start with the option on
    continues in the data, also after starts without it."""
    attempt: int = 1
    """Raise this number to apply step or restart_data once more."""
    background: bool = True
    """Write checkpoints while training continues. Off: wait until each is written."""
    export_hf: int | Literal["last"] = 0
    """Steps between exports to a Hugging Face folder, dir/hf/step_NNNNNNNN, with config, tokenizer, processor
    and chat template of model.hf: a multiple of interval. The last step is exported too. last: export only
    the last step. 0: export none. A separate process on the node of rank 0 makes each export from the saved
    step while training continues; the run waits for it at the end. A failed export does not stop the run.
    The next start makes up for a missing export as long as its checkpoint exists; keep deletes no checkpoint
    before its export."""


@dataclass
class EvalConfig:
    """Validation during training: before the first step, every `interval` steps, and at the end."""

    interval: int = 0
    """Steps between evaluations. 0: do not evaluate."""
    split: str = "val"
    """Split of the data set to evaluate on (`megatron-vl data convert --val-fraction` creates val)."""
    rows: int = 64
    """Number of rows to compute the loss on, over all ranks: the first ones of the split. They stay in host
    memory, pixels included."""
    samples: int = 0
    """Number of prompts to answer at each evaluation: the first ones of the split. The answers go to
    eval.jsonl beside the checkpoints and to TensorBoard as text."""
    max_new_tokens: int = 64
    """Largest number of tokens in an answer."""


@dataclass
class LogConfig:
    """What the run prints and writes."""

    interval: int = 1
    """Steps between printed lines. For models with experts, a line says for instance "busiest expert 3.44x":
    in the least even layer, the busiest expert gets 3.44 times the mean number of tokens
    (1: even; padding is not counted)."""
    tensorboard: str = ""
    """Folder for TensorBoard events. Empty: write none. The section wandb configures Weights & Biases."""
    samples: bool = False
    """Write the keys of each step's samples to samples.jsonl in checkpoint.dir."""
    peak_tflops: float = 0.0
    """Peak of one accelerator in TFLOP/s, for MFU.
    0: look it up by the device's name (989 for H100 and H200 in bf16)."""


@dataclass
class FailuresConfig:
    """What ends a run that cannot continue. A rank that fails or dies always ends it."""

    timeout_s: float = 600.0
    """Seconds without progress on any rank (no row, no micro-batch, no part of a file) after which the run
    ends with a message. Until the first step is done, while kernels are compiled, the limit is three times as
    long and at least five minutes. A Python debugger stops the clock; set 0 for one that stops processes
    (gdb). 0: only the collectives' own limit of 30 minutes applies."""
    check_memory: bool = True
    """Refuse to start a run whose memory estimate exceeds the memory of this machine's GPUs. Off: start
    anyway, with a note."""


@dataclass
class WandbConfig:
    """Weights & Biases, beside metrics.jsonl and TensorBoard; needs the extra `wandb`."""

    project: str = ""
    """Project that the run belongs to. Empty: send nothing to Weights & Biases. A resumed run continues in
    the same W&B run; its id is in wandb.json in checkpoint.dir. To begin another one, delete that file or set
    checkpoint.resume to false."""
    entity: str = ""
    """User or team that the project belongs to. Empty: the default of the account."""
    name: str = ""
    """Name that W&B shows. Empty: the name of the folder checkpoint.dir."""
    mode: Literal["online", "offline"] | None = None
    """online: send the numbers while training. offline: write files for `wandb sync`; no network is needed.
    Empty: what $WANDB_MODE says, otherwise online."""
    dir: str = ""
    """Folder in which W&B makes its folder wandb/. Empty: checkpoint.dir; without one, W&B decides."""


@dataclass
class ProfileConfig:
    """Traces of some steps by torch.profiler, for Perfetto (ui.perfetto.dev) or TensorBoard.

    The numbers of the run stay the same.
    """

    steps: list[int] | None = None
    """First and last step to trace, both included, as in [5, 7]. Steps are counted from 1 over the whole run,
    as printed, also after a resume. Empty: trace none."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that write a trace, each one of its own."""
    dir: str = ""
    """Folder for the traces, rank_NNNNN_steps_A_to_B.pt.trace.json.gz. Empty: profile/ in checkpoint.dir."""


@dataclass
class TrainConfig:
    """A training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    failures: FailuresConfig = field(default_factory=FailuresConfig)
    steps: int = 100
    """Optimizer steps of the whole run. The schedule ends here."""
    stop_after: int | None = None
    """Save and stop at this step; the schedule still ends at `steps`."""
    global_batch_size: int = 8
    """Rows in one optimizer step, over all data-parallel ranks."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of computation. With bfloat16, master weights and gradients are float32."""
    platform: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to run. auto: cuda if there is a GPU, otherwise cpu."""
    seed: int = 1234
    """Seed of the random initial weights."""
    max_bad_steps: int = 10
    """Stop after this many consecutive steps with a non-finite loss or gradient, or without any loss token.
    Each such step is skipped: weights and moments do not change, data and schedules advance."""


PROGRAM = "python -m megatron_vl.train"
LAYERS_OPTION = "--parallel.layers"
BARE_LIST = re.compile(r"\d+(,\d+)*")


def build_parser(help_texts: bool = True) -> ArgumentParser:
    """The command line: ``--config RUN.yaml`` and one dotted option per field.

    Args:
        help_texts: whether a field's docstring is its help. Finding them in the source takes five times as
            long as all the rest, and every rank of a run builds a parser.
    """
    # This is off by default. Without it the docstrings below the fields do not reach --help.
    set_parsing_settings(docstring_parse_attribute_docstrings=help_texts)
    parser = ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} --config RUN.yaml [--section.field value ...]",
        description="Train a Qwen-VL model. Start it with torchrun, one process per GPU.",
        exit_on_error=False,
        allow_abbrev=False,  # a field added later must not change what a shortened name means
    )
    parser.add_argument("--config", action="config", help="YAML of the run; later options override it.")
    parser.add_class_arguments(TrainConfig)
    return parser


@functools.cache
def _parser(help_texts: bool) -> ArgumentParser:
    """:func:`build_parser`'s, made once: that takes longer than parsing a command line."""
    return build_parser(help_texts)


def _shows_help(argv: Sequence[str]) -> bool:
    """Whether the texts of the fields are printed: also ``--print_config`` can have them as comments."""
    return any(word in ("-h", "--help") or word.startswith("--print_config") for word in argv)


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
        RunConfigError: a field is unknown or its value has the wrong type;
            the message says what would be valid.
        SystemExit: ``--help`` was asked for.
    """
    parser = _parser(_shows_help(sys.argv[1:] if argv is None else argv))
    namespace = read_arguments(parser, argv)
    config = parser.instantiate_classes(namespace)
    return TrainConfig(**{item.name: getattr(config, item.name) for item in dataclasses.fields(TrainConfig)})


def read_arguments(parser: ArgumentParser, argv: list[str] | None) -> Namespace:
    """Parses ``argv`` with a parser that holds the fields of a run.

    Raises:
        RunConfigError: as :func:`parse_config` does.
    """
    argv = sys.argv[1:] if argv is None else argv
    for path in _config_files(argv):
        _check_file(parser, path)
    try:
        namespace = parser.parse_args(_with_brackets(argv))
    except (ArgumentError, ValueError, TypeError, OSError) as error:
        raise RunConfigError(_explain(str(error))[0]) from error
    for section in sections():
        if not isinstance(namespace.get(section), Namespace):
            raise RunConfigError(
                f"field {section!r} is a section; give its fields, as in --{section}.FIELD value"
            )
    namespace.pop("config", None)
    return namespace


def _with_brackets(argv: Sequence[str]) -> list[str]:
    """``--parallel.layers 3,1`` as ``--parallel.layers [3,1]``, as ``split --layers`` is written too."""
    words: list[str] = []
    for word in argv:
        name, equals, value = word.rpartition("=")
        is_split = name == LAYERS_OPTION or words[-1:] == [LAYERS_OPTION]
        words.append(f"{name}{equals}[{value}]" if is_split and BARE_LIST.fullmatch(value) else word)
    return words


def _config_files(argv: list[str]) -> list[str]:
    """The files given as ``--config``. jsonargparse also takes YAML text in place of a file name."""
    given = [after for word, after in zip(argv, argv[1:], strict=False) if word == "--config"]
    given += [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
    return [path for path in given if "\n" not in path and len(path) < 4096 and Path(path).is_file()]


def _check_file(parser: ArgumentParser, path: str) -> None:
    """Reads one YAML file alone, so that an error message can name the file and the line."""
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
    """:func:`parse_config` for the entry point:
    on an error, rank 0 prints it and every rank exits with code 2."""
    try:
        return parse_config(argv)
    except RunConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{PROGRAM}: {error}\nAll fields: {PROGRAM} --help", file=sys.stderr)
        raise SystemExit(2) from error


def _explain(message: str) -> tuple[str, str]:
    """jsonargparse's message in one line, and the field's name.
    For an unknown field it suggests the nearest names."""
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
            f"--{empty[1]} needs a value after it, as in --{empty[1]} VALUE (switches too: true or false)",
            empty[1],
        )

    ill_typed = re.match(r'Parser key "([\w.]+)":\s*(.*)', message, re.DOTALL)
    if not ill_typed:
        return " ".join(message.split()), ""
    name, rest = ill_typed[1], " ".join(ill_typed[2].split())
    if name in known:
        section_of, _, leaf_name = name.rpartition(".")
        holder = type(getattr(TrainConfig(), section_of)) if section_of else TrainConfig
        hint = typing.get_type_hints(holder)[leaf_name]

        value = re.search(r".*(?:Got|Given) value: (.*)", rest)
        found = f", got {value[1]}" if value else f"; {rest}"
        return f"field {name!r}: expected {_in_words(hint)}{found}", name
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
    **{list[int]: "a list of whole numbers such as [8,20]", list[str]: "a list of words such as [one,two]"},
}


def _in_words(hint: Any) -> str:
    """A field's type in a user's words."""
    if typing.get_origin(hint) is Literal:
        words = typing.get_args(hint)
        return f"one of {', '.join(map(repr, words))}" if len(words) > 1 else repr(words[0])
    if hint in _WORDS:
        return _WORDS[hint]
    return " or ".join(_in_words(part) for part in typing.get_args(hint))


def validate(config: TrainConfig, world_size: int) -> int:
    """Checks what needs no model and no files. Returns the data-parallel size.

    Raises:
        RunConfigError: names the field and what would be valid.
    """
    _check_ranges(config)
    dp = _check_parallel(config, world_size)
    _check_layers(config, dp)
    _check_steps(config)
    _check_checkpoint(config)
    _check_profile(config, world_size)
    _check_parts(config)
    return dp


def _check_parallel(config: TrainConfig, world_size: int) -> int:
    """The sizes of process groups, and the options that need them. Returns the data-parallel size."""
    p = config.parallel
    ranks = p.tp * p.pp
    if world_size % ranks:
        raise RunConfigError(
            f"parallel: tp {p.tp} x pp {p.pp} = {ranks} ranks do not divide the world size {world_size};"
            f" start a multiple of {ranks} processes, or change parallel.tp or parallel.pp"
        )
    dp = world_size // ranks
    if p.tp * dp % (p.ep * p.etp):
        fitting = p.pp * math.lcm(p.tp, p.ep * p.etp)
        raise RunConfigError(
            f"parallel: ep {p.ep} x etp {p.etp} = {p.ep * p.etp} ranks do not divide the"
            f" {counted(p.tp * dp, 'rank')} of a pipeline stage (tp {p.tp} x dp {dp});"
            f" lower parallel.ep or etp, or start a multiple of {fitting} processes"
        )
    rows = config.global_batch_size
    if rows < 1 or rows % dp:
        near = dict.fromkeys(n for n in (rows // dp * dp, (rows // dp + 1) * dp) if n > 0)
        raise RunConfigError(
            f"global_batch_size {rows} must be a multiple of the data-parallel size {dp}"
            f" ({counted(world_size, 'rank')} / (tp {p.tp} x pp {p.pp})); take {' or '.join(map(str, near))}"
        )

    if p.sequence_parallel and p.tp == 1:
        raise RunConfigError("parallel.sequence_parallel needs parallel.tp of at least 2")
    if p.sequence_parallel and config.data.seq_len % p.tp:
        raise RunConfigError(
            f"data.seq_len {config.data.seq_len} must be a multiple of parallel.tp {p.tp} with"
            " sequence_parallel"
        )
    if p.tp_comm_overlap and not p.sequence_parallel:
        raise RunConfigError("parallel.tp_comm_overlap needs parallel.sequence_parallel")
    if p.overlap_param_gather and not p.distributed_optimizer:
        raise RunConfigError("parallel.overlap_param_gather needs parallel.distributed_optimizer")
    return dp


def _check_layers(config: TrainConfig, dp: int) -> None:
    """The stages and virtual chunks of the pipeline."""
    p = config.parallel
    micro_batches = config.global_batch_size // dp
    if p.vpp > 1 and (p.pp < 2 or micro_batches % p.pp):
        raise RunConfigError(
            f"parallel.vpp {p.vpp} needs pp of at least 2 and a multiple of pp ({p.pp}) rows on each"
            f" data-parallel rank, not {micro_batches}"
        )
    if isinstance(p.layers, list) and len(p.layers) != p.pp * p.vpp:
        raise RunConfigError(
            f"parallel.layers {p.layers} has {len(p.layers)} entries; pp {p.pp} x vpp {p.vpp} needs"
            f" {p.pp * p.vpp}"
        )


def _check_steps(config: TrainConfig) -> None:
    """The length of the run and of its warm-up."""
    if config.optimizer.warmup_steps >= config.steps and config.optimizer.warmup_steps:
        raise RunConfigError(
            f"optimizer.warmup_steps {config.optimizer.warmup_steps} must be below steps {config.steps}"
        )
    if config.stop_after is not None and config.stop_after > config.steps:
        raise RunConfigError(
            f"stop_after {config.stop_after} must not be above steps {config.steps}; raise steps to go on"
        )


def _check_checkpoint(config: TrainConfig) -> None:
    """Where the run goes back to, and what it exports."""
    c = config.checkpoint
    if c.step is not None and not (c.dir and c.resume):
        raise RunConfigError(
            f"checkpoint.step {c.step} needs checkpoint.dir, where that step was saved, and checkpoint.resume"
        )
    if c.branch and c.step is None:
        raise RunConfigError(
            f"checkpoint.branch {c.branch} needs checkpoint.step, the step of that branch to go back to"
        )
    _check_export(config)


def _check_parts(config: TrainConfig) -> None:
    """The vision tower, its pictures, and which parts are trained."""
    if config.vision.placement == "decoupled" and config.fp8.vision and config.fp8.recipe != "none":
        raise RunConfigError(
            "fp8.vision needs vision.placement first_stage: with decoupled, ranks run the tower a different"
            " number of times in a step. Set fp8.vision to false"
        )

    low, high = config.data.min_pixels, config.data.max_pixels
    if min(low, high) > 0 and low > high:
        raise RunConfigError(f"data.min_pixels {low} must not be above data.max_pixels {high}")

    m = config.model
    if m.freeze_vision and m.freeze_merger and m.freeze_language:
        raise RunConfigError(
            "model.freeze_vision, freeze_merger and freeze_language leave nothing to train; set one to false"
        )


def _check_export(config: TrainConfig) -> None:
    c = config.checkpoint
    if not c.export_hf:
        return
    if not c.dir:
        raise RunConfigError(
            f"checkpoint.export_hf {c.export_hf} needs checkpoint.dir: what is exported is a saved step"
        )

    if c.export_hf == "last":
        return
    if c.export_hf < 0:
        raise RunConfigError(f"checkpoint.export_hf {c.export_hf} must be at least 0, or last")

    if not c.interval or c.export_hf % c.interval:
        raise RunConfigError(
            f"checkpoint.export_hf {c.export_hf} must be a multiple of checkpoint.interval {c.interval}, as"
            " saved steps alone can be exported; or give last"
        )


def _check_profile(config: TrainConfig, world_size: int) -> None:
    profile = config.profile
    if not profile.steps:
        return

    steps = profile.steps
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= config.steps:
        raise RunConfigError(
            f"profile.steps {steps} must be the first and the last step to trace, as in [5, 7], between 1 and"
            f" steps {config.steps}"
        )
    strange = [rank for rank in profile.ranks if not 0 <= rank < world_size]
    if strange or not profile.ranks:
        raise RunConfigError(
            f"profile.ranks {profile.ranks} must be ranks of this run, 0 to {world_size - 1}, at least one"
        )
    if not (profile.dir or config.checkpoint.dir):
        raise RunConfigError("profile.steps needs profile.dir or checkpoint.dir, to write the traces to")


_AT_LEAST_1 = """
    steps stop_after global_batch_size max_bad_steps log.interval checkpoint.attempt
    parallel.tp parallel.pp parallel.vpp parallel.ep parallel.etp parallel.bucket_size
    data.seq_len data.packing_buffer data.video_max_frames
    eval.rows eval.max_new_tokens
"""
_AT_LEAST_0 = """
    data.max_patches data.min_pixels data.max_pixels data.video_max_pixels data.num_workers data.streams
    data.shuffle_buffer data.shuffle_buffer_gib data.sample_timeout_s failures.timeout_s
    optimizer.lr optimizer.vision_lr optimizer.merger_lr optimizer.warmup_steps optimizer.weight_decay
    optimizer.eps optimizer.clip_grad model.moe_aux_loss vision.keep_patches
    checkpoint.interval checkpoint.keep checkpoint.keep_every checkpoint.step
    eval.interval eval.samples log.peak_tflops
"""
_SHARES = """
    data.max_bad_share
    optimizer.min_lr_ratio optimizer.beta1 optimizer.beta2 optimizer.offload_fraction
"""

_RANGES: tuple[tuple[float, float, str], ...] = (
    (1, math.inf, _AT_LEAST_1),
    (0, math.inf, _AT_LEAST_0),
    (0, 1, _SHARES),
    (0, 2**32 - 1, "seed data.seed"),
    # Kernels count elements in 32 bits.
    (1, 2**18, "vision.encode_patches vision.backward_patches"),
)
"""Smallest and largest valid values of fields. An empty (None) field is not checked."""


def _check_ranges(config: TrainConfig) -> None:
    for low, high, names in _RANGES:
        for name in names.split():
            value = operator.attrgetter(name)(config)
            if value is None or value == "auto":
                continue
            # A NaN fails both comparisons.
            if not low <= value <= high:
                valid = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
                raise RunConfigError(f"{name} {value} must be {valid}")

    if not config.data.video_fps > 0:
        raise RunConfigError(f"data.video_fps {config.data.video_fps} must be above 0")
    unknown = set(config.recompute.language_modules) - set(RECOMPUTE_MODULES)
    if unknown:
        raise RunConfigError(
            f"recompute.language_modules {sorted(unknown)} are unknown; valid: {', '.join(RECOMPUTE_MODULES)}"
        )
