"""Estimates the GPU memory of each pipeline stage of a run before anything is allocated.

Parameters are counted from the tensor table, so weights, gradients and optimizer state are exact. Activations
are what the modules keep for their backward pass. Each token (or patch) of a layer of width ``h`` and FFN
width ``f`` keeps these elements:

- Input and output of both norms: 4 h. Tensor-parallel ranks share them only under sequence parallelism, which
  the vision tower does not have.
- q and k after RoPE, v and attention: the widths of heads and key/value heads. With Transformer Engine, v is
  a copy. FlashAttention's v is a view that keeps the whole fused QKV output. Window layers keep that and the
  output; our kernels for full attention keep a rotated copy of it and the output.
- Attention with an output gate: also the gate, its sigmoid in float32, and the gated output.
- Linear attention: the output of its input projection, q, k and v after the convolution, the rule's output
  and the normalised one, and of each value head the gates and a row of its chunk's matrix of 64 x 64. With
  ``core_attn`` recomputed, the projection's output and the normalised one.
- MLP, linear and activation: 3 f with a gate, 2 f without one; for experts ``top_k`` times that, and their
  inputs. A shared expert: the same of its own width, and its output.

The number of micro-batches in flight comes from simulating the schedule (1F1B or interleaved). The loss holds
the logits twice, because Transformer Engine's cross entropy copies them; they are counted for every token, as
in a row that consists of answers only. Experts are assumed to be evenly loaded, and FP8 is not modelled. The
CUDA context, NCCL's buffers and memory that the allocator cannot use are not counted; :data:`RESERVE_GIB`
leaves room for them. ``docs/log/memory.md`` compares the formula with measurements.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from megatron_vl.config import ModelConfig, RecomputeConfig, TrainConfig, VisionConfig
from megatron_vl.kernels.sizes import DELTA_CHUNK, STATE_CHUNK_BYTES, STATE_CHUNKS_ON_GPU, TE_HEADS
from megatron_vl.kernels.tower_heads import kernels_are_fastest
from megatron_vl.spec.families import LanguageSpec, ModelSpec, VisionSpec
from megatron_vl.spec.families.base import MoeSpec
from megatron_vl.spec.layout import Layout, key_value_copies
from megatron_vl.spec.tensors import EMBEDDING, Cut, TensorInfo, part_of, tensor_table

GIB = 2**30
GPU_GIB = {"H200 (141 GB)": 139.8, "H100 (80 GB)": 79.1, "A100 (80 GB)": 79.1, "B200 (180 GB)": 178.4}
"""The memory of a GPU that CUDA reports."""
RESERVE_GIB = 8.0
"""GPU memory that an estimate must leave free."""
WORKSPACE_GIB = 0.5
"""Workspaces of cuBLAS and Transformer Engine and small tensors: the measured excess over the formula
on one GPU."""


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of each GPU of one pipeline stage, in bytes by part."""

    stage: int
    weights: float = 0.0
    gradients: float = 0.0
    """Main gradients in float32."""
    optimizer: float = 0.0
    """float32 master weights and two moments (``optimizer.moments_dtype``) without what is offloaded;
    ``distributed_optimizer`` splits them over data-parallel ranks."""
    activations: float = 0.0
    """Activations of the decoder layers and the embedding, for all micro-batches in flight."""
    vision: float = 0.0
    """Activations of the vision tower, for all micro-batches in flight."""
    logits: float = 0.0
    rows: float = 0.0
    """Rows of a whole step in the form that the loader delivers."""
    workspace: float = WORKSPACE_GIB * GIB
    in_flight: int = 0
    """Largest number of micro-batches whose activations are held at once (with
    virtual chunks: chunk-micro-batches)."""
    host: float = 0.0
    """Host memory for this rank's offloaded optimizer state; not part of the total."""

    @property
    def total(self) -> float:
        return sum(getattr(self, part) for part in PARTS)

    def as_json(self) -> dict[str, float | int]:
        """GiB by part."""
        parts = {part: round(getattr(self, part) / GIB, 2) for part in PARTS}
        return {
            "stage": self.stage,
            "in_flight": self.in_flight,
            **parts,
            "total": round(self.total / GIB, 2),
            "host": round(self.host / GIB, 2),
        }


PARTS = ("weights", "gradients", "optimizer", "activations", "vision", "logits", "rows", "workspace")


def stage_memories(
    config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int, patches: int | None = None
) -> list[StageMemory]:
    """The peak memory of each pipeline stage, first stage first.

    Args:
        layout: it need not be the one that ``config`` asks for.
        patches: vision patches of the fullest row; None: as many as a row can hold (``data.max_patches``, or
            as many as fill every token with a merged feature).
    """
    most = config.data.seq_len * spec.vision.merge_unit
    if patches is None:
        patches = min(most, config.data.max_patches or most)
    micro_batches = config.global_batch_size // dp
    sizes = _Sizes.of(config, spec, layout, patches)
    held = [_parameters(config, spec, layout, stage, dp, sizes.element) for stage in range(layout.pp)]
    return [_with_activations(sizes, parameters, micro_batches) for parameters in held]


def peak_gib(stages: list[StageMemory]) -> float:
    """The estimate for the fullest stage in GiB."""
    return max(stage.total for stage in stages) / GIB


def _with_activations(sizes: _Sizes, parameters: StageMemory, micro_batches: int) -> StageMemory:
    """Adds activations and rows to the memory of a stage's parameters."""
    stage, spec, layout, element = parameters.stage, sizes.spec, sizes.layout, sizes.element
    chunks = [sizes.chunk(stage, v) for v in range(layout.vpp)]
    # Context-parallel ranks of the first stage divide the pictures of a row.
    encoded = dataclasses.replace(sizes, patches=-(-sizes.patches // layout.cp))
    vision = encoded.vision() if stage == 0 and not layout.decoupled else _Held()
    # What is held does not grow any more after the warm-up.
    order = _held_at_most(layout.pp, layout.vpp, stage, min(micro_batches, 4 * layout.pp))

    # Chunk 0 of stage 0 also holds the tower's activations, so the peak is that of both together.
    weight = [c.kept + (vision.kept if v == 0 else 0.0) for v, c in enumerate(chunks)]
    held = max(order, key=lambda held: sum(n * w for n, w in zip(held, weight, strict=True)))
    activations = sum(n * c.kept for n, c in zip(held, chunks, strict=True))

    # A decoder layer and a vision layer are never recomputed at the same time.
    recomputed = max(c.transient for c in chunks)
    last = stage == layout.pp - 1
    logits = 2.0 * element * sizes.seq_len * spec.language.vocab_size / layout.tp if last else 0.0
    tower = held[0] * vision.kept + max(0.0, vision.transient - recomputed)
    rows = micro_batches * sizes.row(stage == 0)
    if layout.decoupled:
        share = -(-micro_batches * sizes.patches // layout.replica_ranks)
        alone = dataclasses.replace(sizes, layout=dataclasses.replace(layout, tp=1), patches=share)
        tower = alone.decoupled(
            activations + recomputed + logits, micro_batches * sizes.patches * (stage == 0)
        )
        rows += alone.row(pixels=True)
    estimated = dataclasses.replace(
        parameters,
        activations=activations + recomputed,
        vision=tower,
        logits=logits,
        rows=rows,
        in_flight=sum(held),
    )
    # Offloaded state passes through the GPU where activations were before.
    free = estimated.activations + estimated.vision + estimated.logits
    passing = max(0.0, min(STATE_CHUNKS_ON_GPU * STATE_CHUNK_BYTES, estimated.host) - free)
    return dataclasses.replace(estimated, optimizer=estimated.optimizer + passing)


# --- Parameters ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters on one GPU."""

    held: float = 0.0
    trained: float = 0.0
    owned: float = 0.0
    """Trained ones whose optimizer state this GPU owns."""
    tensors: int = 0
    """Trained tensors; each expert's matrix is a tensor of its own."""

    def __sub__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.held - other.held,
            self.trained - other.trained,
            self.owned - other.owned,
            self.tensors - other.tensors,
        )

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.held + other.held,
            self.trained + other.trained,
            self.owned + other.owned,
            self.tensors + other.tensors,
        )


def stage_parameters(config: TrainConfig, spec: ModelSpec, layout: Layout, stage: int, dp: int) -> Parameters:
    """The parameters of one GPU of a pipeline stage."""
    m, p = config.model, config.parallel
    frozen = (m.freeze_vision, m.freeze_merger, m.freeze_language)
    ranks = layout.tp * layout.cp * dp, layout.replica_ranks * dp
    sections = _sections(spec, layout.cut, ranks, p.distributed_optimizer, frozen)
    last = stage == layout.pp - 1
    found = Parameters()
    if stage == 0 or layout.decoupled:
        found += sections["vision", -1]
    if stage == 0:
        found += sections["embedding", -1]
    if last:
        found += sections["head", -1]
    if last and layout.pp > 1 and spec.language.tied_embeddings:
        found += sections["tied", -1]
    for v in range(layout.vpp):
        layers = layout.chunk_layers(stage, v)
        found += sections["before", layers.stop] - sections["before", layers.start]

    return found


@functools.cache
def _sections(
    spec: ModelSpec, cut: Cut, ranks: tuple[int, int], distributed: bool, frozen: tuple[bool, bool, bool]
) -> dict[tuple[str, int], Parameters]:
    """The parameters of each section of the model on one GPU; ``ranks`` are those of a stage and of all.

    ``before`` a layer are those of all decoder layers before it.
    """
    parts = dict(zip(("vision", "merger", "language"), frozen, strict=True))

    def count(infos: tuple[TensorInfo, ...]) -> Parameters:
        found = Parameters()
        for info in infos:
            # Experts have their own data-parallel group: the ranks of a stage that hold the same experts.
            copies = ranks[0] // (cut.parts(info) if info.experts else cut.tp)
            if cut.on_every_rank(info):
                copies = ranks[1]
            shape = info.shard_shape(cut)
            n = math.prod(shape)
            trained = 0 if parts[part_of(info.name)] else n
            tensors = (shape[0] if info.experts else 1) * bool(trained)
            found += Parameters(n, trained, trained / (copies if distributed else 1), tensors)
        return found

    tensors = _tensors_of(spec)
    found = {(name, -1): count(tensors[name]) for name in ("vision", "embedding", "head", "tied")}
    kinds = {name: count(infos) for name, infos in tensors.items() if name.startswith("layer")}
    before = Parameters()
    for layer in range(spec.language.num_layers):
        found["before", layer] = before
        before += kinds[_kind(spec, layer)]
    found["before", spec.language.num_layers] = before
    return found


@functools.cache
def _tensors_of(spec: ModelSpec) -> dict[str, tuple[TensorInfo, ...]]:
    """The tensors of each section, and of one decoder layer of each kind."""
    found: dict[str, list[TensorInfo]] = {"vision": [], "embedding": [], "head": [], "tied": []}
    first: dict[str, int] = {}
    for info in tensor_table(spec).values():
        name = info.section
        if name == "layer":
            name = _kind(spec, info.layer)
            if first.setdefault(name, info.layer) != info.layer:
                continue
        found.setdefault(name, []).append(info)
        if info.name == EMBEDDING:
            found["tied"].append(info)
    return {name: tuple(infos) for name, infos in found.items()}


def _kind(spec: ModelSpec, layer: int) -> str:
    """Decoder layers of one kind have the same tensors."""
    experts = " with experts" if spec.language.has_experts(layer) else ""
    return f"layer{experts}" + (" and linear attention" if spec.language.is_linear(layer) else "")


def parameter_bytes(config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int) -> float:
    """Weights, gradients and optimizer state of one GPU of every stage together."""
    m, p = config.model, config.parallel
    frozen = (m.freeze_vision, m.freeze_merger, m.freeze_language)
    ranks = layout.tp * layout.cp * dp, layout.replica_ranks * dp
    held, trained, owned = _sum_of_sections(spec, layout.cut, ranks, p.distributed_optimizer, frozen)
    element = 2 if config.dtype == "bfloat16" else 4
    state, _ = state_bytes(config)
    return element * held + 4 * trained + state * owned * (1 - offloaded(config))


@functools.cache
def _sum_of_sections(
    spec: ModelSpec, cut: Cut, ranks: tuple[int, int], distributed: bool, frozen: tuple[bool, bool, bool]
) -> tuple[float, float, float]:
    sections = _sections(spec, cut, ranks, distributed, frozen)
    every = [sections[name, -1] for name in ("vision", "embedding", "head")]
    every.append(sections["before", spec.language.num_layers])
    return sum(f.held for f in every), sum(f.trained for f in every), sum(f.owned for f in every)


def _parameters(
    config: TrainConfig, spec: ModelSpec, layout: Layout, stage: int, dp: int, element: int
) -> StageMemory:
    found = stage_parameters(config, spec, layout, stage, dp)
    share = offloaded(config)
    on_gpu, in_host_memory = state_bytes(config)
    host = in_host_memory * found.owned * share
    here = on_gpu * found.owned * (1 - share)
    return StageMemory(stage, element * found.held, 4 * found.trained, here, host=host)


def state_bytes(config: TrainConfig) -> tuple[int, int]:
    """Bytes of optimizer state of one parameter: on the GPU, and in host memory.

    float32 weights are their own master weights. Of a bf16 model's, a half lies in its weights where the
    state is kept in chunks: in host memory, and everywhere if moments are bf16.
    """
    halves = 2 if config.dtype == "bfloat16" else 0
    if config.optimizer.moments_dtype == "bfloat16":
        return 4 + halves, 4 + halves
    return 8 + 2 * halves, 8 + halves


def offloaded(config: TrainConfig) -> float:
    """Share of the optimizer's state in host memory; ``auto`` counts as none until it is resolved."""
    share = config.optimizer.offload_fraction
    return share if isinstance(share, int | float) else 0.0


# --- Activations --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """Bytes of one micro-batch: those kept until its backward pass, and those needed while a
    layer is recomputed."""

    kept: float = 0.0
    transient: float = 0.0


@dataclass(frozen=True)
class _Sizes:
    """Computes the bytes of the activations of one micro-batch on one rank."""

    model: ModelConfig
    recompute: RecomputeConfig
    calls: VisionConfig
    sequence_parallel: bool
    seq_len: int
    """Tokens of a row on one rank."""
    spec: ModelSpec
    layout: Layout
    element: int
    patches: int

    @staticmethod
    def of(config: TrainConfig, spec: ModelSpec, layout: Layout, patches: int) -> _Sizes:
        element = 2 if config.dtype == "bfloat16" else 4
        shares_tokens = config.parallel.sequence_parallel
        sections = config.model, config.recompute, config.vision
        tokens = config.data.seq_len // layout.cp
        return _Sizes(*sections, shares_tokens, tokens, spec, layout, element, patches)

    @property
    def _shared(self) -> int:
        """Number of ranks that share what lies between the linears of a decoder layer."""
        return self.layout.tp if self.sequence_parallel else 1

    def chunk(self, stage: int, v: int) -> _Held:
        """The share of one chunk of the language model."""
        m = self.spec.language
        layout = self.layout
        recompute = self.recompute
        first = stage + v == 0
        last = stage == layout.pp - 1 and v == layout.vpp - 1
        token = self.element * self.seq_len
        hidden = token * m.hidden_size / self._shared
        layers = [
            token * self._kinds[m.has_experts(layer), m.is_linear(layer)]
            for layer in layout.chunk_layers(stage, v)
        ]

        # The input: the stage's input with room for levels of DeepStack, or the embedding and its copy
        # with features.
        levels = len(self.spec.vision.deepstack_layers)
        ends = (
            hidden * (1 + levels) + (hidden * self._shared if first else 0.0) + (2 * hidden if last else 0.0)
        )
        linear = any(m.is_linear(layer) for layer in layout.chunk_layers(stage, v))
        rule = token * self._delta_rule(m) + self._gathered_states(m) if linear else 0.0
        if recompute.language == "full":
            return _Held(len(layers) * hidden + ends, max(layers, default=0.0) + rule)

        return _Held(sum(layers) + ends, rule)

    @functools.cached_property
    def _kinds(self) -> dict[tuple[bool, bool], float]:
        """Elements of one token in a decoder layer: (with experts, with linear attention)."""
        m = self.spec.language
        both = (False, True)
        return {(e, linear): self._decoder_layer(m, e, linear) for e in both for linear in both}

    def _decoder_layer(self, m: LanguageSpec, experts: bool, linear: bool) -> float:
        """Elements of one token; log-sum-exp and router values are converted to the elements' size."""
        tp, r = self.layout.tp, self.recompute
        modules = set(r.language_modules) if r.language == "selective" else set()

        attention = self._linear_attention(m, modules) if linear else self._attention(m)
        norms = 4 * m.hidden_size / self._shared
        if m.moe is not None and experts:
            return (
                norms
                + attention
                + ("mlp" not in modules) * self._experts(m.hidden_size, m.moe, "activation" in modules)
            )

        mlp = (2 if "activation" in modules else 3) * m.ffn_hidden_size / tp
        if "mlp" in modules:
            mlp = 0.0
            norms = norms - m.hidden_size / self._shared
        return norms + attention + mlp

    def _attention(self, m: LanguageSpec) -> float:
        tp = self.layout.tp
        # A rank holds whole key/value heads; with more ranks than heads, the heads are copied.
        heads = m.num_heads * m.head_dim / tp
        kv = max(m.num_kv_heads / tp, 1.0) * m.head_dim
        exchanged = 0.0
        if self.layout.cp > 1:
            kv *= key_value_copies(max(1, m.num_kv_heads // tp), self.layout.cp)
            exchanged = heads  # the output of attention is kept before and after the exchange
        name = self.model.language_attention
        fused = name == "te" or (name == "auto" and m.head_dim in TE_HEADS)
        v = kv if fused else heads + 2 * kv
        gate = heads * (2 + 4 / self.element) if m.output_gate else 0.0
        return heads + kv + v + heads + exchanged + m.num_heads * 4 / self.element / tp + gate

    def _linear_attention(self, m: LanguageSpec, modules: set[str]) -> float:
        a = m.linear_attention
        if a is None:
            return 0.0
        values = a.value_heads * a.value_dim
        projected = a.conv_channels + values + 2 * a.value_heads
        inside = a.conv_channels + values + a.value_heads * (1 + 4 / self.element + DELTA_CHUNK)
        return (projected + values + inside * ("core_attn" not in modules)) / self.layout.tp

    def _delta_rule(self, m: LanguageSpec) -> float:
        """Elements of one token that the backward pass of a delta rule holds while it runs: the states of all
        chunks in both directions, and products that are computed a second time."""
        a = m.linear_attention
        assert a is not None
        states = 2 * a.key_dim * a.value_dim / DELTA_CHUNK
        return a.value_heads * (states + 2 * a.key_dim + 4 * a.value_dim) / self.layout.tp

    def _gathered_states(self, m: LanguageSpec) -> float:
        """Bytes of the states and matrices that a rank receives from all ranks that share its rows."""
        a = m.linear_attention
        assert a is not None
        ranks = self.layout.cp if self.layout.cp > 1 else 0
        return 4 * ranks * a.state_exchange_size / self.layout.tp

    def _experts(self, hidden_size: int, moe: MoeSpec, activation_again: bool) -> float:
        """Elements of one token: router logits, probabilities and the map in float32; inputs of the
        experts, their linear and activation. A token becomes ``top_k`` rows. With an even load, a
        rank's experts process as many rows as its own tokens become, times the number of ranks that
        share its experts' matrices."""
        inside = moe.top_k * (
            self.layout.etp * hidden_size + (2 if activation_again else 3) * moe.ffn_hidden_size
        )
        shared = 0.0
        if moe.shared_ffn_hidden_size:
            shared = (2 if activation_again else 3) * moe.shared_ffn_hidden_size + hidden_size
        return (inside + shared + 3 * moe.num_experts * 4 / self.element) / self._shared

    def vision(self) -> _Held:
        """The tower on one row's patches; it is tensor-parallel without sequence parallelism."""
        v = self.spec.vision
        model = self.model
        tp = self.layout.tp
        patch = self.element * self.patches
        layers = [patch * self._vision_layer(v, layer) for layer in range(v.num_layers)]

        # Pixels are kept as float32 and twice as patches; mergers keep the outputs of their norm, linear
        # and activation.
        pixels = self.patches * v.patch_dim * (2 + 2 * self.element)
        mergers = (
            (1 + len(v.deepstack_layers))
            * patch
            * (v.hidden_size * (2 + 2 / tp) + v.out_hidden_size / v.merge_unit)
        )
        if model.freeze_vision:
            return _Held(0.0 if model.freeze_merger else mergers, max(layers) + pixels)
        if self.recompute.vision == "full":
            return _Held(v.num_layers * patch * v.hidden_size + mergers + pixels, max(layers))

        return _Held(sum(layers) + mergers + pixels)

    def decoupled(self, others: float, placed: int) -> float:
        """A tower that every rank holds, for the rank's own share of a step's patches.

        It runs while the activations of the pipeline do not exist, and may use their memory.

        Args:
            others: bytes of these activations.
            placed: patches whose features this stage holds, and whose gradients.
        """
        v, calls = self.spec.vision, self.calls
        frozen = self.model.freeze_vision and self.model.freeze_merger
        unkept = dataclasses.replace(self.model, freeze_vision=True, freeze_merger=True)

        def peak(patches: int, model: ModelConfig) -> float:
            held = dataclasses.replace(self, model=model, patches=min(self.patches, patches)).vision()
            return held.kept + held.transient

        encode = peak(calls.encode_patches, unkept)
        backward = 0.0 if frozen else peak(calls.backward_patches, self.model)
        feature = self.element * (1 + len(v.deepstack_layers)) * v.out_hidden_size / v.merge_unit
        features = feature * placed * (1 if frozen else 2)
        own = feature * self.patches

        kept = 0.0
        if not frozen:
            most = self.patches if self.model.freeze_vision else calls.keep_patches
            kept = dataclasses.replace(self, patches=min(self.patches, most)).vision().kept
        # What is kept is there beside the pipeline's passes and the first pass of other pictures; its own
        # backward pass comes first and frees it.
        return features + max(kept, own + backward - others, kept + own + encode - others)

    def _vision_layer(self, v: VisionSpec, layer: int) -> float:
        model, tp = self.model, self.layout.tp
        if not v.is_full_attention(layer) and model.window_attention != "backend":
            attention = 4.0 * v.hidden_size  # one kernel from the fused QKV output to the attention's output
        elif model.vision_attention == "triton" or model.vision_attention == "auto" and self._own_kernels(v):
            # likewise, from rotated copies
            attention = 4.0 * v.hidden_size + v.num_heads * 4 / self.element
        else:
            fused = v.hidden_size if model.vision_attention == "te" else 3 * v.hidden_size
            attention = 3 * v.hidden_size + fused + v.num_heads * 4 / self.element
        mlp = (3 if v.gated_mlp else 2) - (self.recompute.vision == "activation")
        return 4 * v.hidden_size + (attention + mlp * v.padded_ffn_hidden_size) / tp

    def _own_kernels(self, v: VisionSpec) -> bool:
        """Whether ``auto`` means ``triton`` on GPUs, like
        :func:`megatron_vl.models.attention.choose_backend`, whose module takes seconds to import."""
        return self.element == 2 and kernels_are_fastest(v.head_dim)

    def row(self, pixels: bool) -> float:
        """One row on the device: 24 bytes per token in int32 buffers of the whole row, 44 in int64 copies of
        this rank's tokens, and uint8 planes of every patch."""
        v = self.spec.vision
        return (24.0 * self.layout.cp + 44.0) * self.seq_len + (
            self.patches * (v.patch_dim / v.temporal_patch_size + 32) if pixels else 0.0
        )


# --- Schedule -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _held_at_most(pp: int, vpp: int, stage: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """The different states of :func:`play_schedule`, in order."""
    return tuple(dict.fromkeys(play_schedule(pp, vpp, stage, micro_batches)))


def warm_up_passes(pp: int, vpp: int, stage: int, micro_batches: int) -> int:
    """Number of forward passes of a stage before its first backward pass."""
    passes = (pp - stage - 1) * 2 + (vpp - 1) * pp if vpp > 1 else pp - stage - 1
    return min(passes, micro_batches * vpp)


def play_schedule(pp: int, vpp: int, stage: int, micro_batches: int) -> list[tuple[int, ...]]:
    """The micro-batches whose activations each chunk of a stage holds, after every forward pass of a step.

    The order is that of Megatron-core's ``forward_backward_pipelining_with(out)_interleaving``: warm-up
    forward passes, then alternating forward and backward passes, then the remaining backward passes. With
    interleaving, the chunks take turns of ``pp`` micro-batches each, in the backward passes from the last
    chunk to the first.
    """
    total = micro_batches * vpp
    turns = [(i // pp) % vpp for i in range(total)] if vpp > 1 else [0] * total
    warm_up = warm_up_passes(pp, vpp, stage, micro_batches)
    held = [0] * vpp
    seen = []
    for forward, chunk in enumerate(turns):
        held[chunk] += 1
        seen.append(tuple(held))
        backward = forward - warm_up
        if backward >= 0:
            held[vpp - 1 - turns[backward]] -= 1
    return seen
