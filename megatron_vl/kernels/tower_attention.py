"""Triton kernels for full attention within the segments of a vision tower.

They are made for heads whose size is not a power of two. Heads of 72 (Qwen3-VL) and 80 (Qwen2-VL, Qwen2.5-VL)
are slow in kernels that round them up to 96 or 128. Here a head is cut into two parts, 64 and 16 wide, with
almost no padding. A product that sums over the head dimension is the sum of two products. A product whose
result has the head dimension becomes two products.

The forward pass uses online softmax in base 2 (FlashAttention, arXiv 2205.14135 and 2307.08691): scores never
leave the chip, and one log-sum-exp per row is kept. The backward pass has one kernel for dQ and one for dK
and dV. Neither uses atomics, so gradients are equal in every run. Products take operands in the input's type
and accumulate in fp32.

The grid cannot depend on the segments' lengths, which only the device knows. Segment ``i`` owns the tiles
from ``cu_seqlens[i] // OWN + i`` up to the first tile of the next segment. Each segment then has enough tiles
and at most one too many, and the host knows the size of the whole grid.

Query, key and value are packed as ``[3 * heads, P, d]`` and read through tensor descriptors (TMA on Hopper).
The packing kernel also applies RoPE (:func:`tower_attention`) in fp32 and rounds once, as in
``apply_rotary_pos_emb_vision`` of transformers. It puts the two members of each rotated pair next to each
other. Scores do not depend on the order, and the backward kernels have both members in one thread when they
rotate the gradients back.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_vl.kernels.tower_heads import has_kernels

SEARCH = tl.constexpr(128)
"""Number of segment bounds that a program compares at a time to find its own segment."""


@dataclass(frozen=True)
class Tile:
    """How a kernel divides its work."""

    own: int
    """Number of rows that a program computes."""
    step: int
    """Number of rows of the other operand that a program processes at a time."""
    warps: int
    stages: int
    registers: int | None = None
    """Largest number of registers per thread. With fewer, more programs can share a multiprocessor."""


@dataclass(frozen=True)
class Tiles:
    """The tiles of the three kernels. The defaults are the fastest measured on H200 for heads of 72
    (docs/log/speed.md)."""

    forward: Tile = Tile(128, 64, 8, 3)
    query: Tile = Tile(64, 32, 4, 3)
    """For dQ."""
    key: Tile = Tile(64, 64, 4, 2, 168)
    """For dK and dV."""


TILES = Tiles()


@triton.jit
def _find(cu, segments, OWN: tl.constexpr):
    """(start and end of this program's segment, the program's first row). The row may lie after the end."""
    tile = tl.program_id(0)
    before = 0
    for base in range(0, segments, SEARCH):
        i = base + tl.arange(0, SEARCH)
        first = tl.load(cu + i, mask=i < segments, other=0x7FFF0000) // OWN + i
        before += tl.sum((first <= tile).to(tl.int32))
    segment = before - 1
    start, end = tl.load(cu + segment), tl.load(cu + before)
    return start, end, start + (tile - start // OWN - segment) * OWN


@triton.jit
def _rows(parts, plane, row, ROWS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Loads both parts of ROWS rows of a plane. Columns beyond the head size are zero.

    If a head has only one part, the second result equals the first.
    """
    a = parts[0].load([plane, row, 0]).reshape(ROWS, D1)
    b = a
    if D2 > 0:
        b = parts[1].load([plane, row, D1]).reshape(ROWS, D2)
    return a, b


@triton.jit
def _across(a, b, D2: tl.constexpr):
    """The product a @ b^T over the head dimension, [A, B]."""
    out = tl.dot(a[0], tl.trans(b[0]))
    if D2 > 0:
        out = tl.dot(a[1], tl.trans(b[1]), out)
    return out


@triton.jit
def _along(p, x, sums, D2: tl.constexpr):
    """Adds ``p @ x``, [A, d], to ``sums``, its two parts."""
    a = tl.dot(p, x[0], sums[0])
    b = sums[1]
    if D2 > 0:
        b = tl.dot(p, x[1], b)
    return a, b


@triton.jit
def _zeros(ROWS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    return tl.zeros([ROWS, D1], tl.float32), tl.zeros([ROWS, D2 if D2 > 0 else 16], tl.float32)


@triton.jit
def _indices(first, end, ROWS: tl.constexpr, LOW: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """(rows [ROWS, 1] from ``first``, columns [1, WIDTH] from LOW, mask of those before ``end`` and D)"""
    row = (first + tl.arange(0, ROWS))[:, None]
    column = (LOW + tl.arange(0, WIDTH))[None, :]
    return row, column, (row < end) & (column < D)


@triton.jit
def _store_part(x, stride, first, end, value, LOW: tl.constexpr, D: tl.constexpr):
    row, column, there = _indices(first, end, value.shape[0], LOW, value.shape[1], D)
    tl.store(x + row * stride + column, value.to(x.dtype.element_ty), mask=there)


@triton.jit
def _store(x, stride, first, end, value, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    _store_part(x, stride, first, end, value[0], 0, D)
    if D2 > 0:
        _store_part(x, stride, first, end, value[1], D1, D)


@triton.jit
def _store_back(x, stride, cos, sin, first, end, value, LOW: tl.constexpr, D: tl.constexpr):
    """Applies the inverse rotation to the pairs of one part and stores their members where RoPE read them."""
    a, b = tl.split(tl.reshape(value, [value.shape[0], value.shape[1] // 2, 2]))
    row, pair, there = _indices(first, end, value.shape[0], LOW // 2, value.shape[1] // 2, D // 2)
    angle = row * (D // 2) + pair
    c, s = tl.load(cos + angle, mask=there, other=0.0), tl.load(sin + angle, mask=there, other=0.0)
    tl.store(x + row * stride + pair, (a * c + b * s).to(x.dtype.element_ty), mask=there)
    tl.store(x + row * stride + D // 2 + pair, (b * c - a * s).to(x.dtype.element_ty), mask=there)


@triton.jit
def _store_gradient(
    dqkv,
    which: tl.constexpr,
    cos,
    sin,
    start,
    first,
    end,
    value,
    ROTATED: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    """Stores a gradient into [P, heads, 3, d]; ``first`` and ``end`` are counted from ``start``."""
    head = tl.program_id(1)
    stride = tl.num_programs(1) * 3 * D
    x = dqkv + start.to(tl.int64) * stride + head * 3 * D + which * D
    if ROTATED:
        shift = start.to(tl.int64) * (D // 2)
        _store_back(x, stride, cos + shift, sin + shift, first, end, value[0], 0, D)
        if D2 > 0:
            _store_back(x, stride, cos + shift, sin + shift, first, end, value[1], D1, D)
    else:
        _store(x, stride, first, end, value, D, D1, D2)


@triton.jit(do_not_specialize=["patches"])
def _pack(qkv, packed, cos, sin, patches, HALF: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr):
    """Packs some patches of one head, [P, heads, 3, d] -> [3, heads, P, d].

    Query and key are rotated, and the members of a pair are put side by side.
    """
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    row, column, there = _indices(tl.program_id(0).to(tl.int64) * ROWS, patches, ROWS, 0, TILE, HALF)
    angle = row * HALF + column
    c, s = tl.load(cos + angle, mask=there, other=0.0), tl.load(sin + angle, mask=there, other=0.0)
    base = qkv + row * (heads * 6 * HALF) + head * 6 * HALF
    wide = tl.arange(0, 2 * TILE)[None, :]
    whole = (row < patches) & (wide < 2 * HALF)
    pointers = packed + (head.to(tl.int64) * patches + row) * (2 * HALF) + wide
    plane = heads.to(tl.int64) * patches * (2 * HALF)

    for part in tl.static_range(2):
        x = base + part * 2 * HALF + column
        a = tl.load(x, mask=there, other=0.0).to(tl.float32)
        b = tl.load(x + HALF, mask=there, other=0.0).to(tl.float32)
        pairs = tl.interleave(a * c - b * s, b * c + a * s)
        tl.store(pointers + part * plane, pairs.to(packed.dtype.element_ty), mask=whole)

    tl.store(pointers + 2 * plane, tl.load(base + 4 * HALF + wide, mask=whole, other=0.0), mask=whole)


@triton.jit(do_not_specialize=["segments", "width"])
def _forward(
    own1,
    own2,
    walked1,
    walked2,
    out,
    lse,
    cu,
    segments,
    scale,
    width,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    """Attends from OWN queries of one head to all keys of their segment.

    ``own`` and ``walked`` are the packed tensor, as descriptors of both parts in tiles of OWN and STEP rows.
    """
    start, end, first = _find(cu, segments, OWN)
    if first >= end:
        return
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    q = _rows((own1, own2), head, first, OWN, D1, D2)
    top = tl.full([OWN], float("-inf"), tl.float32)
    total = tl.zeros([OWN], tl.float32)
    sums = _zeros(OWN, D1, D2)

    for row in tl.range(start, end, STEP):
        k = _rows((walked1, walked2), heads + head, row, STEP, D1, D2)
        v = _rows((walked1, walked2), 2 * heads + head, row, STEP, D1, D2)
        s = _across(q, k, D2)
        if row + STEP > end:
            s = tl.where((row + tl.arange(0, STEP) < end)[None, :], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new[:, None])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(p, 1)
        sums = _along(p.to(v[0].dtype), v, (sums[0] * shrink[:, None], sums[1] * shrink[:, None]), D2)
        top = new

    inverse = (1.0 / total)[:, None]
    pointers = out + start.to(tl.int64) * heads * D + head * D
    _store(pointers, heads * D, first - start, end - start, (sums[0] * inverse, sums[1] * inverse), D, D1, D2)
    row = first + tl.arange(0, OWN)
    tl.store(lse + head.to(tl.int64) * width + row, top + tl.log2(total), mask=row < end)


@triton.jit
def _product_sum(
    out, dout, start, first, end, OWN: tl.constexpr, LOW: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr
):
    """(a part of dout [OWN, WIDTH], sum(out * dout) over it)"""
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    row, column, there = _indices(first - start, end - start, OWN, LOW, WIDTH, D)
    at = start.to(tl.int64) * heads * D + head * D + row * (heads * D) + column
    o, do = tl.load(out + at, mask=there, other=0.0), tl.load(dout + at, mask=there, other=0.0)
    return do, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)


@triton.jit(do_not_specialize=["segments", "width"])
def _backward_query(
    own1,
    own2,
    walked1,
    walked2,
    out,
    dout,
    lse,
    delta,
    dqkv,
    cos,
    sin,
    cu,
    segments,
    scale,
    width,
    factor,
    ROTATED: tl.constexpr,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    """Computes dQ of OWN queries of one head. Stores delta = sum(out * dout) for the other kernel."""
    start, end, first = _find(cu, segments, OWN)
    if first >= end:
        return
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    do1, d = _product_sum(out, dout, start, first, end, OWN, 0, D1, D)
    do = do1, do1
    if D2 > 0:
        do2, d2 = _product_sum(out, dout, start, first, end, OWN, D1, D2, D)
        do = do1, do2
        d += d2

    row = first + tl.arange(0, OWN)
    statistics = head.to(tl.int64) * width + row
    tl.store(delta + statistics, d, mask=row < end)
    norm = tl.load(lse + statistics, mask=row < end, other=float("inf"))
    q = _rows((own1, own2), head, first, OWN, D1, D2)
    dq = _zeros(OWN, D1, D2)

    for row in tl.range(start, end, STEP):
        k = _rows((walked1, walked2), heads + head, row, STEP, D1, D2)
        v = _rows((walked1, walked2), 2 * heads + head, row, STEP, D1, D2)
        s = _across(q, k, D2)
        if row + STEP > end:
            s = tl.where((row + tl.arange(0, STEP) < end)[None, :], s, float("-inf"))
        p = tl.exp2(s * scale - norm[:, None])
        ds = p * (_across(do, v, D2) - d[:, None])
        dq = _along(ds.to(k[0].dtype), k, dq, D2)

    dq = dq[0] * factor, dq[1] * factor
    _store_gradient(dqkv, 0, cos, sin, start, first - start, end - start, dq, ROTATED, D, D1, D2)


@triton.jit(do_not_specialize=["segments"])
def _backward_key(
    own1,
    own2,
    walked1,
    walked2,
    dout1,
    dout2,
    lse,
    delta,
    dqkv,
    cos,
    sin,
    cu,
    segments,
    scale,
    factor,
    ROTATED: tl.constexpr,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    """Computes dK and dV of OWN keys of one head from all queries of their segment.

    Scores are transposed, [OWN, STEP]. ``dout``, ``lse`` and ``delta`` are descriptors.
    """
    start, end, first = _find(cu, segments, OWN)
    if first >= end:
        return
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    k = _rows((own1, own2), heads + head, first, OWN, D1, D2)
    v = _rows((own1, own2), 2 * heads + head, first, OWN, D1, D2)
    dk, dv = _zeros(OWN, D1, D2), _zeros(OWN, D1, D2)

    # Loads of statistics start at multiples of 16 bytes, so the first may include queries of the previous
    # segment. These get no weight. Values after the last query were never written and may be NaN, which a
    # weight of zero would not remove.
    for row in tl.range(start // 4 * 4, end, STEP):
        q = _rows((walked1, walked2), head, row, STEP, D1, D2)
        do = _rows((dout1, dout2), head, row, STEP, D1, D2)
        query = row + tl.arange(0, STEP)
        mine = (query >= start) & (query < end)
        norm = tl.where(mine, lse.load([head, row]).reshape(STEP), float("inf"))
        d = tl.where(mine, delta.load([head, row]).reshape(STEP), 0.0)

        p = tl.exp2(_across(k, q, D2) * scale - norm[None, :])
        dv = _along(p.to(do[0].dtype), do, dv, D2)
        ds = p * (_across(v, do, D2) - d[None, :])
        dk = _along(ds.to(q[0].dtype), q, dk, D2)

    dk = dk[0] * factor, dk[1] * factor
    _store_gradient(dqkv, 1, cos, sin, start, first - start, end - start, dk, ROTATED, D, D1, D2)
    _store_gradient(dqkv, 2, cos, sin, start, first - start, end - start, dv, False, D, D1, D2)


def _parts(head_dim: int) -> tuple[int, int]:
    """The widths of both parts of a head; the second may be 0."""
    first = 1 << (head_dim.bit_length() - 1)
    return first, max(16, triton.next_power_of_2(head_dim - first)) if head_dim > first else 0


def _described(planes: Tensor, rows: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of [planes, P, d] for both parts, in tiles of ``rows`` rows."""
    shape, strides = list(planes.shape), list(planes.stride())
    first, second = (
        TensorDescriptor(planes, shape, strides, [1, rows, width or 16]) for width in _parts(planes.shape[2])
    )
    return first, second


_THREAD = threading.local()


def _make_context_current(device: torch.device) -> None:
    """Makes CUDA's context current in this thread, as the first torch kernel does.

    Triton 3.6 makes descriptors on the host before it looks for a context. In a thread that has not used CUDA
    yet, it finds none (``invalid device context``) if another thread has loaded the kernel. Autograd's
    threads on device 0 start in this state.
    """
    if not getattr(_THREAD, "current", False):
        torch.zeros(1, device=device)
        _THREAD.current = True


def _launch(
    kernel: Any,
    tile: Tile,
    packed: Tensor,
    described: tuple[TensorDescriptor, ...],
    tensors: tuple[Tensor, ...],
    *numbers: float,
    **more: Any,
) -> None:
    """Launches a kernel. The last of ``tensors`` is cu_seqlens."""
    _, heads, patches, d = packed.shape
    _make_context_current(packed.device)
    segments = tensors[-1].numel() - 1
    first, second = _parts(d)

    kernel[(patches // tile.own + segments, heads)](
        *described,
        *tensors,
        segments,
        d**-0.5 * math.log2(math.e),
        *numbers,
        OWN=tile.own,
        STEP=tile.step,
        D=d,
        D1=first,
        D2=second,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
        **more,
    )


def _attend(packed: Tensor, cu: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """[3, h, P, d] -> [P, h, d] and the base-2 log-sum-exp, fp32 [h, P rounded up to a multiple of 4]."""
    _, heads, patches, d = packed.shape
    out = packed.new_empty(patches, heads, d)
    # The size of a descriptor's rows must be a multiple of 16 bytes.
    lse = packed.new_empty(heads, triton.cdiv(patches, 4) * 4, dtype=torch.float32)
    planes = packed.flatten(0, 1)
    described = *_described(planes, tile.own), *_described(planes, tile.step)
    _launch(_forward, tile, packed, described, (out, lse, cu), lse.shape[1])
    return out, lse


Angles = tuple[Tensor, Tensor] | None
"""cos and sin of the rotation whose inverse is applied to gradients; None: there was no rotation."""


def _gradient_of_query(
    packed: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    cu: Tensor,
    angles: Angles,
    tile: Tile,
    delta: Tensor,
    dqkv: Tensor,
) -> None:
    """Fills delta, which has the shape of lse, and the query's third of dqkv [P, h, 3, d]."""
    planes = packed.flatten(0, 1)
    described = *_described(planes, tile.own), *_described(planes, tile.step)
    tensors = out, dout, lse, delta, dqkv, *(angles or (lse, lse)), cu
    numbers = lse.shape[1], packed.shape[3] ** -0.5
    _launch(_backward_query, tile, packed, described, tensors, *numbers, ROTATED=angles is not None)


def _gradient_of_key(
    packed: Tensor,
    dout: Tensor,
    lse: Tensor,
    cu: Tensor,
    angles: Angles,
    tile: Tile,
    delta: Tensor,
    dqkv: Tensor,
) -> None:
    """Fills the key's and value's thirds of dqkv [P, h, 3, d]."""
    planes = packed.flatten(0, 1)
    described = (
        *_described(planes, tile.own),
        *_described(planes, tile.step),
        *_described(dout.transpose(0, 1), tile.step),
    )
    statistics = (TensorDescriptor.from_tensor(x, [1, tile.step]) for x in (lse, delta))
    tensors = dqkv, *(angles or (lse, lse)), cu

    _launch(
        _backward_key,
        tile,
        packed,
        (*described, *statistics),
        tensors,
        packed.shape[3] ** -0.5,
        ROTATED=angles is not None,
    )


def _gradient(
    packed: Tensor, out: Tensor, dout: Tensor, lse: Tensor, cu: Tensor, angles: Angles, tiles: Tiles
) -> Tensor:
    """The gradient of query, key and value, [P, h, 3, d]."""
    _, heads, patches, d = packed.shape
    dqkv = packed.new_empty(patches, heads, 3, d)
    delta = torch.empty_like(lse)
    dout = dout.contiguous().view_as(out)
    _gradient_of_query(packed, out, dout, lse, cu, angles, tiles.query, delta, dqkv)
    _gradient_of_key(packed, dout, lse, cu, angles, tiles.key, delta, dqkv)
    return dqkv


def _pack_rotated(qkv: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> Tensor:
    """Applies RoPE to query and key: [P, h * 3 * d] -> [3, h, P, d]."""
    patches = qkv.shape[0]
    heads = qkv.shape[1] // (3 * head_dim)
    half = head_dim // 2
    packed = qkv.new_empty(3, heads, patches, head_dim)
    _pack[(triton.cdiv(patches, 32), heads)](
        qkv, packed, cos, sin, patches, HALF=half, TILE=triton.next_power_of_2(half), ROWS=32, num_warps=4
    )
    return packed


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, tiles: Tiles) -> Tensor:
        packed = torch.stack((query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))).contiguous()
        out, lse = _attend(packed, cu_seqlens, tiles.forward)
        ctx.save_for_backward(packed, out, lse, cu_seqlens)
        ctx.tiles = tiles
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        packed, out, lse, cu = ctx.saved_tensors
        dqkv = _gradient(packed, out, dout, lse, cu, None, ctx.tiles)
        return *dqkv.unbind(2), None, None


class _RotatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, head_dim: int, tiles: Tiles
    ) -> Tensor:
        packed = _pack_rotated(qkv, cos, sin, head_dim)
        out, lse = _attend(packed, cu_seqlens, tiles.forward)
        ctx.save_for_backward(packed, cos, sin, out, lse, cu_seqlens)
        ctx.tiles = tiles
        return out.flatten(1)

    @staticmethod
    def backward(ctx, dout: Tensor):
        packed, cos, sin, out, lse, cu = ctx.saved_tensors
        dqkv = _gradient(packed, out, dout, lse, cu, (cos, sin), ctx.tiles)
        return dqkv.flatten(1), None, None, None, None, None


def attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, tiles: Tiles = TILES) -> Tensor:
    """Softmax attention within segments, from every query to every key.

    Args:
        query, key, value: [P, heads, head_dim]; head_dim is a multiple of 8 from 16 to 128.
        cu_seqlens: int32 [segments + 1], covering all P patches; segments may be empty.

    Returns:
        [P, heads, head_dim].

    Raises:
        ValueError: the kernels do not support ``head_dim``.
    """
    _check(query.shape[2])
    return _Attention.apply(query, key, value, cu_seqlens, tiles)


def tower_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, head_dim: int, tiles: Tiles = TILES
) -> Tensor:
    """RoPE and softmax attention within segments.

    Args:
        qkv: [P, heads * 3 * head_dim], with query, key and value for each head: the output of Megatron-core's
            ``linear_qkv``.
        cos, sin: fp32 [P, head_dim / 2], contiguous, of each patch's angles.
        cu_seqlens: int32 [segments + 1], covering all P patches; segments may be empty.

    Returns:
        [P, heads * head_dim].

    Raises:
        ValueError: the kernels do not support ``head_dim``.
    """
    _check(head_dim)
    return _RotatedAttention.apply(qkv.contiguous(), cos, sin, cu_seqlens, head_dim, tiles)


def _check(head_dim: int) -> None:
    if not has_kernels(head_dim):
        raise ValueError(f"head_dim {head_dim} is not supported; valid: multiples of 8 from 16 to 128")
