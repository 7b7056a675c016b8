"""One dataclass tree = one YAML = the ``--help`` text of ``python -m megatron_vl.train``.

Every field has its unit in its help text. :func:`parse` reads the YAML and the dotted overrides; :func:`validate`
refuses what cannot work before any process group starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


class RunConfigError(ValueError):
    """A value that is unknown or impossible; the message names the field and what would be valid."""


@dataclass
class ModelConfig:
    """The model and what of it is trained."""

    checkpoint: str = ""
    """Megatron weights to start from (output of `megatron-vl convert` or `split`, any layout). Empty: random weights."""
    hf: str = ""
    """Hugging Face folder of origin: config, tokenizer, chat template and image processor are read from it."""
    freeze_vision: bool = False
    """Keep the vision tower (patch embedding and blocks) as it is."""
    freeze_merger: bool = False
    """Keep the merger (vision features to language width) as it is."""
    freeze_language: bool = False
    """Keep the language model as it is."""
    vision_attention: str = "auto"
    """Packed attention of the vision tower: auto, sdpa, torch_varlen, flash_attn or te."""
    language_attention: str = "auto"
    """Packed attention of the language model: auto, sdpa, torch_varlen, flash_attn or te."""


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
    sequence_parallel: bool = False
    """Split activations between tensor-parallel blocks along the sequence (needs tp > 1)."""
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
    """none; selective (recompute_modules); full (every layer)."""
    language_modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """What selective recompute covers: core_attn, mlp, layernorm (layernorm needs Transformer Engine)."""
    vision: Literal["none", "full"] = "none"
    """none or full (every vision layer)."""


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
    """Largest frame area in pixels after resizing; 0: as for images."""
    num_workers: int = 2
    """Loader processes of each data-parallel rank; 0: in the training process."""
    shuffle_buffer: int = 1000
    """Samples in the shuffle buffer; 0: the order of the data set."""
    seed: int = 1234
    """Seed of the sample order."""


@dataclass
class OptimizerConfig:
    """AdamW, schedules, and learning rates of the model's parts."""

    lr: float = 1e-5
    """Peak learning rate of the language model (and of the parts below when they are not set)."""
    vision_lr: float | None = None
    """Peak learning rate of the vision tower; empty: lr."""
    merger_lr: float | None = None
    """Peak learning rate of the merger; empty: lr."""
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
    """Latest checkpoints kept; 0: all."""
    resume: bool = True
    """Go on from the latest checkpoint in dir, when there is one."""


@dataclass
class LogConfig:
    """What is shown and written."""

    interval: int = 1
    """Steps between printed lines."""
    tensorboard: str = ""
    """Folder of TensorBoard events; empty: none."""
    peak_tflops: float = 0.0
    """Peak of one accelerator in TFLOP/s for MFU; 0: known by the device's name (989 for H100/H200 bf16)."""


@dataclass
class TrainConfig:
    """A training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
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
    """Steps in a row with a non-finite loss or gradient (each is skipped) after which the run stops."""


def parse(argv: list[str] | None = None) -> TrainConfig:
    """Reads ``--config RUN.yaml`` and ``--section.field value`` overrides; exits with a message on an unknown field."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="python -m megatron_vl.train", description="Train a Qwen-VL model.")
    parser.add_argument("--config", action="config", help="YAML of the run; later options override it.")
    parser.add_class_arguments(TrainConfig)
    namespace = parser.parse_args(argv)
    namespace.pop("config", None)
    config = parser.instantiate_classes(namespace)
    return TrainConfig(**{name: getattr(config, name) for name in TrainConfig.__dataclass_fields__})


def validate(config: TrainConfig, world_size: int) -> int:
    """Checks what needs no model and no files. Returns the data-parallel size.

    Raises:
        RunConfigError: names the field and what would be valid.
    """
    p = config.parallel
    ranks = p.tp * p.pp
    if min(p.tp, p.pp, p.vpp) < 1:
        raise RunConfigError("parallel.tp, parallel.pp and parallel.vpp must be at least 1")
    if world_size % ranks:
        raise RunConfigError(f"parallel: tp {p.tp} x pp {p.pp} = {ranks} ranks do not divide the world size {world_size}")
    dp = world_size // ranks
    if config.global_batch_size < 1 or config.global_batch_size % dp:
        raise RunConfigError(f"global_batch_size {config.global_batch_size} must be a multiple of the data-parallel size {dp}")
    micro_batches = config.global_batch_size // dp
    if p.vpp > 1 and (p.pp < 2 or micro_batches < p.pp or 0 < micro_batches % p.pp < p.pp and micro_batches % p.pp != 0):
        raise RunConfigError(
            f"parallel.vpp {p.vpp} needs pp of at least 2 and a multiple of pp ({p.pp}) rows on each data-parallel rank, not {micro_batches}"
        )
    if p.sequence_parallel and p.tp == 1:
        raise RunConfigError("parallel.sequence_parallel needs parallel.tp of at least 2")
    if p.sequence_parallel and config.data.seq_len % p.tp:
        raise RunConfigError(f"data.seq_len {config.data.seq_len} must be a multiple of parallel.tp {p.tp} with sequence_parallel")
    if p.overlap_param_gather and not p.distributed_optimizer:
        raise RunConfigError("parallel.overlap_param_gather needs parallel.distributed_optimizer")
    if config.steps < 1:
        raise RunConfigError(f"steps {config.steps} must be at least 1")
    if not 0 <= config.optimizer.min_lr_ratio <= 1:
        raise RunConfigError(f"optimizer.min_lr_ratio {config.optimizer.min_lr_ratio} must lie between 0 and 1")
    return dp
