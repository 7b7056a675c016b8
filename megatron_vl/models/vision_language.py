"""One pipeline chunk of a vision-language model: some layers of GPTModel and, on the first chunk, the tower.

Features replace the placeholders' embeddings before the sequence-parallel scatter. So images may be anywhere
in a row, and any tensor-parallel rank may hold any token.
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import all_to_all, scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_vl.config import LoraConfig
from megatron_vl.models.attention import PackedRow
from megatron_vl.models.batch import DeviceRow
from megatron_vl.models.head import loss_token_losses
from megatron_vl.models.layer_specs import remaining_deepstack_levels
from megatron_vl.models.vision import VisionTower
from megatron_vl.parallel.ddp import AbsentTower


class VisionLanguageModel(MegatronModule):
    """The module that Megatron-core's schedules call.

    Under context parallelism, a row is this rank's part of it (:class:`~megatron_vl.models.batch.DeviceRow`),
    and S is the length of that part.

    Args:
        language_model: this chunk's GPTModel, built with ``scatter_embedding_sequence_parallel=False``.
        message_levels: number of levels that every pipeline message has room for. It is the largest number
            that crosses a boundary between chunks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        language_model: GPTModel,
        vision_tower: VisionTower | None,
        *,
        num_deepstack_levels: int = 0,
        layer_range: range = range(0),
        message_levels: int = 0,
    ) -> None:
        super().__init__(config=config)
        self.num_deepstack_levels, self.message_levels = num_deepstack_levels, message_levels
        self.levels_in = remaining_deepstack_levels(layer_range.start, num_deepstack_levels)
        self.levels_out = remaining_deepstack_levels(layer_range.stop, num_deepstack_levels)

        self.vision_model = vision_tower
        self.absent_tower: AbsentTower | None = None
        """Lets rows without images skip the tower. If it is None, these rows run the tower on a dummy
        image."""
        self.decoupled: Any = None
        """The :class:`~megatron_vl.models.decoupled.DecoupledTower`, on every rank's first chunk. It is None
        if the tower is on the first stage. Its parameters do not belong to this chunk."""

        self.lora = LoraConfig()
        """The adapters of the run. If there are any, they are trained, and not the model itself."""

        self.language_model = language_model
        self.model_type = language_model.model_type
        self.pre_process = language_model.pre_process
        self.post_process = language_model.post_process
        self.vp_stage = language_model.vp_stage
        self.share_embeddings_and_output_weights = language_model.share_embeddings_and_output_weights

    def set_input_tensor(self, input_tensor: list[Tensor] | Tensor) -> None:
        """Takes the previous stage's message; None on the first stage."""
        stage_message = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        if stage_message is not None:
            stage_message = self._read_message(stage_message)
        self.language_model.set_input_tensor([stage_message])

    def _read_message(self, stage_message: Tensor) -> Tensor:
        """The hidden state and the remaining DeepStack levels, without the padding after them."""
        if self.levels_in == self.message_levels:
            return stage_message
        return stage_message[: stage_message.shape[0] // (1 + self.message_levels) * (1 + self.levels_in)]

    def _make_message(self, chunk_output: Tensor) -> Tensor:
        """The message to the next stage. All have one size, because core allocates the receiving buffers from
        the config: levels that earlier layers have already added are sent as zeros."""
        if self.levels_out == self.message_levels:
            return chunk_output
        local_seq_len = chunk_output.shape[0] // (1 + self.levels_out)
        num_unused_tokens = local_seq_len * (self.message_levels - self.levels_out)
        return torch.cat((chunk_output, chunk_output.new_zeros(num_unused_tokens, *chunk_output.shape[1:])))

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The tied weight on the stages that hold it. Core sums its gradient over both stages."""
        return self.language_model.shared_embedding_or_output_weight()

    def forward(self, row: DeviceRow, labels: bool = True) -> Tensor:
        """Computes the output of this chunk.

        Returns:
            On the last chunk, per-token losses [1, S], which are 0 outside ``row.loss_index``; or logits [1,
            S, V / tp] if ``labels`` is False. On other chunks, a pipeline message that consists of the hidden
            state and DeepStack's levels, [(1 + message_levels) * S (/ tp), 1, H].
        """
        decoder_input = None
        if self.pre_process:
            parts = self._embed_row(row)
            if self.config.sequence_parallel:
                parts = [scatter_to_sequence_parallel_region(part) for part in parts]
            decoder_input = torch.cat(parts) if self.num_deepstack_levels else parts[0]

        # ``attention_mask`` is None because PackedAttention reads the segments from ``packed_seq_params``.
        chunk_output = self.language_model(
            input_ids=row.tokens[None],
            position_ids=row.position_ids[:, None],
            attention_mask=None,
            decoder_input=decoder_input,
            labels=row.labels[None] if labels else None,
            packed_seq_params=PackedRow(full_segments=row.segments, shard=row.shard),
            padding_mask=self._padding_mask(row),
            output_processor=self._output_processor(row) if labels else None,
            output_processor_context=row.loss_index,
        )
        return chunk_output if self.post_process else self._make_message(chunk_output)

    def _output_processor(self, row: DeviceRow) -> Any:
        """What core calls in place of its output layer and loss; None: those for all tokens.

        Most tokens of a row have no loss. The head is computed only for those that have one, because logits
        [S, V] are the largest activation of the model.
        """
        return None if row.loss_index is None else loss_token_losses

    def _padding_mask(self, row: DeviceRow) -> Tensor | None:
        """The mask of padding tokens, bool [1, S (/ tp)].

        None if there is no padding or the model has no experts.
        """
        if not self.config.num_moe_experts or row.num_real_tokens == row.tokens.numel():
            return None
        padding_mask = torch.arange(row.tokens.numel(), device=row.tokens.device) >= row.num_real_tokens
        if self.config.sequence_parallel:
            tp_group = self.language_model.pg_collection.tp
            padding_mask = padding_mask.chunk(tp_group.size())[tp_group.rank()]
        return padding_mask[None]

    def _embed_row(self, row: DeviceRow) -> list[Tensor]:
        """The embeddings of the row's tokens and features, and DeepStack's levels: [S, 1, H] each."""
        if self.absent_tower is not None:
            self.absent_tower.gather_params()
        # The tower runs before the embedding, because parameters are registered, gathered and reduced in that
        # order.
        level_features = self._level_features(row, self._skips_tower(row))

        token_embeddings = self.language_model.embedding(input_ids=row.tokens[None], position_ids=None)
        if self.lora.rank and torch.is_grad_enabled():
            # The embedding is frozen. Recomputed layers and the absent tower have a backward pass only if
            # their input has a gradient.
            token_embeddings.requires_grad_()
        if self.absent_tower is not None and level_features is None:
            token_embeddings = self.absent_tower.skip_tower(token_embeddings)

        # The levels of DeepStack are added to the outputs of the first layers. Until then they are zero
        # outside of images.
        embedding_parts = [
            token_embeddings,
            *(torch.zeros_like(token_embeddings) for _ in range(self.num_deepstack_levels)),
        ]
        if level_features is not None:
            embedding_parts = [
                insert_vision_features(part, one_level_features, row.feature_index)
                for part, one_level_features in zip(embedding_parts, level_features, strict=True)
            ]

        return embedding_parts

    def _level_features(self, row: DeviceRow, skips_tower: bool) -> list[Tensor] | None:
        """The features of the row's images, one tensor for each level; None if the row gets none."""
        # They come from other context-parallel ranks, from the tower, or from a decoupled tower.
        if row.feature_route is not None:
            return self._exchange_row_features(row, skips_tower)
        if self.vision_model is not None and row.vision_input is not None and not skips_tower:
            return self.vision_model(row.vision_input)
        if row.vision_features is None:
            return None
        features = row.vision_features.for_pipeline()
        # Without an image, the backward pass may still need the (empty) features.
        if len(features) or features.requires_grad and not self._backward_reaches_embedding:
            return list(features.unbind(1))
        return None

    def _exchange_row_features(self, row: DeviceRow, skips_tower: bool) -> list[Tensor]:
        """The features of this rank's placeholders under context parallelism, one tensor [N, H] for each
        level.

        Each context-parallel rank encodes some frames of the row. A rank without frames takes part in the
        exchange with an empty tensor.
        """
        assert self.vision_model is not None and row.feature_route is not None
        route = row.feature_route
        if skips_tower:
            assert self.absent_tower is not None
            # The exchange has a backward pass on all ranks or on none. The tower comes before it, as on the
            # ranks that run it, so that all ranks start collectives of both groups in one order.
            is_trained = any(parameter.requires_grad for parameter in self.vision_model.parameters())
            no_features = torch.empty(
                0,
                1 + self.num_deepstack_levels,
                self.config.hidden_size,
                dtype=self.config.params_dtype,
                device=row.tokens.device,
                requires_grad=is_trained and torch.is_grad_enabled(),
            )
            local_features = self.absent_tower.skip_tower(no_features)
        else:
            local_features = torch.stack(self.vision_model(row.vision_input), 1)
            if not route.encodes:  # a dummy image, which no placeholder stands for
                local_features = local_features[:0] + local_features.sum() * 0.0

        # From the features that this rank encoded to those of its placeholders, both in the tower's order.
        cp_group = self.language_model.pg_collection.cp
        sent_features = local_features.index_select(0, route.send_order)
        return list(all_to_all(cp_group, sent_features, route.received, route.sent).unbind(1))

    @property
    def _backward_reaches_embedding(self) -> bool:
        return bool(self.lora.rank) or any(
            parameter.requires_grad for parameter in self.language_model.embedding.parameters()
        )

    def _skips_tower(self, row: DeviceRow) -> bool:
        """Whether this rank can leave out the tower for a row.

        It can if it encodes no image of the row and the backward pass, if there is one, reaches the
        embedding. There, ``absent_tower`` reports the tower's gradients as ready.
        """
        if self.absent_tower is None or row.feature_index is None:
            return False
        encodes_image = row.feature_index.numel() if row.feature_route is None else row.feature_route.encodes
        return not encodes_image and (not torch.is_grad_enabled() or self._backward_reaches_embedding)


class TowerEverywhere(MegatronModule):
    """The whole vision tower of a rank, if every rank holds one.

    Its parameters have the same names as in a :class:`VisionLanguageModel`.
    """

    def __init__(self, config: TransformerConfig, vision_tower: VisionTower) -> None:
        super().__init__(config=config)
        self.vision_model = vision_tower


def insert_vision_features(
    token_embeddings: Tensor, vision_features: Tensor, feature_index: Tensor | None
) -> Tensor:
    """Replaces the tokens ``feature_index`` (int64 [N]) of ``token_embeddings`` [S, 1, H] by features [N, H].

    If a text-only row ran the tower, its index is empty. Its dummy features are then multiplied by zero and
    added, so that the tower has gradients on every rank in every step. Overlapped reduction waits for each of
    these gradients.
    """
    assert feature_index is not None
    vision_features = vision_features.to(token_embeddings.dtype)
    if feature_index.numel() == 0:
        return token_embeddings + vision_features.sum() * 0.0
    return token_embeddings.clone().index_copy(0, feature_index, vision_features[:, None])
