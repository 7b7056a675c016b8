"""The token embedding, whose backward pass adds to the rows of its tokens only.

Autograd's gradient of an embedding has a row for each word of the vocabulary. Filling it with zeros and
adding it to ``main_grad`` moves 12 bytes for each of a billion parameters (Qwen3.5-9B), for each row of
tokens.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import VocabParallelEmbedding, reduce_from_tensor_model_parallel_region
from torch import Tensor

from megatron_vl.core_fixes.wgrad_fusion import fuse_output_layer


def fuse_vocabulary_gradients(language_model: GPTModel) -> None:
    """Makes embedding and output layer of a chunk that DDP wraps add their gradients to ``main_grad``.

    Both have a row for each word of the vocabulary. Otherwise, each of them writes a gradient of its own for
    each row of tokens, and DDP adds it: 16 bytes a parameter, where the output layer needs 8.
    """
    if language_model.pre_process:
        word_embeddings = language_model.embedding.word_embeddings
        word_embeddings.forward = partial(embed_tokens, word_embeddings)
        # Core sets this for tied weights on one stage, because its own embedding returns a real gradient.
        word_embeddings.weight.zero_out_wgrad = False
    if language_model.post_process:
        fuse_output_layer(language_model.output_layer)


def embed_tokens(embedding: VocabParallelEmbedding, token_ids: Tensor) -> Tensor:
    """Does what the forward pass of core's embedding does, without scattering to sequence parallelism.

    From ids, int64 of any shape, to vectors [..., H], which are equal on all tensor-parallel ranks.
    """
    if embedding.tp_group.size() == 1:
        return _EmbeddingLookup.apply(embedding.weight, token_ids)

    first_id, end_id = embedding.vocab_start_index, embedding.vocab_end_index
    is_elsewhere = (token_ids < first_id) | (token_ids >= end_id)
    local_vectors = _EmbeddingLookup.apply(
        embedding.weight, (token_ids - first_id).masked_fill(is_elsewhere, 0)
    )
    local_vectors = local_vectors.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
    return reduce_from_tensor_model_parallel_region(local_vectors, group=embedding.tp_group)


class _EmbeddingLookup(torch.autograd.Function):
    """``F.embedding``, whose backward pass adds to ``weight.main_grad``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, token_ids: Tensor) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.weight = weight
        return torch.nn.functional.embedding(token_ids, weight)

    @staticmethod
    def backward(ctx: Any, vector_grads: Tensor) -> tuple[Tensor, None]:
        (token_ids,) = ctx.saved_tensors
        add_to_rows(ctx.weight.main_grad, token_ids.flatten(), vector_grads.flatten(0, -2))
        ctx.weight.grad_added_to_main_grad = True

        # DDP's hook needs a gradient, which it does not read.
        return torch.empty_like(ctx.weight), None


def add_to_rows(main_grad: Tensor, token_ids: Tensor, vector_grads: Tensor) -> None:
    """Adds each token's gradient to its row, in an order that does not change from run to run.

    The numbers are those of adding the whole gradient: the gradients of a word are summed first and rounded
    to their own type. So the words of the row are numbered from 0, which makes that gradient small.

    Args:
        main_grad: [V, H].
        token_ids: int64 [N], rows of ``main_grad``.
        vector_grads: [N, H].
    """
    num_tokens = len(token_ids)
    sorted_ids, order = torch.sort(token_ids, stable=True)
    sorted_numbers = torch.zeros_like(sorted_ids)
    sorted_numbers[1:] = (sorted_ids[1:] != sorted_ids[:-1]).cumsum(0)
    word_numbers = torch.empty_like(sorted_numbers)
    word_numbers[order] = sorted_numbers
    word_grads = torch.ops.aten.embedding_dense_backward(
        vector_grads, word_numbers, num_weights=num_tokens, padding_idx=-1, scale_grad_by_freq=False
    )

    # The host does not know how many words there are. The other sums are 0; they are spread over all rows,
    # because adding all of them to one row would take long.
    rows_of_words = torch.arange(num_tokens, device=token_ids.device) % len(main_grad)
    rows_of_words[sorted_numbers] = sorted_ids
    main_grad.index_add_(0, rows_of_words, word_grads.to(main_grad.dtype))
