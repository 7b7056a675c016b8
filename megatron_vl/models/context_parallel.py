"""Context parallelism: ranks share a row, and each holds an equal, contiguous part (shard) of its tokens.

The row is cut, not its documents, so nothing is padded and any document may cross an edge. Only three parts
of the model need other shards:

* Full attention exchanges heads (DeepSpeed-Ulysses, arXiv 2309.14509): before it, each rank gives up the
  other heads of its tokens and receives the other tokens of its heads; after it, the reverse. In between,
  documents are whole, so that the packed kernels and their bounds stay as they are. If the heads do not
  divide among all ranks, neighbours exchange them as far as they do. Then each rank has a larger part of the
  row, and gathers the keys and values of its heads from the ranks with the other parts.
* The vision tower encodes some frames of the row on each rank. Features then go to the ranks whose shards
  have their placeholders.
* The loss, the number of its tokens and the gradients are sums over all ranks of a row, as they are over
  data-parallel ranks.

What a rank exchanges depends on the row. It is computed on the CPU from the whole row
(:mod:`megatron_vl.training.rows.row_shards`), so that no rank reads a number from its device.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor

from megatron_vl.spec.layout import key_value_copies


@dataclass
class FeatureRoute:
    """Sends the features of a row's images from the ranks that encoded them to those that need them."""

    encodes: bool
    """Whether this rank encodes any frame of the row."""
    send_order: Tensor
    """int64 [n], on the device: this rank's features, sorted by the rank that needs them."""
    sent: list[int]
    received: list[int]


def heads_for_tokens(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges the tokens of a shard, with all heads, for all tokens of the row, with some heads.

    If there are fewer key/value heads than ranks, each is repeated, and the gradients of its copies are
    summed.

    Args:
        query: [S / cp, h, d].
        key, value: [S / cp, g, d].

    Returns:
        Query [S, h / cp, d], key and value [S, c * g / cp, d] with c from :func:`key_value_copies`.
    """
    cp_size = group.size()
    num_copies = key_value_copies(key.shape[1], cp_size)
    if num_copies > 1:
        key = key.repeat_interleave(num_copies, 1)
        value = value.repeat_interleave(num_copies, 1)

    # Each rank's heads of query, key and value lie side by side, so that one exchange moves all of them.
    heads_by_rank = [tensor.unflatten(1, (cp_size, -1)) for tensor in (query, key, value)]
    num_heads = [tensor.shape[2] for tensor in heads_by_rank]
    sent_heads = torch.cat(heads_by_rank, 2).transpose(0, 1)
    received_heads = all_to_all(group, sent_heads.contiguous()).flatten(0, 1)
    local_query, local_key, local_value = received_heads.split(num_heads, 1)
    return local_query.contiguous(), local_key.contiguous(), local_value.contiguous()


def gather_keys(
    key: Tensor, value: Tensor, row_tokens: slice, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Gathers the keys and values that a rank's queries attend to. Collective over ``group``, backwards too.

    The gradients of a token's key and value are summed over the ranks that attend to it.

    Args:
        key, value: [S / ranks, g, d], those of the same heads on all ranks, in the order of the ranks.
        row_tokens: the n tokens of the row whose keys and values are returned.

    Returns:
        Key and value [n, g, d].
    """
    row_key = gather_from_sequence_parallel_region(key, group=group)
    return row_key[row_tokens], gather_from_sequence_parallel_region(value, group=group)[row_tokens]


def tokens_for_heads(attention_output: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The reverse of :func:`heads_for_tokens` for the output: [S, h / cp, d] -> [S / cp, h, d]."""
    tokens_by_rank = attention_output.unflatten(0, (group.size(), -1))
    received_heads = all_to_all(group, tokens_by_rank.contiguous())  # its backward pass is one too
    return received_heads.transpose(0, 1).flatten(1, 2)
