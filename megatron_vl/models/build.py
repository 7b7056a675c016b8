"""Builds this rank's model chunks for a layout: configs, tower (first chunk), GPTModel, then freezing."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_vl.config import LoraConfig, ModelConfig, TrainConfig
from megatron_vl.core_fixes.fp8_recompute import reduce_amaxes_once
from megatron_vl.core_fixes.wgrad_fusion import fuse_weight_gradients, use_column_sums
from megatron_vl.models.attention import choose_backend, flash_attention_is_right, keep_layer_outputs
from megatron_vl.models.decoupled import DecoupledTower
from megatron_vl.models.layer_specs import remaining_deepstack_levels, transformer_block_spec
from megatron_vl.models.lora import AdaptedModel, seed_dropout
from megatron_vl.models.mtp import MtpModel, MultiTokenPrediction
from megatron_vl.models.parameter_names import LiveTensor, named_tensors
from megatron_vl.models.rotary_embedding import MultimodalRope
from megatron_vl.models.transformer_configs import language_config, vision_config
from megatron_vl.models.vision import VisionTower
from megatron_vl.models.vision_language import TowerEverywhere, VisionLanguageModel
from megatron_vl.parallel.process_groups import current_groups, group_of_this_rank
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, attention_heads
from megatron_vl.spec.lora import adapter_table, freeze_parts_without_lora, trained_tensors
from megatron_vl.spec.tensors import OUTPUT_TENSOR, tensor_table


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
    (:func:`megatron_vl.parallel.process_grid.make_grid`).

    Args:
        pixel_mean, pixel_std: statistics per channel, for pixels scaled to 0..1.
    """
    config = freeze_parts_without_lora(config, spec)
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed)
    model_builder = _ModelBuilder(platform, spec, layout, config, pixel_mean, pixel_std)
    chunks = [model_builder.build_chunk(virtual_stage) for virtual_stage in range(layout.vpp)]

    modules: list[torch.nn.Module] = [*chunks]
    if layout.decoupled:
        tower_everywhere = model_builder.build_tower_everywhere()
        chunks[0].decoupled = DecoupledTower(tower_everywhere, spec.vision, config.vision)
        modules.append(tower_everywhere)

    tower_tp_size = 1 if layout.decoupled else layout.tp
    _zero_ffn_padding(modules, spec, tower_tp_size, mpu.get_tensor_model_parallel_rank() % tower_tp_size)
    _choose_trained_parameters(chunks, spec, layout, config)
    if platform.has_transformer_engine:
        use_column_sums()
        reduce_amaxes_once()
        for module in modules:
            fuse_weight_gradients(module)

    return chunks


class _ModelBuilder:
    """Builds the parts of this rank's model; the arguments are those of :func:`build_chunks`."""

    def __init__(
        self,
        platform: Platform,
        spec: ModelSpec,
        layout: Layout,
        config: TrainConfig,
        pixel_mean: tuple[float, ...],
        pixel_std: tuple[float, ...],
    ) -> None:
        self.platform, self.spec, self.layout, self.config = platform, spec, layout, config
        self.pixel_mean, self.pixel_std = pixel_mean, pixel_std
        self.dtype = getattr(torch, config.dtype)
        self.pipeline_rank = mpu.get_pipeline_model_parallel_rank()
        self.core_config = language_config(
            platform, spec, layout, config, aux_loss_coefficient=aux_loss(spec, config.model)[0]
        )

    def build_chunk(self, virtual_stage: int) -> VisionLanguageModel:
        """This rank's part of the language model on a virtual stage, with the tower if it stands there."""
        layout = self.layout
        has_tower = self.pipeline_rank == 0 and virtual_stage == 0 and not layout.decoupled
        vision_tower = self._build_tower(layout) if has_tower else None
        layer_range = layout.chunk_layers(self.pipeline_rank, virtual_stage)
        language_model = self._build_language_model(virtual_stage, layer_range)

        # The number of levels only decreases, so the first boundary between chunks has the most.
        num_deepstack_levels = len(self.spec.vision.deepstack_layers)
        message_levels = 0
        if len(layout.layers_per_chunk) > 1:
            message_levels = remaining_deepstack_levels(layout.layers_per_chunk[0], num_deepstack_levels)
            message_levels += bool(self.config.mtp.loss)  # the embeddings that it needs on the last stage
        make_chunk: Callable[..., VisionLanguageModel] = VisionLanguageModel
        if self.config.mtp.loss:
            layer = self._build_mtp(language_model) if language_model.post_process else None
            make_chunk = functools.partial(MtpModel, layer=layer)
        chunk = make_chunk(
            self.core_config,
            language_model,
            vision_tower,
            num_deepstack_levels=num_deepstack_levels,
            layer_range=layer_range,
            message_levels=message_levels,
        )
        chunk.mtp_config = self.config.mtp  # the step asks each model for it
        # Some parameters stay in float32.
        float32_values = {
            p: p.detach().clone() for p in chunk.parameters() if getattr(p, "keep_float32", False)
        }
        chunk = chunk.to(device=self.platform.device, dtype=self.dtype)
        for parameter, value in float32_values.items():
            parameter.data = value.to(self.platform.device)
        return chunk

    def build_tower_everywhere(self) -> TowerEverywhere:
        """A whole tower with the same weights on all ranks of the run. Collective over these ranks."""
        vision_tower = self._build_tower(dataclasses.replace(self.layout, tp=1), group_of_this_rank())
        tower_everywhere = TowerEverywhere(vision_tower.decoder.config, vision_tower)
        tower_everywhere = tower_everywhere.to(device=self.platform.device, dtype=self.dtype)
        # Initial weights depend on the rank's random numbers, so all ranks take those of rank 0.
        for parameter in tower_everywhere.parameters():
            dist.broadcast(parameter.data, src=0)
        return tower_everywhere

    def _build_tower(self, layout: Layout, tp_group: dist.ProcessGroup | None = None) -> VisionTower:
        """The vision tower on the ranks of ``tp_group``; None: the language model's tensor-parallel group."""
        config, vision_spec = self.config, self.spec.vision
        # The tower has no pipeline, and its rows are never shared.
        tower_groups = ProcessGroupCollection(
            tp=tp_group or mpu.get_tensor_model_parallel_group(), cp=group_of_this_rank(), pp=None
        )
        # With float32 inputs, the window kernel's products would be TF32.
        has_window_kernel = self.platform.name == "cuda" and config.dtype == "bfloat16"
        return VisionTower(
            self.platform,
            vision_spec,
            vision_config(self.platform, self.spec, layout, config),
            tower_groups,
            pixel_mean=self.pixel_mean,
            pixel_std=self.pixel_std,
            attention_backend=choose_backend(
                config.model.attention,
                platform=self.platform.name,
                head_dim=vision_spec.head_dim,
                causal=False,
                dtype=self.dtype,
            ),
            is_frozen=config.model.freeze_vision,
            fused_windows=has_window_kernel and config.model.attention == "auto",
            fp8_rows=config.fp8.vision and config.fp8.recipe != "none",
            recompute_activation=config.recompute.vision == "activation",
        )

    def _build_mtp(self, language_model: GPTModel) -> MultiTokenPrediction:
        block_spec = transformer_block_spec(
            self.platform,
            self.core_config,
            1,
            attention_backend=self._language_backend,
            causal=True,
            recompute_activation="activation" in self.config.recompute.selected_modules,
            layers_with_experts=[self.spec.language.moe is not None],
        )
        return MultiTokenPrediction(
            self.platform,
            self.core_config,
            block_spec,
            language_model.pg_collection,
            trains_model=self.config.mtp.trains == "all",
        )

    def _build_language_model(self, virtual_stage: int, layer_range: range) -> GPTModel:
        """The language model's part on a virtual stage, whose layers are ``layer_range``."""
        language_spec, layout = self.spec.language, self.layout
        process_groups = ProcessGroupCollection.use_mpu_process_groups()
        process_groups.hcp = current_groups().nested_context_groups
        block_spec = transformer_block_spec(
            self.platform,
            self.core_config,
            len(layer_range),
            attention_backend=self._language_backend,
            causal=True,
            num_deepstack_levels=len(self.spec.vision.deepstack_layers),
            recompute_activation="activation" in self.config.recompute.selected_modules,
            layers_with_experts=list(map(language_spec.has_experts, layer_range)),
            layers_with_linear_attention=list(map(language_spec.has_linear_attention, layer_range)),
            linear_attention=language_spec.linear_attention,
            rope_scale=language_spec.query_scale,
        )
        language_model = GPTModel(
            self.core_config,
            block_spec,
            vocab_size=language_spec.vocab_size,
            max_sequence_length=self.config.data.seq_len,
            pre_process=self.pipeline_rank == 0 and virtual_stage == 0,
            post_process=self.pipeline_rank == layout.pp - 1 and virtual_stage == layout.vpp - 1,
            share_embeddings_and_output_weights=language_spec.tied_embeddings,
            position_embedding_type="mrope",
            rotary_base=int(language_spec.rope_theta),
            scatter_embedding_sequence_parallel=False,
            pg_collection=process_groups,
            vp_stage=virtual_stage if layout.vpp > 1 else None,
        )

        language_model.rotary_pos_emb = MultimodalRope(language_spec)
        if kinds := self.config.recompute.keep:
            keep_layer_outputs(language_model.decoder.layers, kinds)
            has_kernels = self.platform.name == "cuda" and self.dtype == torch.bfloat16
            can_keep = {
                "attention": self._language_backend == "flash_attn",
                "experts": language_spec.moe is not None and has_kernels,
            }
            ignored = [kind for kind in kinds if not can_keep[kind]]
            if ignored and not virtual_stage and dist.get_rank() == 0:
                print(f"NOTE: this run cannot keep {' and '.join(ignored)} (recompute.keep)", flush=True)
        return language_model

    @functools.cached_property
    def _language_backend(self) -> str:
        """The attention backend of the language model, the same on all ranks. Collective over the run."""
        head_dim, gathers_keys = self.spec.language.head_dim, self.layout.key_ranks > 1
        choose = functools.partial(
            choose_backend,
            self.config.model.attention,
            platform=self.platform.name,
            head_dim=head_dim,
            causal=True,
            dtype=self.dtype,
            gathers_keys=gathers_keys,
        )
        backend = choose()
        if self.platform.name == "cpu" and backend != "flash_attn":
            return backend

        query_heads, key_value_heads = attention_heads(self.spec, self.layout)
        has_flash = backend == "flash_attn"
        is_right = has_flash and flash_attention_is_right(
            query_heads // key_value_heads, head_dim, gathers_keys
        )
        # Ranks may have other GPUs, and all must compute with one backend.
        right_everywhere = torch.tensor(int(is_right), device=self.platform.device)
        dist.all_reduce(right_everywhere, dist.ReduceOp.MIN)
        if right_everywhere:
            return backend
        backend = choose(tries_flash_attention=False)
        if has_flash and dist.get_rank() == 0:
            print(
                f"NOTE: on a GPU of this run, FlashAttention-4 computes wrong gradients for heads of"
                f" {head_dim}; the language model takes {backend} instead",
                flush=True,
            )
        return backend


def aux_loss(spec: ModelSpec, model_config: ModelConfig) -> tuple[float, str]:
    """The coefficient of a run's load-balancing loss, and what decides it; 0 and no text without experts.

    It is ``model.moe_aux_loss``, if that is set. Otherwise, the loss is added if the Hugging Face config's
    ``output_router_logits`` is true, as in ``transformers``.
    """
    moe_spec = spec.language.moe
    if moe_spec is None:
        return 0.0, ""
    if model_config.freeze_language:
        return 0.0, "model.freeze_language"
    if model_config.moe_aux_loss is not None:
        return model_config.moe_aux_loss, "model.moe_aux_loss"
    if moe_spec.output_router_logits:
        reason = "router_aux_loss_coef, as output_router_logits is true in model.hf's config.json"
        return moe_spec.aux_loss_coef, reason
    advice = f"--model.moe_aux_loss {moe_spec.aux_loss_coef:g} adds it"
    return 0.0, f"output_router_logits is not true in model.hf's config.json; {advice}"


@torch.no_grad()
def _zero_ffn_padding(
    modules: Iterable[torch.nn.Module], spec: ModelSpec, tp_size: int, tp_rank: int
) -> None:
    """Zeroes the padded FFN rows and columns of the tower's initial weights.

    They stay zero, because their gradients are zero.
    """
    vision_spec = spec.vision
    if vision_spec.padded_ffn_hidden_size == vision_spec.ffn_hidden_size:
        return

    is_real_column = torch.arange(vision_spec.padded_ffn_hidden_size) < vision_spec.ffn_hidden_size
    is_real_column = is_real_column.chunk(tp_size)[tp_rank]
    for module in modules:
        for parameter_name, parameter in module.named_parameters():
            if not parameter_name.startswith("vision_model.decoder."):
                continue
            column_mask = is_real_column.to(device=parameter.device, dtype=parameter.dtype)
            if parameter_name.endswith(("linear_fc1.weight", "linear_fc1.bias")):
                row_mask = column_mask.repeat(2) if vision_spec.gated_mlp else column_mask
                parameter.mul_(row_mask.view(-1, *[1] * (parameter.dim() - 1)))
            elif parameter_name.endswith("linear_fc2.weight"):
                parameter.mul_(column_mask)


def _choose_trained_parameters(
    chunks: list[VisionLanguageModel], spec: ModelSpec, layout: Layout, config: TrainConfig
) -> None:
    """Freezes what the run does not train, and attaches its adapters."""
    pp_rank, ep_rank = mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
    live_tensors = chunk_tensors(chunks, layout, pp_rank, ep_rank)
    trained_names = trained_tensors(spec, config.lora, config.model)
    for live_tensor in live_tensors:
        live_tensor.parameter.requires_grad_(live_tensor.tensor_name in trained_names)
    if not config.lora.rank:
        return

    # All weights have been drawn by now.
    if config.lora.dropout:
        seed_dropout(config.seed, step=0)
    adapted_parts = AdaptedModel(
        spec,
        config,
        layout.sharding,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
    )
    for chunk in chunks:
        chunk.lora = config.lora
        for module in [chunk] if chunk.decoupled is None else [chunk, chunk.decoupled.module]:
            adapted_parts.attach_adapters(module, live_tensors)


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


def check_live_tensors(
    spec: ModelSpec, layout: Layout, live_tensors: list[LiveTensor], lora: LoraConfig
) -> None:
    """Raises RuntimeError unless live parameters have the shapes of the model's and adapters' tables."""
    table = tensor_table(spec) | adapter_table(spec, lora)
    for tensor_name, parameter, expert_index in live_tensors:
        if tensor_name not in table:
            raise RuntimeError(
                f"parameter {tensor_name} has no entry in the tensor table (a tied {OUTPUT_TENSOR} is stored"
                " as the embedding)"
            )
        expected_shape = table[tensor_name].shard_shape(layout.sharding)[0 if expert_index is None else 1 :]
        if tuple(parameter.shape) != expected_shape:
            raise RuntimeError(
                f"parameter {tensor_name} has shape {tuple(parameter.shape)}; the table says {expected_shape}"
                f" for {layout.sharding}"
            )
