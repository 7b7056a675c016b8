"""One pipeline chunk of a vision-language model: vision tower (first chunk only) and its part of the GPTModel.

Features take the place of the placeholders' embeddings before the sequence-parallel scatter, so that images may lie
anywhere in a row and any tensor-parallel rank may own any token.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .attention import Segments, packed_row
from .vision import VisionInput, VisionTower


@dataclass
class DeviceRow:
    """A row on the device of this rank. Shapes as in :class:`megatron_vl.data.row.Row`."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    segments: Segments
    vision: VisionInput | None
    """None on ranks without the vision tower."""
    feature_index: Tensor | None


class VisionLanguageModel(MegatronModule):
    """What Megatron-core's schedules call: ``forward(row)`` gives per-token losses on the last chunk, hidden states before.

    Args:
        config: the language model's TransformerConfig.
        language: this chunk's GPTModel, built with ``scatter_embedding_sequence_parallel=False``.
        vision: the tower on the first chunk, None elsewhere.
    """

    def __init__(self, config: TransformerConfig, language: GPTModel, vision: VisionTower | None) -> None:
        super().__init__(config=config)
        self.vision_model = vision
        self.language_model = language
        self.model_type = language.model_type
        self.pre_process = language.pre_process
        self.post_process = language.post_process
        self.vp_stage = language.vp_stage
        self.share_embeddings_and_output_weights = language.share_embeddings_and_output_weights

    def set_input_tensor(self, input_tensor: list[Tensor] | Tensor) -> None:
        self.language_model.set_input_tensor(input_tensor)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The tied weight on the stages that hold it; core sums its gradient over both."""
        return self.language_model.shared_embedding_or_output_weight()

    def forward(self, row: DeviceRow, labels: bool = True) -> Tensor:
        """Per-token losses [1, S] (logits [1, S, V / tp] when ``labels`` is False) on the last chunk, else [S (/ tp), 1, H]."""
        decoder_input = self._embed(row) if self.pre_process else None
        return self.language_model(
            input_ids=row.tokens[None],
            position_ids=row.position_ids[:, None],
            attention_mask=None,
            decoder_input=decoder_input,
            labels=row.labels[None] if labels else None,
            packed_seq_params=packed_row(row.segments),
        )

    def _embed(self, row: DeviceRow) -> Tensor:
        """Token embeddings with the features in place, [S, 1, H], scattered when sequence parallel."""
        embedded = self.language_model.embedding(input_ids=row.tokens[None], position_ids=None)
        if self.vision_model is not None and row.vision is not None:
            features = self.vision_model(row.vision)
            embedded = place_features(embedded, features, row.feature_index)
        if self.config.sequence_parallel:
            embedded = scatter_to_sequence_parallel_region(embedded)
        return embedded


def place_features(embedded: Tensor, features: Tensor, feature_index: Tensor | None) -> Tensor:
    """Puts features [N, H] at tokens ``feature_index`` of embedded [S, 1, H].

    A text-only row has no index: its dummy features are added as zero, so that the tower's gradients exist on every
    rank in every step (overlapped reduction waits for each of them).
    """
    assert feature_index is not None
    features = features.to(embedded.dtype)
    if feature_index.numel() == 0:
        return embedded + features.sum() * 0.0
    return embedded.clone().index_copy(0, feature_index, features[:, None])
