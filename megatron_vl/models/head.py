"""Output layer and cross entropy of the loss tokens only.

In rows with pictures most tokens have no label to learn: placeholders, questions, padding. The output layer
is the widest of the model, so their logits are not computed. The result still has a loss for every token of
the row, which is zero where nothing was computed. Megatron-core's own output layer and loss are called,
through the ``output_processor`` of GPTModel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor


def selected_losses(
    *,
    hidden_states: Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: Tensor | None,
    labels: Tensor,
    context: Tensor,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    **_: Any,
) -> Tensor:
    """Per-token losses [1, S] of hidden states [S (/ tp with sequence parallelism), 1, H];
    0 outside ``context``.

    Args:
        output_weight: the tied weight; None: the output layer has its own weight.
        labels: int64 [1, S].
        context: int64 [N], distinct token positions in the row (:func:`megatron_vl.data.row.loss_index`),
            equal on all tensor-parallel ranks.
    """
    if output_layer.sequence_parallel:
        # Loss tokens are spread unevenly over the ranks' parts of the row, so each rank gathers the whole row
        # before it selects. The selection is a copy, so it does not hold core's shared buffer.
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states,
            tensor_parallel_output_grad=False,
            group=output_layer.tp_group,
            use_global_buffer=True,
        )
    with _whole_input(output_layer):
        logits, _bias = output_layer(hidden_states.index_select(0, context), weight=output_weight)
    losses = compute_language_model_loss(labels.index_select(1, context), logits)
    return losses.new_zeros(labels.shape).index_copy(1, context, losses)


@contextmanager
def _whole_input(layer: ColumnParallelLinear) -> Iterator[None]:
    """Within the context, a sequence-parallel output layer takes whole inputs,
    as without sequence parallelism.

    The gradients of the inputs are then summed over the ranks in one all-reduce, which overlaps with the
    product for the weight's gradient, and each rank keeps its part of the row. For N of S tokens this moves S
    + 2 N instead of 3 S with core's own sequence-parallel layer, which gathers once more in the backward
    pass. So it never moves more.
    """
    sequence_parallel, allreduce = layer.sequence_parallel, layer.allreduce_dgrad
    layer.sequence_parallel = False
    layer.allreduce_dgrad = allreduce or sequence_parallel
    try:
        yield
    finally:
        layer.sequence_parallel, layer.allreduce_dgrad = sequence_parallel, allreduce
