"""Builds this rank's model chunks for a layout: configs, tower (first chunk), GPTModel, then freezing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_vl.config import ModelConfig, RunConfigError, TrainConfig
from megatron_vl.core_fixes.wgrad_fusion import fuse_weight_gradients
from megatron_vl.models.attention import choose_backend
from megatron_vl.models.decoupled import DecoupledTower
from megatron_vl.models.deepstack import levels_before
from megatron_vl.models.layer_specs import block_spec
from megatron_vl.models.names import LiveTensor, named_tensors
from megatron_vl.models.rotary_embedding import MRope
from megatron_vl.models.transformer_configs import language_config, vision_config
from megatron_vl.models.vision import VisionTower
from megatron_vl.models.vision_language import TowerEverywhere, VisionLanguageModel
from megatron_vl.parallel import tp_overlap
from megatron_vl.parallel.groups import group_of_one
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.tensors import OUTPUT, TensorInfo, part_of, tensor_table


def build_chunks(
    platform: Platform,
    spec: ModelSpec,
    layout: Layout,
    config: TrainConfig,
    *,
    pixel_mean: tuple[float, ...],
    pixel_std: tuple[float, ...],
) -> list[VisionLanguageModel]:
    """Builds this rank's chunks (one per virtual stage) with random weights, on the platform's device.

    Parameters are frozen as ``config.model`` says. Megatron-core's process groups must exist
    (:func:`megatron_vl.parallel.grid.make_grid`).

    Args:
        pixel_mean, pixel_std: statistics per channel, for pixels scaled to 0..1.

    Raises:
        RunConfigError: the platform or the model does not support a field of ``config``.
    """
    from megatron.core import parallel_state as mpu

    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed)
    core = _language_settings(platform, spec, layout, config)

    deepstack = len(spec.vision.deepstack_layers)
    # The number of levels only decreases, so the first boundary between chunks has the most.
    message_levels = levels_before(layout.layers[0], deepstack) if len(layout.layers) > 1 else 0

    rank = mpu.get_pipeline_model_parallel_rank()
    chunks: list[VisionLanguageModel] = []
    for stage in range(layout.vpp):
        tower = None
        if rank == 0 and stage == 0 and not layout.decoupled:
            tower = _tower(platform, spec, layout, config, pixel_mean, pixel_std)

        language = _language(platform, spec, layout, config, core, rank, stage)
        layers = layout.chunk_layers(rank, stage)
        chunk = VisionLanguageModel(
            core, language, tower, deepstack=deepstack, layers=layers, message_levels=message_levels
        )
        chunks.append(_to(chunk, platform.device, getattr(torch, config.dtype)))

    modules: list[torch.nn.Module] = [*chunks]
    if layout.decoupled:
        everywhere = _tower_everywhere(platform, spec, layout, config, pixel_mean, pixel_std)
        chunks[0].decoupled = DecoupledTower(everywhere, spec.vision, config.vision)
        modules.append(everywhere)

    tower_tp = 1 if layout.decoupled else layout.tp
    _zero_padding(modules, spec, tower_tp, mpu.get_tensor_model_parallel_rank() % tower_tp)
    _freeze(modules, config.model)
    if platform.transformer_engine:
        for module in modules:
            fuse_weight_gradients(module)

    return chunks


def _language_settings(
    platform: Platform, spec: ModelSpec, layout: Layout, config: TrainConfig
) -> TransformerConfig:
    """Core's config of the language model. Starts the overlap of collectives if it asks for that."""
    dtype = getattr(torch, config.dtype)
    core = language_config(
        platform,
        spec,
        layout,
        dtype=dtype,
        sequence_parallel=config.parallel.sequence_parallel,
        recompute=config.recompute,
        fp8=config.fp8,
        aux_loss=aux_loss_coefficient(spec, config.model),
        tp_comm_overlap=config.parallel.tp_comm_overlap,
    )

    if core.tp_comm_overlap:
        tp_overlap.start(
            config.data.seq_len // layout.cp,
            spec.language.hidden_size,
            layout.tp,
            dtype,
            fp8=core.fp8 is not None,
        )
    return core


def _to(chunk: VisionLanguageModel, device: Any, dtype: torch.dtype) -> VisionLanguageModel:
    """Moves a chunk to its device and type, except for parameters that stay in float32."""
    kept = {p: p.detach().clone() for p in chunk.parameters() if getattr(p, "keep_float32", False)}
    chunk = chunk.to(device=device, dtype=dtype)
    for parameter, value in kept.items():
        parameter.data = value.to(device)
    return chunk


def _tower_everywhere(
    platform: Platform,
    spec: ModelSpec,
    layout: Layout,
    config: TrainConfig,
    pixel_mean: tuple[float, ...],
    pixel_std: tuple[float, ...],
) -> TowerEverywhere:
    """A whole tower with the same weights on all ranks of the run. Collective over these ranks."""
    alone = dataclasses.replace(layout, tp=1)
    tower = _tower(platform, spec, alone, config, pixel_mean, pixel_std, group_of_one())
    module = TowerEverywhere(tower.decoder.config, tower)
    module = module.to(device=platform.device, dtype=getattr(torch, config.dtype))
    # Initial weights depend on the rank's random numbers, so all ranks take those of rank 0.
    for parameter in module.parameters():
        dist.broadcast(parameter.data, src=0)
    return module


def _tower(
    platform: Platform,
    spec: ModelSpec,
    layout: Layout,
    config: TrainConfig,
    pixel_mean: tuple[float, ...],
    pixel_std: tuple[float, ...],
    tp_group: dist.ProcessGroup | None = None,
) -> VisionTower:
    """The vision tower on the ranks of ``tp_group`` (None: the language model's tensor-parallel group)."""
    model = config.model
    dtype = getattr(torch, config.dtype)
    # With float32 inputs, the kernel's products would be TF32.
    fusable = platform.name == "cuda" and dtype == torch.bfloat16
    if model.window_attention == "fused" and not fusable:
        raise RunConfigError(
            "model.window_attention: fused is a CUDA kernel for bfloat16; use auto or backend"
        )

    return VisionTower(
        platform,
        spec.vision,
        vision_config(platform, spec, layout, dtype=dtype, recompute=config.recompute, fp8=config.fp8),
        _tower_groups(ProcessGroupCollection.use_mpu_process_groups(), tp_group),
        pixel_mean=pixel_mean,
        pixel_std=pixel_std,
        attention_backend=choose_backend(
            model.vision_attention,
            platform=platform.name,
            head_dim=spec.vision.head_dim,
            causal=False,
            dtype=dtype,
        ),
        frozen=model.freeze_vision,
        fused_windows=fusable and model.window_attention != "backend",
        recompute_activation=config.recompute.vision == "activation",
    )


def _language(
    platform: Platform,
    spec: ModelSpec,
    layout: Layout,
    config: TrainConfig,
    core: TransformerConfig,
    rank: int,
    stage: int,
) -> GPTModel:
    """The language model's part on virtual stage ``stage`` of pipeline rank ``rank``."""
    m = spec.language
    recompute = config.recompute
    layers = layout.chunk_layers(rank, stage)
    language = GPTModel(
        core,
        block_spec(
            platform,
            core,
            len(layers),
            attention_backend=choose_backend(
                config.model.language_attention, platform=platform.name, head_dim=m.head_dim, causal=True
            ),
            causal=True,
            deepstack=len(spec.vision.deepstack_layers),
            recompute_activation=recompute.language == "selective"
            and "activation" in recompute.language_modules,
            experts=[m.has_experts(layer) for layer in layers],
            linear=[m.is_linear(layer) for layer in layers],
            linear_attention=m.linear_attention,
        ),
        vocab_size=m.vocab_size,
        max_sequence_length=config.data.seq_len,
        pre_process=rank == 0 and stage == 0,
        post_process=rank == layout.pp - 1 and stage == layout.vpp - 1,
        share_embeddings_and_output_weights=m.tied_embeddings,
        position_embedding_type="mrope",
        rotary_base=int(m.rope_theta),
        scatter_embedding_sequence_parallel=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        vp_stage=stage if layout.vpp > 1 else None,
    )

    language.rotary_pos_emb = MRope(m)
    return language


def aux_loss_coefficient(spec: ModelSpec, model: ModelConfig) -> float:
    """The coefficient of this run's load-balancing loss; 0 if there are no experts or they are not trained.

    It is ``model.moe_aux_loss``, if that is set. Otherwise, the loss is added if the Hugging Face config's
    ``output_router_logits`` is true, as in ``transformers``.
    """
    moe = spec.language.moe
    if moe is None or model.freeze_language:
        return 0.0
    if model.moe_aux_loss is not None:
        return model.moe_aux_loss
    return moe.aux_loss_coef if moe.output_router_logits else 0.0


def aux_loss_reason(spec: ModelSpec, model: ModelConfig) -> str:
    """Says in words what the coefficient of the load-balancing loss is and why; empty without experts."""
    moe = spec.language.moe
    coefficient = aux_loss_coefficient(spec, model)
    if moe is None:
        return ""

    text = f"coefficient {coefficient:g}" if coefficient else "none"
    if model.freeze_language:
        return f"{text} (model.freeze_language)"
    if model.moe_aux_loss is not None:
        return f"{text} (model.moe_aux_loss)"
    if moe.output_router_logits:
        return f"{text} (router_aux_loss_coef, as output_router_logits is true in model.hf's config.json)"
    advice = f"--model.moe_aux_loss {moe.aux_loss_coef:g} adds it"
    return f"{text} (output_router_logits is not true in model.hf's config.json; {advice})"


def _tower_groups(pg: ProcessGroupCollection, tp: dist.ProcessGroup | None) -> ProcessGroupCollection:
    """The tower's process groups: ``tp`` (None: that of the language model's ``pg``) and no pipeline."""
    tower = ProcessGroupCollection()
    tower.tp = tp or pg.tp
    tower.cp = group_of_one()
    tower.pp = None
    return tower


@torch.no_grad()
def _zero_padding(chunks: Iterable[torch.nn.Module], spec: ModelSpec, tp: int, tp_rank: int) -> None:
    """Zeroes the padded FFN rows and columns of the tower's initial weights.

    They stay zero, because their gradients are zero.
    """
    v = spec.vision
    if v.padded_ffn_hidden_size == v.ffn_hidden_size:
        return
    real = (torch.arange(v.padded_ffn_hidden_size) < v.ffn_hidden_size).chunk(tp)[tp_rank]
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if not name.startswith("vision_model.decoder."):
                continue
            mask = real.to(device=parameter.device, dtype=parameter.dtype)
            if name.endswith(("linear_fc1.weight", "linear_fc1.bias")):
                rows = mask.repeat(2) if v.gated_mlp else mask
                parameter.mul_(rows.view(-1, *[1] * (parameter.dim() - 1)))
            elif name.endswith("linear_fc2.weight"):
                parameter.mul_(mask)


def _freeze(chunks: Iterable[torch.nn.Module], model: ModelConfig) -> None:
    frozen = {"vision": model.freeze_vision, "merger": model.freeze_merger, "language": model.freeze_language}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if frozen[part_of(name)]:
                parameter.requires_grad_(False)


def chunk_tensors(
    chunks: list[VisionLanguageModel], layout: Layout, pp_rank: int, ep_rank: int = 0
) -> list[LiveTensor]:
    """Lists the parameters of all chunks of a rank with their canonical names."""
    first_expert = ep_rank * ((chunks[0].config.num_moe_experts or 0) // layout.ep)
    return [
        tensor
        for stage, chunk in enumerate(chunks)
        for tensor in named_tensors(chunk, layout.first_layer(pp_rank, stage), first_expert)
    ]


def check_tensors(spec: ModelSpec, layout: Layout, tensors: list[LiveTensor]) -> dict[str, TensorInfo]:
    """Checks that live parameters have the shapes of the model's tensor table. Returns the table.

    Raises:
        RuntimeError: the table does not match the modules: a live parameter has no entry or another shape.
    """
    table = tensor_table(spec)
    for name, parameter, expert in tensors:
        if name not in table:
            raise RuntimeError(
                f"parameter {name} has no entry in the tensor table (tied: {OUTPUT} is stored as the"
                " embedding)"
            )
        want = table[name].shard_shape(layout.cut)[0 if expert is None else 1 :]
        if tuple(parameter.shape) != want:
            raise RuntimeError(
                f"parameter {name} has shape {tuple(parameter.shape)}; the table says {want} for {layout.cut}"
            )
    return table
