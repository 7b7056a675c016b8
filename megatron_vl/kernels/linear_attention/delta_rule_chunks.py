"""What the kernels of the gated delta rule do with one chunk: load it, sum its decays, invert its system.

:mod:`megatron_vl.kernels.linear_attention.gated_delta_rule_triton` defines the quantities.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.sizes import DELTA_CHUNK
from megatron_vl.kernels.where_kernels_run import has_large_shared_memory

CHUNK_TOKENS = DELTA_CHUNK
BASE_BLOCK = 16
"""Size of the diagonal blocks that are inverted row by row."""
SCAN_COLUMNS = 64
"""Number of the state's V columns that one program of a scan keeps."""


@triton.jit
def load_tile(base_pointer, chunk, token_stride, head, length, C: tl.constexpr, D: tl.constexpr):
    """Loads [C, D] of a tensor [S, heads, D] whose tokens are ``token_stride`` apart; zero after the row."""
    token = chunk * C + tl.arange(0, C)
    pointers = base_pointer + token[:, None] * token_stride + head * D + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=(token < length)[:, None], other=0.0)


@triton.jit
def compute_inverse_length(x):
    x_fp32 = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x_fp32 * x_fp32, 1) + 1e-6)


@triton.jit
def load_segment_ids(segments, chunk, length, C: tl.constexpr, INITIAL: tl.constexpr):
    """The sequence numbers of a chunk's tokens [C], and of the token before the chunk (-1: there is none).

    With INITIAL, the token before the row belongs to the row's first sequence.

    Tokens after the row belong to its last sequence.
    """
    token = chunk * C + tl.arange(0, C)
    segment = tl.load(segments + tl.minimum(token, length - 1))
    previous_segment = tl.load(segments + tl.maximum(chunk * C - 1, 0))
    if INITIAL:
        return segment, previous_segment
    return segment, tl.where(chunk > 0, previous_segment, -1)


@triton.jit
def find_visible_pairs(segment_ids, C: tl.constexpr):
    """Whether token i (row) sees token j (column)."""
    i = tl.arange(0, C)
    return (segment_ids[:, None] == segment_ids[None, :]) & (i[:, None] >= i[None, :])


@triton.jit
def find_visible_pairs_transposed(segment_ids, C: tl.constexpr):
    """Whether token j (row) is seen by token i (column)."""
    i = tl.arange(0, C)
    return (segment_ids[:, None] == segment_ids[None, :]) & (i[:, None] <= i[None, :])


@triton.jit
def sum_log_decay(log_decay, visible_pairs, chunk, head, length, heads, C: tl.constexpr):
    """c [C]. It is summed within each sequence, so that other sequences do not change its rounding."""
    token = chunk * C + tl.arange(0, C)
    token_decay = tl.load(log_decay + token * heads + head, mask=token < length, other=0.0).to(tl.float32)
    return tl.sum(tl.where(visible_pairs, token_decay[None, :], 0.0), 1)


@triton.jit
def compute_border_factors(cumulative_decay, segment_ids, previous_segment, C: tl.constexpr):
    """read [C], write [C], and the factor by which the chunk multiplies the state."""
    i = tl.arange(0, C)
    last_segment = tl.sum(tl.where(i == C - 1, segment_ids, 0), 0)
    end = tl.sum(tl.where(i == C - 1, cumulative_decay, 0.0), 0)
    read_decay = tl.where(segment_ids == previous_segment, tl.exp(cumulative_decay), 0.0)
    write_decay = tl.exp(tl.where(segment_ids == last_segment, end - cumulative_decay, float("-inf")))
    return read_decay, write_decay, tl.where(last_segment == previous_segment, tl.exp(end), 0.0)


@triton.jit
def load_beta(beta, chunk, head, length, heads, C: tl.constexpr):
    token = chunk * C + tl.arange(0, C)
    return tl.load(beta + token * heads + head, mask=token < length, other=0.0).to(tl.float32)


@triton.jit
def _join_inverse_blocks(x, a, C: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of diagonal blocks of size 2 WIDTH, from those of size WIDTH."""
    i = tl.arange(0, C)
    pair_index, half_index = i // (2 * WIDTH), i // WIDTH
    is_off_diagonal = (pair_index[:, None] == pair_index[None, :]) & (
        half_index[:, None] != half_index[None, :]
    )
    left_product = tl.dot(x, tl.where(is_off_diagonal, a, 0.0), input_precision=PRECISION)
    return x - tl.dot(left_product, x, input_precision=PRECISION)


@triton.jit
def invert_unit_lower(a, C: tl.constexpr, BASE: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + a)^-1 for a strictly lower triangular a [C, C], where C is 4 BASE.

    Diagonal blocks are inverted row by row, and larger blocks are joined from them. The product (1 - a)
    (1 + a^2) (1 + a^4) ... would be shorter, but its terms cancel if keys are alike.
    """
    B: tl.constexpr = C // BASE
    block_index, row_index = tl.arange(0, B), tl.arange(0, BASE)
    is_diagonal = block_index[:, None, None, None] == block_index[None, None, :, None]
    diagonal_blocks = tl.sum(tl.where(is_diagonal, tl.reshape(a, (B, BASE, B, BASE)), 0.0), 2)
    x = tl.where(
        row_index[None, :, None] == row_index[None, None, :], 1.0, tl.zeros((B, BASE, BASE), tl.float32)
    )
    for i in tl.static_range(1, BASE):
        row_values = tl.sum(tl.where(row_index[None, :, None] == i, diagonal_blocks, 0.0), 1)
        row_update = tl.sum(row_values[:, :, None] * x, 1)
        x = tl.where(row_index[None, :, None] == i, x - row_update[:, None, :], x)

    x = tl.broadcast_to(x[:, :, None, :], (B, BASE, B, BASE))
    x = tl.reshape(tl.where(is_diagonal, x, 0.0), (C, C))
    x = _join_inverse_blocks(x, a, C, BASE, PRECISION)
    return _join_inverse_blocks(x, a, C, 2 * BASE, PRECISION)


def read_kernel_sizes(q: Tensor, v: Tensor) -> dict[str, int | str]:
    """The sizes of a launch. All ranks have the same, so that they compute the same bits."""
    heads = v.shape[1]
    return {
        "heads": heads,
        "repeats": heads // q.shape[1],
        "K": q.shape[2],
        "V": v.shape[2],
        "C": CHUNK_TOKENS,
        # Of products of float32 operands: those that invert the triangular system.
        "PRECISION": "tf32",
    }


def choose_scan_options(v: Tensor) -> dict[str, int]:
    # With more heads, two programs share a multiprocessor, and a third stage would leave too little memory.
    # It takes 105 KiB of shared memory.
    has_room = v.shape[1] <= 32 and has_large_shared_memory(v.device)
    return {"COLUMNS": min(SCAN_COLUMNS, v.shape[2]), "STAGES": 3 if has_room else 2, "num_warps": 4}
