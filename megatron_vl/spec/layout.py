"""The layout of a model: which pipeline stage holds which decoder layers.

A layout lists the number of decoder layers of each chunk in model order. Without interleaving, a stage is one
chunk. With interleaving (VPP), entry ``v * pp + p`` is virtual chunk ``v`` of pipeline rank ``p``. The first
entry also holds the vision tower and the embedding. The last entry also holds the final norm and the output
layer. Both may have fewer decoder layers than the others, or none.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vl.config import TrainConfig
from megatron_vl.kernels.sizes import MAX_STATE_RANKS
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.tensors import LayoutError, Sharding, TensorInfo, check_sharding


@dataclass(frozen=True)
class Layout:
    """A tensor x pipeline x virtual-pipeline x expert layout of one model."""

    tp: int
    pp: int
    vpp: int
    layers_per_chunk: tuple[int, ...]
    """Number of decoder layers of each of the ``pp * vpp`` entries, in model order."""
    ep: int = 1
    """Expert parallel size. For experts, the ``tp * cp * dp`` ranks of a stage are arranged as ``etp * ep *
    expert-dp``."""
    etp: int = 1
    """Expert tensor parallel size. Megatron-core's default is ``tp``. Here it is 1 (whole experts), because
    cutting small matrices further costs more than it saves."""
    decoupled: bool = False
    """Whether every rank holds the whole vision tower (``vision.placement: decoupled``). Otherwise, only the
    first stage holds it."""
    cp: int = 1
    """Context parallel size. It cuts rows, and no tensors."""
    key_ranks: int = 1
    """Number of context-parallel ranks that gather each other's keys and values. It is more than 1 if ``cp``
    does not divide the query heads of a tensor-parallel rank."""

    @property
    def replica_ranks(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def head_ranks(self) -> int:
        """Number of context-parallel ranks that exchange heads with each other."""
        return self.cp // self.key_ranks

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.tp, self.ep, self.etp, self.decoupled)

    def first_layer(self, pp_rank: int, vp_stage: int = 0) -> int:
        """Global zero-based number of the first decoder layer of this chunk."""
        return sum(self.layers_per_chunk[: vp_stage * self.pp + pp_rank])

    def chunk_layers(self, pp_rank: int, vp_stage: int = 0) -> range:
        first_layer = self.first_layer(pp_rank, vp_stage)
        return range(first_layer, first_layer + self.layers_per_chunk[vp_stage * self.pp + pp_rank])

    def stage_sums(self, layer_values: Sequence[float]) -> list[float]:
        """The sum of the values of the decoder layers of each pipeline stage."""
        before, ends = [0.0, *itertools.accumulate(layer_values)], itertools.accumulate(self.layers_per_chunk)
        chunks = [before[end] - before[start] for start, end in itertools.pairwise([0, *ends])]
        return [sum(chunks[stage :: self.pp]) for stage in range(self.pp)]

    def owning_pipeline_rank(self, tensor_info: TensorInfo) -> int:
        """The pipeline rank that holds a tensor. If all ranks hold it, the one that writes it.

        Raises:
            LayoutError: the tensor's decoder layer is outside the layout.
        """
        if tensor_info.model_section in ("vision", "embedding"):
            return 0
        if tensor_info.model_section == "head":
            return self.pp - 1
        for chunk_index, end_layer in enumerate(itertools.accumulate(self.layers_per_chunk)):
            if tensor_info.layer_index < end_layer:
                return chunk_index % self.pp
        raise LayoutError(f"layer {tensor_info.layer_index} is outside the layout {self.layers_per_chunk}")

    def as_dict(self) -> dict[str, object]:
        """The layout as checkpoints store it. :func:`read_layout` reads it back."""
        return {
            "tp": self.tp,
            "pp": self.pp,
            "vpp": self.vpp,
            "layers": list(self.layers_per_chunk),
            "ep": self.ep,
            "etp": self.etp,
            **({"cp": self.cp} if self.cp > 1 else {}),
            **({"vision": "decoupled"} if self.decoupled else {}),
        }


def make_layout(
    spec: ModelSpec,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    layers: Sequence[int] | None = None,
    ep: int = 1,
    etp: int = 1,
    decoupled: bool = False,
    cp: int = 1,
) -> Layout:
    """Makes a layout. Raises LayoutError if a number is impossible for this model.

    Args:
        layers: number of decoder layers of each of the ``pp * vpp`` entries. None spreads them evenly.
        decoupled: whether every rank holds the vision tower.
    """
    for size_name, parallel_size in {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp, "cp": cp}.items():
        if parallel_size < 1:
            raise LayoutError(f"{size_name}={parallel_size} must be at least 1")
    if vpp > 1 and pp == 1:
        raise LayoutError(f"vpp={vpp} needs pp of at least 2")

    check_sharding(spec, Sharding(tp, ep, etp))
    if spec.language.linear_attention is not None and cp > MAX_STATE_RANKS:
        raise LayoutError(
            f"cp={cp}: {spec.family} has linear attention, in which each rank receives the states of all"
            f" ranks that share a row; cp may be at most {MAX_STATE_RANKS}"
        )
    num_layers = spec.language.num_layers
    layers = _even_layers(num_layers, pp, vpp, decoupled) if layers is None else layers
    if len(layers) != pp * vpp:
        raise LayoutError(
            f"layers {list(layers)} has {len(layers)} entries; pp={pp} x vpp={vpp} needs {pp * vpp}"
        )
    if min(layers) < 0 or sum(layers) != num_layers:
        raise LayoutError(
            f"layers {list(layers)} add up to {sum(layers)}; the model has {num_layers} decoder layers"
        )
    head_ranks = math.gcd(cp, heads_per_tensor_rank(spec, tp)[0])
    return Layout(tp, pp, vpp, tuple(layers), ep, etp, decoupled, cp, cp // head_ranks)


def configured_layout(config: TrainConfig, spec: ModelSpec, layers: Sequence[int] | None) -> Layout:
    """:func:`make_layout` with the sizes of a run."""
    parallel, decoupled = config.parallel, config.vision.placement == "decoupled"
    sizes = {name: getattr(parallel, name) for name in ("tp", "pp", "vpp", "ep", "etp", "cp")}
    return make_layout(spec, layers=layers, decoupled=decoupled, **sizes)


def _even_layers(num_layers: int, pp: int, vpp: int, decoupled: bool) -> list[int]:
    num_chunks = pp * vpp
    if num_layers < num_chunks:
        raise LayoutError(
            f"pp={pp} x vpp={vpp} gives {num_chunks} chunks for {num_layers} decoder layers; set layers"
            " by hand to leave some empty"
        )
    # With a remainder, the last chunks get one layer more, because the first one also holds the tower. If
    # every rank holds the tower, the first chunks do, because the last one also holds the output layer.
    base_layers, remainder = divmod(num_layers, num_chunks)
    larger, smaller = [base_layers + 1] * remainder, [base_layers] * (num_chunks - remainder)
    return larger + smaller if decoupled else smaller + larger


def key_value_copies(key_value_heads: int, cp: int) -> int:
    """How often each of a rank's key/value heads is repeated so that ``cp`` ranks can share them evenly."""
    return math.lcm(key_value_heads, cp) // key_value_heads


def attention_heads(spec: ModelSpec, layout: Layout) -> tuple[int, int]:
    """The query heads and the key/value heads of a rank's attention, after ranks have exchanged heads."""
    query_heads, key_value_heads = heads_per_tensor_rank(spec, layout.tp)
    copies = key_value_copies(key_value_heads, layout.head_ranks)
    return query_heads // layout.head_ranks, copies * key_value_heads // layout.head_ranks


def heads_per_tensor_rank(spec: ModelSpec, tp: int) -> tuple[int, int]:
    """The query heads and the key/value heads of a tensor-parallel rank, which has at least one of each."""
    return spec.language.num_heads // tp, max(1, spec.language.num_kv_heads // tp)


def check_experts_use_sequence_parallel(spec: ModelSpec, tp: int, sequence_parallel: bool) -> None:
    """Checks that a model with experts uses sequence parallelism together with tensor parallelism.

    Raises:
        LayoutError: it does not. The message names the fields.
    """
    if spec.language.moe and tp > 1 and not sequence_parallel:
        raise LayoutError(
            f"parallel.tp={tp} with experts needs parallel.sequence_parallel: each rank must route its"
            " own tokens"
        )


def read_layout(spec: ModelSpec, stored_layout: Mapping[str, Any]) -> Layout:
    """Reads a layout that :meth:`Layout.as_dict` wrote.

    Raises:
        KeyError: a field is missing.
        LayoutError: a field is impossible for this model.
    """
    return make_layout(
        spec,
        **{key: stored_layout[key] for key in ("tp", "pp", "vpp", "layers", "ep", "etp")},
        cp=stored_layout.get("cp", 1),
        decoupled=stored_layout.get("vision") == "decoupled",
    )
