"""The output layer and cross entropy, for loss tokens only.

In rows with images, most tokens have no loss: placeholders, questions, padding. The output layer is the
widest of the model, so the logits of these tokens are not computed. The result still has one loss per token
of the row, which is zero for these tokens; :func:`megatron_vl.training.step.token_loss` applies the weights
of the mask. Megatron-core's own output layer and loss are called, through the ``output_processor`` of
GPTModel.

Logits of long rows would take most of the memory: 131,072 tokens of Qwen3.5 have 61 GiB in bfloat16, and the
loss copies them. So a rank with more loss tokens than :data:`LOSS_CHUNK_TOKENS` computes them in chunks, and
each chunk again in the backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor

from megatron_vl.kernels.sizes import LOSS_CHUNK_TOKENS


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
    weight = output_layer.weight if output_weight is None else output_weight
    token_losses = losses_of_tokens(
        hidden_states, output_layer, weight, labels, context, compute_language_model_loss
    )
    return token_losses.new_zeros(labels.shape).index_copy(1, context, token_losses)


def losses_of_tokens(
    hidden_states: Tensor,
    output_layer: ColumnParallelLinear,
    weight: Tensor,
    labels: Tensor,
    index: Tensor,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    is_first: list[Tensor] | None = None,
) -> Tensor:
    """Losses [1, N] of the tokens ``index``, int64 [N]; other arguments as in :func:`loss_token_losses`.

    Args:
        weight: that of the output layer. If it needs no gradient, none is computed.
        is_first: gets, for the tokens in order, whether the label has the highest logit, bool [1, n].
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

    def compute_losses(states: Tensor, weight: Tensor, chunk_labels: Tensor) -> Tensor:
        with _accept_whole_row(output_layer):
            logits, _bias = output_layer(states, weight=weight)
        # Chunks are computed again in the backward pass. The loss may overwrite the logits.
        if is_first is not None and sum(part.numel() for part in is_first) < len(index):
            is_first.append(_label_is_first(logits.detach(), chunk_labels, output_layer.tp_group))
        return compute_language_model_loss(chunk_labels, logits)

    selected_states, selected_labels = hidden_states.index_select(0, index), labels.index_select(1, index)
    if len(index) <= LOSS_CHUNK_TOKENS:
        return compute_losses(selected_states, weight, selected_labels)
    return _ChunkedLosses.apply(selected_states, weight, selected_labels, compute_losses)


def _label_is_first(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Whether a label has the highest logit: [n, 1, V / tp] and [1, n] -> bool [1, n].

    Collective over the tensor-parallel group.
    """
    logits = logits.squeeze(1)
    local_labels = labels[0] - group.rank() * logits.shape[1]
    is_elsewhere = (local_labels < 0) | (local_labels >= logits.shape[1])
    label_logits = logits.gather(1, local_labels.masked_fill(is_elsewhere, 0)[:, None])[:, 0]
    label_logits = label_logits.masked_fill(is_elsewhere, float("-inf"))
    highest = torch.stack((label_logits, logits.amax(1)))
    # Each rank has a part of the vocabulary: the label lies on one of them, the highest logit on any.
    if group.size() > 1:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    return (highest[0] >= highest[1])[None]


class _ChunkedLosses(torch.autograd.Function):
    """Losses [1, N] of states [N, 1, H] and labels [1, N], without keeping the logits of any chunk.

    Core's checkpoint would run DDP's hook of the weight once for each chunk, and torch's hides the weight
    from the output layer. So the weight's gradients are collected under another name here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        labels: Tensor,
        compute_losses: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(states, labels)
        ctx.weight, ctx.compute_losses = weight, compute_losses
        chunk_losses = [
            compute_losses(chunk_states, weight, chunk_labels)
            for chunk_states, chunk_labels in _split_into_chunks(states, labels)
        ]
        return torch.cat(chunk_losses, 1)

    @staticmethod
    def backward(ctx: Any, loss_grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        states, labels = ctx.saved_tensors
        weight = ctx.weight.detach()
        if ctx.needs_input_grad[1]:
            weight.requires_grad_()
            weight.main_grad, weight.grad_added_to_main_grad = ctx.weight.main_grad, False
            ctx.weight.grad_added_to_main_grad = True

        state_grads: list[Any] = []
        chunks = zip(_split_into_chunks(states, labels), loss_grads.split(LOSS_CHUNK_TOKENS, 1), strict=True)
        for (chunk_states, chunk_labels), chunk_grads in chunks:
            weight.grad = None  # a placeholder, as large as the weight
            chunk_states = chunk_states.detach().requires_grad_()
            with torch.enable_grad():
                chunk_losses = ctx.compute_losses(chunk_states, weight, chunk_labels)
            torch.autograd.backward(chunk_losses, chunk_grads)
            state_grads.append(chunk_states.grad)

        return torch.cat(state_grads), weight.grad, None, None


def _split_into_chunks(states: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(states.split(LOSS_CHUNK_TOKENS), labels.split(LOSS_CHUNK_TOKENS, 1), strict=True)


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
