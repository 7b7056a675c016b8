"""What linear attention keeps for its backward pass, in bytes for each token, counted with autograd's hooks.

    TRITON_INTERPRET=1 python -m tests.estimate.saved_by_linear_attention KEY_HEADS VALUE_HEADS WIDTH TOKENS

Convolution, rule and norm are the Triton kernels, in Triton's interpreter and in float32. Several ranks share
one sequence, of which each has TOKENS tokens, and the one in the middle counts.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vl.kernels.linear_attention.shard_exchange import ShardExchange, shard_route
from megatron_vl.models.gated_delta_net import GatedDeltaNet, GatedNorm
from megatron_vl.parallel.process_grid import init_distributed
from megatron_vl.platform import get_platform
from tests.kernels.triton_checks import fix_interpreter


def layer(key_heads: int, value_heads: int, width: int) -> GatedDeltaNet:
    """The inside of a layer, between its two linears."""
    made = GatedDeltaNet.__new__(GatedDeltaNet)
    nn.Module.__init__(made)
    keys, values = key_heads * width, value_heads * width
    made.key_heads, made.value_heads = key_heads, value_heads
    made.channels = (keys, keys, values)
    made.sections = (2 * keys + values, values, value_heads, value_heads)
    made.config = SimpleNamespace(sequence_parallel=True)
    made.conv1d = nn.Module()
    made.conv1d.weight = nn.Parameter(torch.randn(2 * keys + values, 1, 4))
    made.A_log, made.dt_bias = nn.Parameter(torch.zeros(value_heads)), nn.Parameter(torch.ones(value_heads))
    made.out_norm = GatedNorm(width, 1e-6, sequence_parallel=True)
    return made


def saved_bytes(made: GatedDeltaNet, tokens: int, exchange: ShardExchange | None) -> int:
    """Bytes of all tensors that are kept, parameters left out. Views of one tensor count once."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    projected = torch.randn(tokens, sum(made.sections), requires_grad=True)
    first_length = tokens // 3 if exchange is None else tokens
    segments = (torch.arange(tokens) >= first_length).int()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = made._mix_tokens(projected, segments, exchange)
    keep(out)  # the input of the linear that follows
    for parameter in made.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


if __name__ == "__main__":
    fix_interpreter()
    heads, more, size, length = map(int, sys.argv[1:])
    init_distributed(get_platform("cpu"))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    route = shard_route([0, ranks * length], ranks, rank)
    shard_exchange = ShardExchange(route, dist.group.WORLD) if route.any_cut else None
    kept_bytes = saved_bytes(layer(heads, more, size), length, shard_exchange)
    if rank == ranks // 2:
        print(kept_bytes / length)
