"""The output layer and cross entropy, for loss tokens only.

In rows with pictures, most tokens have no loss: placeholders, questions, padding. The output layer is the
widest of the model, so the logits of these tokens are not computed. The result still has one loss per token
of the row, which is zero for these tokens. Megatron-core's own output layer and loss are called, through the
``output_processor`` of GPTModel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor


def loss_token_losses(
    *,
    hidden_states: Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: Tensor | None,
    labels: Tensor,
    context: Tensor,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    **_: Any,
) -> Tensor:
    """Computes per-token losses [1, S], which are 0 outside ``context``.

    Args:
        hidden_states: [S, 1, H], or [S / tp, 1, H] with sequence parallelism.
        output_weight: the tied weight; None: the output layer has its own weight.
        labels: int64 [1, S].
        context: int64 [N], distinct token positions in the row
            (:func:`~megatron_vl.data.packing.training_row.loss_index`), equal on all tensor-parallel ranks.
    """
    if output_layer.sequence_parallel:
        # Loss tokens are not distributed evenly over the ranks' parts of the row, so each rank gathers the
        # whole row before it selects. The selection is a copy, so core's shared buffer need not be kept.
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states,
            tensor_parallel_output_grad=False,
            group=output_layer.tp_group,
            use_global_buffer=True,
        )
    with _accept_whole_row(output_layer):
        selected_logits, _bias = output_layer(hidden_states.index_select(0, context), weight=output_weight)
    token_losses = compute_language_model_loss(labels.index_select(1, context), selected_logits)
    return token_losses.new_zeros(labels.shape).index_copy(1, context, token_losses)


@contextmanager
def _accept_whole_row(output_layer: ColumnParallelLinear) -> Iterator[None]:
    """A context in which a sequence-parallel output layer takes inputs of the whole row.

    The gradients of the inputs are then summed over the ranks in one all-reduce, which overlaps with the
    product for the weight's gradient, and each rank keeps its part of the row. For N loss tokens out of S,
    this moves S + 2 N tokens. Core's own sequence-parallel layer gathers once more in the backward pass and
    moves 3 S, which is never less.
    """
    sequence_parallel, allreduce_dgrad = output_layer.sequence_parallel, output_layer.allreduce_dgrad
    output_layer.sequence_parallel = False
    output_layer.allreduce_dgrad = allreduce_dgrad or sequence_parallel
    try:
        yield
    finally:
        output_layer.sequence_parallel, output_layer.allreduce_dgrad = sequence_parallel, allreduce_dgrad
