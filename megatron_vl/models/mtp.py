"""Multi-token prediction: one more layer, which predicts the token after the next one (``mtp.*`` of Qwen3.5).

At token ``t``, it reads the model's last hidden state of ``t`` and the embedding of ``t + 1``, in which
features have replaced placeholders, at the position of ``t``. It shares the model's embedding and output
layer. Reference: ``qwen3_5_mtp.py`` of vLLM and SGLang, in which it drafts tokens.

The layer stands on the last stage. The embeddings come from the first one in the pipeline's messages, as one
more level beside the hidden state. So no stage holds a second copy of the embedding, features need no way of
their own, and gradients go back as those of the hidden state do.
"""

import copy
import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vl.models.attention import PackedRow
from megatron_vl.models.batch import DeviceRow
from megatron_vl.models.head import loss_token_losses, losses_of_tokens
from megatron_vl.models.layer_specs import make_norm
from megatron_vl.models.vision_language import VisionLanguageModel
from megatron_vl.platform import Platform


class MultiTokenPrediction(MegatronModule):
    """The layer, on the last chunk.

    Args:
        block_spec: one layer with softmax attention, built like those of the model.
    """

    def __init__(
        self,
        platform: Platform,
        config: TransformerConfig,
        block_spec: TransformerBlockSubmodules,
        process_groups: Any,
        *,
        trains_model: bool,
    ) -> None:
        super().__init__(config=config)
        self.trains_model = trains_model
        width = config.hidden_size
        self.embedding_norm = make_norm(platform, config, width)
        self.hidden_norm = make_norm(platform, config, width)
        # Not cut by tensor parallelism: with sequence parallelism, each rank computes its own tokens.
        self.fc = nn.Linear(2 * width, width, bias=False, dtype=config.params_dtype)
        assert config.init_method is not None
        config.init_method(self.fc.weight)
        # finalize_model_grads then sums its gradient over the tensor-parallel group.
        self.fc.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

        layer_config = copy.copy(config)
        layer_config.pipeline_model_parallel_size = 1  # core derives the layer's number from these
        layer_config.virtual_pipeline_model_parallel_size = None
        layer_config.pipeline_model_parallel_layout = None
        self.decoder = TransformerBlock(layer_config, block_spec, pg_collection=process_groups)
        if config.num_moe_experts:  # its load is listed after that of the model's layers
            self.decoder.layers[0].mlp.set_layer_number(config.num_layers + 1)
        if not trains_model:
            for parameter in self.parameters():
                parameter.grad_norm_group = MTP_GRAD_NORM_GROUP

    def forward(
        self, hidden_states: Tensor, next_embeddings: Tensor, rotary_angles: Tensor, **row: Any
    ) -> Tensor:
        """From hidden states and embeddings to hidden states, [S (/ tp), 1, H] each."""
        if not self.trains_model:
            hidden_states, next_embeddings = hidden_states.detach(), next_embeddings.detach()
        normalized = (self.embedding_norm(next_embeddings), self.hidden_norm(hidden_states))
        return self.decoder(
            hidden_states=self.fc(torch.cat(normalized, -1)),
            attention_mask=None,
            rotary_pos_emb=rotary_angles,
            **row,
        )

    def target_numbers(
        self,
        row: DeviceRow,
        language_model: GPTModel,
        hidden_states: Tensor,
        next_embeddings: Tensor,
        padding_mask: Tensor | None,
        output_weight: Tensor | None,
    ) -> Tensor:
        """Of each token's target: its weighted loss, whether it is trained on, and whether the layer ranks it
        first, float32 [3, S]. Without a target that is trained on, all are 0."""
        assert row.whole_row is not None
        states = self(
            hidden_states,
            next_embeddings,
            language_model.rotary_pos_emb(row.position_ids[:, None]),
            packed_seq_params=PackedRow(full_segments=row.segments, shard=row.shard),
            padding_mask=padding_mask,
        )
        weight = language_model.output_layer.weight if output_weight is None else output_weight
        index, is_target = target_index(row)
        labels, loss_mask = row.whole_row.two_ahead
        is_first: list[Tensor] = []
        token_losses = losses_of_tokens(
            states,
            language_model.output_layer,
            weight if self.trains_model else weight.detach(),
            labels[None],
            index,
            language_model.compute_language_model_loss,
            is_first,
        )
        # Added, because a token that is no target may be listed twice.
        found = torch.cat((token_losses.float(), torch.cat(is_first, 1).float())) * is_target
        losses, is_first_choice = found.new_zeros(2, row.tokens.numel()).index_add(1, index, found)
        is_trained = loss_mask != 0
        return torch.stack((losses * loss_mask, is_trained.float(), is_first_choice * is_trained))


class MtpModel(VisionLanguageModel):
    """A chunk of a model that is trained with multi-token prediction; such models have no DeepStack.

    Args:
        layer: on the last chunk.
    """

    def __init__(self, *args: Any, layer: MultiTokenPrediction | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mtp = layer
        self.next_embeddings: Any = None
        """The embeddings that the layer needs, between the reading of a row or message and the output."""

    def _embed_row(self, row: DeviceRow) -> list[Tensor]:
        parts = super()._embed_row(row)
        self.next_embeddings = embeddings_of_next(parts[0], self.language_model)
        return parts

    def _read_message(self, stage_message: Tensor) -> Tensor:
        hidden_states, self.next_embeddings = stage_message.chunk(2)
        return hidden_states

    def _make_message(self, chunk_output: Tensor) -> Tensor:
        next_embeddings, self.next_embeddings = self.next_embeddings, None
        return torch.cat((chunk_output, next_embeddings))

    def _output_processor(self, row: DeviceRow) -> Any:
        return partial(self._losses_of_both, row)

    def _losses_of_both(
        self, row: DeviceRow, *, hidden_states: Tensor, context: Tensor | None, **options: Any
    ) -> Tensor:
        """The losses of the model, and the numbers of the layer's targets: [4, S]."""
        assert self.mtp is not None
        if context is None:
            context = torch.arange(row.tokens.numel(), device=row.tokens.device)
        token_losses = loss_token_losses(hidden_states=hidden_states, context=context, **options)
        next_embeddings, self.next_embeddings = self.next_embeddings, None
        target_numbers = self.mtp.target_numbers(
            row,
            self.language_model,
            hidden_states,
            next_embeddings,
            self._padding_mask(row),
            options["output_weight"],
        )
        return torch.cat((token_losses.float(), target_numbers))


def mtp_metrics(loss_sum: float, targets: float, top1_hits: float) -> tuple[dict[str, float], str]:
    """The mean loss (without the factor ``mtp.loss``), the number of targets, and the share of them that the
    layer ranks first: by name, and as a part of a printed line."""
    loss, top1 = (each / targets if targets else math.nan for each in (loss_sum, top1_hits))
    metrics = {"mtp_loss": loss, "mtp_tokens": int(targets), "mtp_top1": top1}
    return metrics, f"mtp loss {loss:.6f}, top-1 {top1:.1%} of {targets:.0f}"


def set_mtp_loss_scale(rows: list[DeviceRow], factor: float) -> None:
    """Scales the loss sum of the targets so that, divided by the loss tokens, it equals ``factor`` times the
    mean over the targets.

    Collective over the data-parallel and context-parallel ranks, without host synchronisation.
    """
    parts = [(row.loss_mask, row.whole_row) for row in rows if row.whole_row]
    masks = [mask for loss_mask, whole_row in parts for mask in (loss_mask, whole_row.two_ahead[1])]
    # Before the passes, because the backward pass of the first row needs the counts of all.
    counts = torch.stack([(mask != 0).sum() for mask in masks]).view(-1, 2).sum(0)
    dist.all_reduce(counts, group=mpu.get_data_parallel_group(with_context_parallel=True))
    for _, whole_row in parts:
        whole_row.two_ahead_scale = factor * counts[0] / counts[1].clamp(min=1)


def target_index(row: DeviceRow) -> tuple[Tensor, Tensor]:
    """The tokens with a target, int64 [N], and some without: for those of ``loss_index``, the tokens before.

    The last token of the row's part is always listed, because its target may be the first one of the next
    part. So the host need not know the targets.

    Returns:
        (tokens, and for each whether it counts, bool [N]).
    """
    length, device = row.tokens.numel(), row.tokens.device
    if row.loss_index is None:
        return torch.arange(length, device=device), torch.ones(length, dtype=torch.bool, device=device)
    index = torch.cat((row.loss_index - 1, row.loss_index.new_full((1,), length - 1)))
    return index.clamp(min=0), index >= 0


def embeddings_of_next(token_embeddings: Tensor, language_model: GPTModel) -> Tensor:
    """The embedding of each token's next one: [S, 1, H] -> [S (/ tp), 1, H].

    That of the last token of a sequence is of no use: the token has no target, and no other one sees it.
    Collective over the context-parallel ranks, backwards too: the next token may be on the next rank.
    """
    cp_group = language_model.pg_collection.cp
    first_of_parts = token_embeddings[:1]
    if cp_group.size() > 1:
        first_of_parts = gather_from_sequence_parallel_region(first_of_parts, group=cp_group)
    # After the last part, the first one follows.
    next_part = (cp_group.rank() + 1) % cp_group.size()
    next_embeddings = torch.cat((token_embeddings[1:], first_of_parts[next_part : next_part + 1]))
    if language_model.config.sequence_parallel:
        next_embeddings = scatter_to_sequence_parallel_region(next_embeddings)
    return next_embeddings
