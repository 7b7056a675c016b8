"""Depthwise causal convolution with SiLU over packed rows, in Triton; see
:func:`megatron_vl.kernels.linear_attention.gated_delta_rule.causal_conv`.

A program walks over a few tokens of a block of channels and keeps the last inputs in registers, so each input
is read once, except near the borders of blocks. The arithmetic is in float32, and results are rounded once.
The gradient of the weight is summed over a program's tokens, then over the programs, in a fixed order.

With HALO, the row's first sequence may have begun before the row, and ``halo`` [3, C] has the inputs of the
three tokens before it: zero for those of other sequences. Only the first program of each block of channels
reads them and computes their gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.linear_attention.shard_exchange import ShardExchange
from megatron_vl.kernels.sizes import cdiv

_BLOCK_CHANNELS = 256
_BLOCK_TOKENS = 16
_CONV_WIDTH = 4
"""The only width that the kernels support. Every released model's convolution has it."""


@triton.jit
def _segment_id(segments, token, length, HALO: tl.constexpr):
    """The sequence number of a token; -1 outside the row, except for tokens of the halo."""
    if HALO:
        token = tl.maximum(token, 0)
    is_inside = (token >= 0) & (token < length)
    return tl.load(segments + token, mask=is_inside, other=-1)


@triton.jit
def _block_of_program(WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """The number of this program's block of tokens, and its channels.

    The grid has one dimension: a second one may have 65,535 programs, less than the blocks of 2^20 tokens.
    """
    channel_blocks: tl.constexpr = (WIDTH + CHANNELS - 1) // CHANNELS
    channel_block = tl.program_id(0) % channel_blocks
    token_block = (tl.program_id(0) // channel_blocks).to(tl.int64)
    return token_block, channel_block * CHANNELS + tl.arange(0, CHANNELS)


@triton.jit
def _load_weights(weight, channel, channel_mask):
    w0 = tl.load(weight + channel * 4 + 3, mask=channel_mask, other=0.0).to(tl.float32)
    w1 = tl.load(weight + channel * 4 + 2, mask=channel_mask, other=0.0).to(tl.float32)
    w2 = tl.load(weight + channel * 4 + 1, mask=channel_mask, other=0.0).to(tl.float32)
    w3 = tl.load(weight + channel * 4, mask=channel_mask, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit(do_not_specialize=["length"])
def _forward_kernel(
    x, weight, segments, halo, out, length, x_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, HALO: tl.constexpr,
):  # fmt: skip
    """Convolves TOKENS tokens of a block of channels, out of WIDTH channels in all.

    x0 to x3 are the inputs of a token and of the three tokens before it, s0 to s3 the numbers of their
    sequences, and w0 to w3 their weights.
    """
    token_block, channel = _block_of_program(WIDTH, CHANNELS)
    channel_mask = channel < WIDTH
    first_token = token_block * TOKENS
    w0, w1, w2, w3 = _load_weights(weight, channel, channel_mask)

    s1, s2, s3 = (
        _segment_id(segments, first_token - 1, length, HALO),
        _segment_id(segments, first_token - 2, length, HALO),
        _segment_id(segments, first_token - 3, length, HALO),
    )
    input_pointer = x + first_token * x_stride + channel
    x1 = tl.load(input_pointer - x_stride, mask=channel_mask & (first_token >= 1), other=0.0).to(tl.float32)
    x2 = tl.load(input_pointer - 2 * x_stride, mask=channel_mask & (first_token >= 2), other=0.0).to(
        tl.float32
    )
    x3 = tl.load(input_pointer - 3 * x_stride, mask=channel_mask & (first_token >= 3), other=0.0).to(
        tl.float32
    )
    if HALO:
        there = channel_mask & (first_token == 0)
        x1 += tl.load(halo + 2 * WIDTH + channel, mask=there, other=0.0).to(tl.float32)
        x2 += tl.load(halo + WIDTH + channel, mask=there, other=0.0).to(tl.float32)
        x3 += tl.load(halo + channel, mask=there, other=0.0).to(tl.float32)

    for token_in_block in tl.static_range(0, TOKENS):
        token = first_token + token_in_block
        s0 = _segment_id(segments, token, length, HALO)
        x0 = tl.load(x + token * x_stride + channel, mask=channel_mask & (token < length), other=0.0).to(
            tl.float32
        )

        y = w0 * x0
        y += tl.where(s1 == s0, w1 * x1, 0.0)
        y += tl.where(s2 == s0, w2 * x2, 0.0)
        y += tl.where(s3 == s0, w3 * x3, 0.0)
        y *= tl.sigmoid(y)
        tl.store(out + token * WIDTH + channel, y, mask=channel_mask & (token < length))

        x1, x2, x3 = x0, x1, x2
        s1, s2, s3 = s0, s1, s2


@triton.jit(do_not_specialize=["length"])
def _backward_kernel(
    x, weight, segments, halo, output_grad, input_grad_pointer, weight_grads, dhalo, length, x_stride,
    output_grad_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, HALO: tl.constexpr,
):  # fmt: skip
    """The gradients of :func:`_forward_kernel`.

    The gradient of an input depends on the outputs of its token and of the three tokens after it. The program
    walks backwards and starts three tokens after its own.
    """
    token_block, channel = _block_of_program(WIDTH, CHANNELS)
    channel_mask = channel < WIDTH
    first_token = token_block * TOKENS
    w0, w1, w2, w3 = _load_weights(weight, channel, channel_mask)
    dw0, dw1, dw2, dw3 = (
        tl.zeros((CHANNELS,), tl.float32),
        tl.zeros((CHANNELS,), tl.float32),
        tl.zeros((CHANNELS,), tl.float32),
        tl.zeros((CHANNELS,), tl.float32),
    )

    # x0 to x3 are the inputs of a token and of the three tokens before it, s0 to s3 their sequences. d1 to d3
    # are the gradients before SiLU of the three tokens after it, n1 to n3 their sequences (-2: none yet).
    last_token = first_token + TOKENS + 2
    d1, d2, d3 = (
        tl.zeros((CHANNELS,), tl.float32),
        tl.zeros((CHANNELS,), tl.float32),
        tl.zeros((CHANNELS,), tl.float32),
    )
    n1, n2, n3 = tl.full((), -2, tl.int32), tl.full((), -2, tl.int32), tl.full((), -2, tl.int32)
    s0, s1, s2 = (
        _segment_id(segments, last_token, length, HALO),
        _segment_id(segments, last_token - 1, length, HALO),
        _segment_id(segments, last_token - 2, length, HALO),
    )
    pointers = x + last_token * x_stride + channel
    x0 = tl.load(pointers, mask=channel_mask & (last_token < length), other=0.0).to(tl.float32)
    x1 = tl.load(pointers - x_stride, mask=channel_mask & (last_token - 1 < length), other=0.0).to(tl.float32)
    x2 = tl.load(pointers - 2 * x_stride, mask=channel_mask & (last_token - 2 < length), other=0.0).to(
        tl.float32
    )

    for steps_back in tl.static_range(0, TOKENS + 3):
        token = last_token - steps_back
        s3 = _segment_id(segments, token - 3, length, HALO)
        load_mask = channel_mask & (token >= 3) & (token - 3 < length)
        x3 = tl.load(x + (token - 3) * x_stride + channel, mask=load_mask, other=0.0).to(tl.float32)
        if HALO:
            load_mask = channel_mask & (token >= 0) & (token < 3)
            x3 += tl.load(halo + token * WIDTH + channel, mask=load_mask, other=0.0).to(tl.float32)

        # Inputs of other sequences count as zero.
        y1, y2, y3 = tl.where(s1 == s0, x1, 0.0), tl.where(s2 == s0, x2, 0.0), tl.where(s3 == s0, x3, 0.0)
        y = w0 * x0 + w1 * y1 + w2 * y2 + w3 * y3

        load_mask = channel_mask & (token < length)
        d0 = tl.load(output_grad + token * output_grad_stride + channel, mask=load_mask, other=0.0).to(
            tl.float32
        )
        sigmoid = tl.sigmoid(y)
        d0 *= sigmoid * (1 + y * (1 - sigmoid))

        if steps_back >= 3:  # this program's own tokens
            dw0 += d0 * x0
            dw1 += d0 * y1
            dw2 += d0 * y2
            dw3 += d0 * y3
            input_grad = w0 * d0
            input_grad += tl.where(n1 == s0, w1 * d1, 0.0)
            input_grad += tl.where(n2 == s0, w2 * d2, 0.0)
            input_grad += tl.where(n3 == s0, w3 * d3, 0.0)
            tl.store(input_grad_pointer + token * WIDTH + channel, input_grad, mask=load_mask)

        d1, d2, d3 = d0, d1, d2
        n1, n2, n3 = s0, n1, n2
        x0, x1, x2 = x1, x2, x3
        s0, s1, s2 = s1, s2, s3

    if HALO:
        # d1 to d3 are now the gradients of the program's first three tokens.
        load_mask = channel_mask & (first_token == 0)
        h3 = w1 * d1 + tl.where(n2 == n1, w2 * d2, 0.0) + tl.where(n3 == n1, w3 * d3, 0.0)
        h2 = w2 * d1 + tl.where(n2 == n1, w3 * d2, 0.0)
        tl.store(dhalo + 2 * WIDTH + channel, h3, mask=load_mask)
        tl.store(dhalo + WIDTH + channel, h2, mask=load_mask)
        tl.store(dhalo + channel, w3 * d1, mask=load_mask)

    pointers = weight_grads + token_block * 4 * WIDTH + channel
    tl.store(pointers, dw3, mask=channel_mask)
    tl.store(pointers + WIDTH, dw2, mask=channel_mask)
    tl.store(pointers + 2 * WIDTH, dw1, mask=channel_mask)
    tl.store(pointers + 3 * WIDTH, dw0, mask=channel_mask)


def _launch_grid(x: Tensor) -> tuple[int]:
    return (cdiv(x.shape[1], _BLOCK_CHANNELS) * cdiv(x.shape[0], _BLOCK_TOKENS),)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, segments: Tensor, exchange: ShardExchange | None) -> Tensor:
        halo = None if exchange is None else exchange.halo(x, _CONV_WIDTH - 1)
        ctx.save_for_backward(x, weight, segments, halo)
        ctx.exchange = exchange
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _forward_kernel[_launch_grid(x)](
            x, weight, segments, halo, out, x.shape[0], x.stride(0), WIDTH=x.shape[1],
            TOKENS=_BLOCK_TOKENS, CHANNELS=_BLOCK_CHANNELS, HALO=halo is not None, num_warps=4,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        x, weight, segments, halo = ctx.saved_tensors
        # Its channels must be contiguous.
        dout = output_grad if output_grad.stride(1) == 1 else output_grad.contiguous()
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dhalo = None if halo is None else torch.empty_like(halo)
        token_blocks = cdiv(x.shape[0], _BLOCK_TOKENS)
        dweight = torch.empty(token_blocks, 4, x.shape[1], dtype=torch.float32, device=x.device)
        _backward_kernel[_launch_grid(x)](
            x, weight, segments, halo, dout, dx, dweight, dhalo, x.shape[0], x.stride(0), dout.stride(0),
            WIDTH=x.shape[1], TOKENS=_BLOCK_TOKENS, CHANNELS=_BLOCK_CHANNELS, HALO=halo is not None,
            num_warps=4,
        )  # fmt: skip
        weight_grad = dweight.sum(0).t().to(weight.dtype)
        if dhalo is not None:
            ctx.exchange.add_halo_gradients(dhalo, dx)
        return dx, weight_grad, None, None


def is_supported(x: Tensor, weight: Tensor) -> bool:
    return weight.shape[1] == _CONV_WIDTH and x.shape[0] > 0


def causal_conv(x: Tensor, weight: Tensor, segments: Tensor, exchange: ShardExchange | None = None) -> Tensor:
    """x [S, C] with any stride between tokens; weight [C, 4]; segments [S] -> [S, C]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    return _CausalConv.apply(x, weight.contiguous(), segments.contiguous(), exchange)
