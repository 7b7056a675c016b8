"""The options of a run: one tree of dataclasses defines the YAML and the ``--help`` text.

The docstring of a field is its help text and names its unit; its range stands in its :func:`option`. A
config is never changed: :func:`dataclasses.replace` makes another one.
"""

import dataclasses
import functools
import re
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_vl.config.options import option
from megatron_vl.system.errors import UserError

CALLS_WITHOUT_ACTIVATIONS = 4
"""How many times ``vision.patches_a_call`` patches a call of the tower takes that keeps no activations."""
WARMUP_SHARE = 0.03
"""Share of a run's steps in which the learning rate rises, unless the user gives their number."""
RANDOM_WEIGHTS = "random"
"""The value of ``model.checkpoint`` for new weights."""
SYNTHETIC_ROWS = ("synthetic:images", "synthetic:text")
"""The values of ``data.path`` for random rows."""
ALL_LINEAR = ("language", "vision", "merger")
"""The kinds of matrices that ``all-linear`` in ``lora.targets`` stands for: PEFT's, which are no experts."""
LossOn = Literal["trained", "masked"]
"""Whether these tokens are trained on."""
FEATURE_ROWS_ON_DEVICE = 4
"""The number of a step's rows whose features stay on the GPU if every rank holds the tower. A step of so few
has nothing beside which the copies of others could run."""


class RunConfigError(UserError, ValueError):
    """A value that is unknown or impossible; the message names the field and what would be valid."""


@dataclass(frozen=True)
class ModelConfig:
    """The model, and which of its parts are trained."""

    checkpoint: str = ""
    """Megatron weights to start from (output of `megatron-vl convert` or `split`, in any layout).
    Empty: the weights in hf, which each rank reads itself. random: new weights, to train from scratch."""
    hf: str = ""
    """Hugging Face folder that the model comes from.
    Its config, tokenizer, chat template and image processor are read."""
    freeze_vision: bool = False
    """Do not train the vision tower (patch embedding and blocks)."""
    freeze_merger: bool = False
    """Do not train the merger (vision features to language width)."""
    freeze_language: bool = False
    """Do not train the language model."""
    moe_aux_loss: float | None = option(None, minimum=0)
    """Coefficient of the experts' load-balancing loss, which is the mean of the layers' losses (transformers
    takes one loss of the layers' mean; both are equal for one layer). 0: no such loss.
    Empty: router_aux_loss_coef of the Hugging Face config if its output_router_logits is true,
    otherwise no such loss."""
    rope_scaling: dict[str, Any] | None = None
    """YaRN, for rows longer than those of the pretraining, with the names of config.json: {rope_type: yarn,
    factor: 4.0, original_max_position_embeddings: 32768}. An export's config.json has it, so that serving
    reads what was trained. {rope_type: default}: none, whatever the folder says. Empty: as in model.hf."""
    attention: Literal["auto", "reference"] = "auto"
    """Kernels of attention. auto: the fastest ones measured on the platform, such as FlashAttention-4 (the
    package flash-attn-4) on Hopper and Blackwell. reference: torch's scaled_dot_product_attention, sequence
    by sequence. It is slow, and tells whether a kernel is at fault."""

    def __hash__(self) -> int:
        # What follows from the model is cached, and dicts have no hash of their own.
        return hash((self.hf, self.checkpoint))


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: small trainable factors beside frozen matrices. Everything else of the model is frozen then."""

    rank: int = option(0, minimum=0)
    """Rank of the factors. 0: no LoRA; the model itself is trained."""
    alpha: float = option(32.0, exclusive_minimum=0)
    """What an adapter adds is multiplied by alpha / rank, so that a learning rate suits all ranks."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (rank-stabilised LoRA)."""
    dropout: float = option(0.0, minimum=0, maximum=0.99)
    """Probability of dropping an input of A. Not for experts."""
    targets: list[str] | str = option(["language"])
    """Matrices that get an adapter: a list, or one text with commas. Each entry is a kind (language,
    attention, linear_attention, mlp, shared_experts, experts, vision, merger), the end of a module's name as
    in PEFT (q_proj, attn.qkv), or a regular expression for the whole name (.*layers.[0-3].*q_proj). language:
    all of the language model but its experts. all-linear: as in PEFT, language, vision and merger."""
    modules_to_save: list[str] | str = option([])
    """Modules that are trained whole beside the adapters, by the end of their names as in PEFT (patch_embed,
    norm, input_layernorm, lm_head), or by a regular expression for the whole name. merger: all mergers.
    Written like targets."""
    adapter: str = ""
    """Start from these adapters: a run with LoRA (its latest step), or a PEFT folder. Their ranks, targets
    and scales hold; leave out the other fields of lora except dropout. Empty: new adapters."""
    stated_fields = frozenset[str]()
    """Fields that the user stated beside ``adapter``, defaults included. The parser sets it on its result; it
    is no field of a run, and copies do not have it."""

    def __post_init__(self) -> None:
        targets: list[str] = []
        for target in _split_words(self.targets):
            targets += ALL_LINEAR if target == "all-linear" else [target]
        object.__setattr__(self, "targets", targets)
        object.__setattr__(self, "modules_to_save", _split_words(self.modules_to_save))

    def __hash__(self) -> int:
        # What follows from the adapters of a run is cached, and lists have no hash of their own.
        return hash((self.rank, *self.targets))


def _split_words(words: list[str] | str) -> list[str]:
    """A list as it is; one text at its commas, except those of a regular expression's ``{1,2}``."""
    if isinstance(words, list):
        return words
    return [word.strip() for word in re.split(r",(?!\d*})", words) if word.strip()]


@dataclass(frozen=True)
class MtpConfig:
    """Multi-token prediction: the layer of Qwen3.5 (mtp.*) that predicts the token after the next one.

    Serving engines draft tokens with it. With a loss of 0, it is not trained and is exported as it was.
    """

    loss: float = option(0.0, minimum=0)
    """Factor of its loss, the mean over its own targets, beside the loss of the model (0.1 is usual). 0: the
    layer is not trained."""
    trains: Literal["head", "all"] = "head"
    """What its loss trains. head: the layer alone, without a backward pass through the model; its gradients
    are clipped by their own norm, so that the model trains as without it. all: also the model, its embedding
    and its output layer; gradients are clipped by the norm of all."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over ranks.

    The data-parallel size is the world size divided by tp * cp * pp.
    """

    tp: int = option(1, minimum=1)
    """Tensor parallel size (ranks)."""
    pp: int = option(1, minimum=1)
    """Pipeline parallel size (stages)."""
    cp: int = option(1, minimum=1)
    """Context parallel size (ranks that share a row). Each rank holds an equal, contiguous part of the row's
    tokens; attention exchanges heads between them. For rows that do not fit into the memory of one rank."""
    vpp: int = option(1, minimum=1)
    """Virtual chunks of each pipeline stage. Above 1, the schedule is interleaved 1F1B."""
    layers: list[int] | Literal["auto"] | None = None
    """Number of decoder layers in each of the pp * vpp chunks, in model order. Empty or auto: a split
    with which all stages have about equal FLOPs, the tower's included. A run that resumes keeps the one that
    it was saved with."""
    ep: int = option(1, minimum=1)
    """Expert parallel size (ranks that share a layer's experts). Leave at 1 for models without experts."""
    etp: int = option(1, minimum=1)
    """Expert tensor parallel size (ranks that share each expert's matrices). It is independent of tp."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel blocks along the sequence (needs tp > 1)."""
    distributed_optimizer: bool = True
    """Spread optimizer state over data-parallel ranks (ZeRO-1)."""

    @property
    def replica_ranks(self) -> int:
        """Number of ranks of a data-parallel replica."""
        return self.tp * self.cp * self.pp


@dataclass(frozen=True)
class VisionConfig:
    """Where the vision tower runs."""

    placement: Literal["first_stage", "decoupled"] = "first_stage"
    """first_stage: on the first pipeline stage, tensor-parallel with the language model. decoupled: on every
    rank. The ranks of a data-parallel replica then encode the images of a step together before its pipeline
    runs, so that its stages hold decoder layers only. A run may change this when it resumes."""
    # Kernels count elements in 32 bits, which limits the number of patches in a call without activations.
    patches_a_call: int = option(32768, minimum=1, maximum=2**18 // CALLS_WITHOUT_ACTIVATIONS)
    """decoupled: about how many patches a rank runs forward and backward in one call. Each keeps the tower's
    activations, which limits the memory. Calls that keep none take four times as many."""


@dataclass(frozen=True)
class RecomputeConfig:
    """Activation recompute, set separately for the language model and the vision tower."""

    language: Literal["none", "selective", "full"] = "none"
    """Language model: none, selective (what language_modules lists) or full (every layer)."""
    language_modules: list[Literal["core_attn", "mlp", "layernorm", "activation"]] = option(["core_attn"])
    """What selective recompute covers: core_attn, mlp (or router and experts), activation (of the MLP: costs
    almost nothing; of experts: CUDA only), layernorm (needs Transformer Engine, and neither
    fp8.recipe delayed nor linear attention in FP8)."""
    vision: Literal["none", "activation", "full"] = "none"
    """Vision tower: none, activation (of the MLP; costs almost nothing) or full (every layer)."""
    keep: list[Literal["attention", "experts"]] = option([])
    """What decoder layers under full recompute keep beside their inputs: attention (its output, 2 x tokens x
    query heads x head dim bytes; only with FlashAttention-4) and experts (their first product, 4 x tokens x
    experts of a token x FFN size bytes). Numbers stay the same."""
    offload_inputs: bool = False
    """Keep the inputs of layers under full recompute in pinned host memory, from where they return one layer
    ahead of the backward pass. For each layer and each row in flight, 2 x tokens x hidden size bytes move
    from the GPU to the host. Numbers stay the same, so a run may resume with or without it. On CPU it saves
    nothing."""

    def __hash__(self) -> int:
        # FLOPs are cached, and lists have no hash of their own.
        return hash((self.language, self.vision, *self.keep))

    @property
    def selected_modules(self) -> set[str]:
        """The modules of the language model under selective recompute; empty under another mode."""
        return set(self.language_modules) if self.language == "selective" else set()


@dataclass(frozen=True)
class Fp8Config:
    """Matrix products of the layers in FP8 (Transformer Engine on Hopper or later).

    Weights and gradients keep their types. Products of routed experts stay in bf16.
    """

    recipe: Literal["none", "tensorwise", "delayed", "blockwise"] = "none"
    """How tensors are scaled: tensorwise (by their current maximum), delayed (by earlier maxima, which is the
    fastest) or blockwise (blocks of 128 elements). none: no FP8."""
    vision: bool = False
    """Use FP8 in the vision tower too, with a scale for each patch whatever the recipe. Off: in the language
    model only."""


@dataclass(frozen=True)
class DataConfig:
    """The data set, and how rows are made from it."""

    path: list[dict[str, Any]] | str = ""
    """Folder written by `megatron-vl data convert`, a folder of its parts (part-00000-of-00008, ...), or an
    Energon metadataset YAML; here or in an object store (`msc://PROFILE/FOLDER`). A list of `{path, weight}`
    is a blend. synthetic:images or synthetic:text: random rows, to try a layout or its speed without a data
    set, tokenizer or image processor."""
    seq_len: int = option(4096, minimum=1)
    """Tokens of a row."""
    pack: bool = True
    """Put several samples into a row. Off: one sample per row."""
    max_patches: int = option(0, minimum=0)
    """Largest number of vision patches in a row. 0: limited by seq_len only."""
    too_long: Literal["cut", "drop"] = "cut"
    """What becomes of a sample that does not fit into a row. cut: it is cut into consecutive parts that do,
    and each part is trained on as a sample of its own: a document between tokens of its texts, a conversation
    between whole exchanges, each part with the system turn. drop: it is left out."""
    min_pixels: int = option(0, minimum=0)
    """Smallest image area in pixels after resizing. 0: the checkpoint's image processor decides."""
    max_pixels: int = option(0, minimum=0)
    """Largest image area in pixels after resizing. 0: the checkpoint's image processor decides."""
    video_fps: float = option(2.0, exclusive_minimum=0)
    """Frames taken from each second of a video."""
    video_max_frames: int = option(32, minimum=1)
    """Largest number of frames taken from a video."""
    video_max_pixels: int = option(0, minimum=0)
    """Largest area of a video frame in pixels after resizing (Qwen3-VL: of all frames together). 0: the same
    as for images (Qwen3-VL: the checkpoint's video processor decides)."""
    chat_template: str = ""
    """File with another chat template (Jinja) than that of model.hf. The run's exports hold it.
    qwen2_vl_tools: the template of Qwen2-VL and Qwen2.5-VL with tools, which theirs leaves out."""
    template_arguments: dict[str, Any] = option({})
    """Arguments of the chat template, such as `{preserve_thinking: true}`, for all conversations; a record's
    `chat_template_kwargs` come first. The run's exports name them: give a server the same."""
    empty_think: LossOn = "masked"
    """Loss on the empty block of thinking that the chat templates of thinking models write into an answer
    without thinking. masked: none, as a request without thinking already contains the block. trained: the
    model learns to close the block at once, so that it answers without thinking where it may think."""
    earlier_answers: LossOn = "trained"
    """Loss on the answers before the last question, from which the chat templates of thinking models leave
    out the thinking. trained: they are trained on as the template writes them, without thinking. masked: only
    the answers after the last question are trained on, which look as the served model writes them."""
    num_workers: int = option(2, minimum=0)
    """Loader processes of each data-parallel rank. 0: load in the training process."""
    shuffle: bool = True
    """Draw the samples in a random order, another one in each epoch. Off: in the order of the data set."""
    max_bad_share: float = option(0.01, minimum=0, maximum=1)
    """Stop the run when more than this share of the samples could not be used (0 to 1)."""
    seed: int = option(1234, minimum=0, maximum=2**32 - 1)
    """Seed of the sample order, or of random rows."""

    @property
    def is_synthetic(self) -> bool:
        """Whether rows are random, and there is no data set."""
        return isinstance(self.path, str) and self.path.startswith("synthetic:")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedules, and the learning rates of the model's parts."""

    lr: float = option(1e-5, minimum=0)
    """Peak learning rate of the language model (and of the parts below when they are not set)."""
    vision_lr: float | None = option(None, minimum=0)
    """Peak learning rate of the vision tower. Empty: lr. 0: its weights do not change (model.freeze_vision
    also saves the memory of its gradients and moments)."""
    merger_lr: float | None = option(None, minimum=0)
    """Peak learning rate of the merger. Empty: lr. 0: its weights do not change."""
    min_lr_ratio: float = option(0.1, minimum=0, maximum=1)
    """Final learning rate as a fraction of the peak (all schedules but constant)."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape of the learning rate after warm-up. wsd (warm-up, stable, decay): constant, then linear to the
    end."""
    decay_steps: int | None = option(None, minimum=2)
    """Last steps of the run, in which wsd decays; the first of them still has the peak. Empty: a tenth of the
    run's steps."""
    warmup_steps: int | None = option(None, minimum=0)
    """Steps of linear warm-up: of n steps, the first has 1/n of the rate, and the last the whole. Empty: 3 %
    of the run's steps."""
    weight_decay: float = option(0.1, minimum=0)
    """Weight decay of matrices; biases and norms have none."""
    beta1: float = option(0.9, minimum=0, maximum=1)
    """Adam: decay of the first moment."""
    beta2: float = option(0.95, minimum=0, maximum=1)
    """Adam: decay of the second moment."""
    eps: float = option(1e-8, minimum=0)
    """Adam: term added to the denominator."""
    clip_grad: float = option(1.0, minimum=0)
    """Largest global gradient norm. 0: no clipping."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which Adam's two moments are kept. bfloat16 halves the optimizer state of a bf16 model (6 bytes
    a parameter, not 12). Adam still computes in float32; moments are rounded stochastically, with the same
    bits in every layout. A run may resume with the other type: then moments are converted."""
    offload_fraction: float | Literal["auto"] = option(0.0, minimum=0, maximum=1)
    """Share of the optimizer state that is kept in host memory and streamed through the GPU when weights are
    updated (0 to 1). Numbers do not change, nor do checkpoints: a run may resume with any other share.
    auto: as little as fits by the memory estimate."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming the run."""

    dir: str = ""
    """Folder for the run's checkpoints. A run resumes from the latest one in it. Empty: save nothing."""
    interval: int = option(500, minimum=0)
    """Steps between checkpoints; the last step is saved too. 0: save the last step only."""
    keep: int = option(2, minimum=0)
    """Number of latest checkpoints to keep. 0: keep all."""
    keep_every: int = option(0, minimum=0)
    """Never delete checkpoints of multiples of this step. 0: keep only the latest ones."""
    export_hf: int | Literal["last"] = 0
    """Steps between exports to a Hugging Face folder, dir/hf/step_NNNNNNNN, with config, tokenizer, processor
    and chat template of model.hf: a multiple of interval. The last step is exported too. last: export only
    the last step. 0: export none. A separate process on the node of rank 0 makes each export from the saved
    step while training continues; the run waits for it at the end. A failed export does not stop the run.
    The next start makes up for a missing export as long as its checkpoint exists; keep deletes no checkpoint
    before its export."""


@dataclass(frozen=True)
class EvalConfig:
    """Validation during training: before the first step, every `interval` steps, and at the end."""

    interval: int = option(0, minimum=0)
    """Steps between evaluations. 0: do not evaluate."""
    split: str = "val"
    """Split of the data set to evaluate on (`megatron-vl data convert --val-fraction` creates val)."""
    rows: int = option(64, minimum=1)
    """Number of rows to compute the loss on, over all ranks: the first ones of the split. They stay in host
    memory, pixels included."""
    answers: int = option(0, minimum=0)
    """Number of samples, the first ones of the split, that transformers answers with the exported last step
    when the ranks that `megatron-vl train` started have ended. The command prints how many answers equal
    their reference; white space around them does not count. If references hold boxes, it also prints their
    mean intersection over union. The answers are written to
    checkpoint.dir/hf/step_NNNNNNNN_answers.jsonl. 0: answer none."""


@dataclass(frozen=True)
class LogConfig:
    """What the run prints and writes."""

    interval: int = option(1, minimum=1)
    """Steps between printed lines. For models with experts, a line says for instance "busiest expert 3.44x":
    in the least even layer, the busiest expert gets 3.44 times the mean number of tokens
    (1: even; padding is not counted). With expert parallelism also "busiest rank 1.20x": on average over the
    layers, the rank with the most tokens gets 1.20 times the mean, and the others wait for it."""
    tensorboard: str = ""
    """Folder for TensorBoard events. Empty: write none. The section wandb configures Weights & Biases."""
    samples: bool = False
    """Write the keys of each step's samples to samples.jsonl in checkpoint.dir."""
    peak_tflops: float = option(0.0, minimum=0)
    """Peak of one accelerator in TFLOP/s, for MFU.
    0: look it up by the device's name (989 for H100 and H200 in bf16)."""


@dataclass(frozen=True)
class FailuresConfig:
    """What ends a run that cannot continue. A rank that fails or dies always ends it."""

    # At most a week: sockets count milliseconds in 32 bits, and the first step may take three times as long.
    timeout_s: float = option(600.0, minimum=0, maximum=7 * 24 * 3600)
    """Seconds without progress on any rank (no row, no micro-batch, no part of a file) after which the run
    ends with a message. Until the first step is done, while kernels are compiled, and while training waits
    for the disk to confirm a file of a checkpoint, the limit is three times as long and at least five
    minutes. 0: only the collectives' own limit of 30 minutes applies, as a debugger needs it."""
    check_memory: bool = True
    """Refuse to start a run whose memory estimate exceeds the memory of this machine's GPUs. Off: start
    anyway, with a note."""


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases, beside metrics.jsonl and TensorBoard; needs the extra `wandb`."""

    project: str = ""
    """Project that the run belongs to. Empty: send nothing to Weights & Biases. A resumed run continues in
    the same W&B run; its id is in wandb.json in checkpoint.dir. To begin another one, delete that file.
    W&B's own variables set the rest: WANDB_ENTITY, WANDB_NAME (otherwise the name of the folder
    checkpoint.dir), WANDB_MODE, WANDB_DIR (otherwise checkpoint.dir)."""


@dataclass(frozen=True)
class ProfileConfig:
    """Traces of some steps by torch.profiler, for Perfetto (ui.perfetto.dev) or TensorBoard.

    The numbers of the run stay the same.
    """

    steps: list[int] | None = None
    """First and last step to trace, both included, as in [5, 7]. Steps are counted from 1 over the whole run,
    as printed, also after a resume. Empty: trace none."""
    ranks: list[int] = option([0])
    """Ranks that write a trace each, profile/rank_NNNNN_steps_A_to_B.pt.trace.json.gz in checkpoint.dir."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    mtp: MtpConfig = field(default_factory=MtpConfig)
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
    steps: int = option(0, minimum=0)
    """Optimizer steps of the whole run. The schedule ends here. 0: those of epochs."""
    epochs: int = option(0, minimum=0)
    """Passes over the data, each of which trains on every usable sample exactly once; excludes steps. One
    pass if both are left out. A blend by weights has no passes."""
    stop_after: int | None = option(None, minimum=1)
    """Save and stop at this step; the schedule still ends at `steps`."""
    global_batch_size: int = option(8, minimum=1)
    """Rows in one optimizer step, over all data-parallel ranks. Each is a micro-batch, so that gradients are
    accumulated over global_batch_size / dp of them."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of computation. With bfloat16, master weights and gradients are float32. auto: bfloat16 on GPUs,
    float32 on CPU, where Megatron-core rounds bfloat16 more than transformers does."""
    platform: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to run. auto: cuda if there is a GPU, otherwise cpu."""
    seed: int = option(1234, minimum=0, maximum=2**32 - 1)
    """Seed of the random initial weights."""

    def trains_part(self, model_part: str) -> bool:
        """Whether the run trains anything in ``model_part``: language, vision or merger. The layer of
        multi-token prediction counts as language, and is trained beside a frozen model too."""
        is_frozen = getattr(self.model, f"freeze_{model_part}")
        return not is_frozen or model_part == "language" and bool(self.mtp.loss)

    @property
    def decay_steps(self) -> int:
        """Steps of wsd's decay of a run whose ``steps`` are known."""
        return self.optimizer.decay_steps or max(2, self.steps // 10)

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up of a run whose ``steps`` are known."""
        given_steps = self.optimizer.warmup_steps
        return int(WARMUP_SHARE * self.steps) if given_steps is None else given_steps


@functools.cache
def field_types(config_class: type = TrainConfig, name_prefix: str = "") -> dict[str, Any]:
    """All fields in order: dotted name -> type."""
    types_by_name: dict[str, Any] = {}
    for name, type_hint in typing.get_type_hints(config_class).items():
        is_section = dataclasses.is_dataclass(type_hint)
        types_by_name |= (
            field_types(type_hint, f"{name_prefix}{name}.") if is_section else {name_prefix + name: type_hint}
        )
    return types_by_name


_TYPE_DESCRIPTIONS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "nothing (null)",
    list[int]: "a list of whole numbers such as [8,20]",
    list[str]: "a list of words such as [one,two]",
    list[dict[str, Any]]: "a list of {path, weight}",
    dict[str, Any]: "a mapping such as {name: value}",
}


def describe_type(type_hint: Any) -> str:
    """A field's type in a user's words."""
    if typing.get_origin(type_hint) is Literal:
        literal_values = typing.get_args(type_hint)
        return f"{'one of ' if len(literal_values) > 1 else ''}{', '.join(map(repr, literal_values))}"
    if type_hint in _TYPE_DESCRIPTIONS:
        return _TYPE_DESCRIPTIONS[type_hint]
    return " or ".join(describe_type(part) for part in typing.get_args(type_hint))
