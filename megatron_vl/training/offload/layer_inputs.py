"""Inputs of recomputed layers in host memory (``recompute.offload_inputs``).

With full recompute, a layer keeps only its input for the backward pass. Here, autograd keeps a copy in pinned
host memory instead. An input leaves while its layer runs forward, and comes back while the next layer runs
backward, so that the copies cost time only where a layer takes less time than they do. The idea is that of
Unsloth's gradient checkpointing and of torchtune's ``OffloadActivations``.

All copies run on one stream of their own:

- A copy to the host starts when the input is complete. The layer after its own waits for the end of the copy
  before it starts, and the memory of the input is free from then on. So the device holds only one input at
  a time, although the host launches kernels far ahead.
- A copy back starts when its memory is free, which is before the backward pass of the layer above.
- Host memory is reused in the order of the stream, so a copy never overwrites what has not come back yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from megatron_vl.platform import Platform
from megatron_vl.training.offload.state_chunks import allocate_host_bytes

PIECE_BYTES = 16 * 2**20
"""Size of a piece of host memory. Pieces of one size suit inputs of any length, and the memory that torch
pins, whose sizes are powers of two."""
_COPY_PRIORITY = -3
"""Priority of the stream of copies, which no other stream has. The copies of optimizer state have -1 and -2
(:mod:`megatron_vl.training.offload.chunked_step` says why they need their own)."""


class HostPieces:
    """Pieces of host memory and the stream of copies. They grow to what is in flight at once.

    Args:
        use: what the memory is for, with what to do if it cannot be pinned.
    """

    def __init__(self, platform: Platform, use: str) -> None:
        self.is_pinned, self.use = platform.name == "cuda", use
        self.copy_stream = torch.cuda.Stream(priority=_COPY_PRIORITY)
        self.free_pieces: list[Tensor] = []
        """Pieces that hold nothing, uint8 [PIECE_BYTES] each."""
        self.num_pieces = 0

    def take_pieces(self, count: int) -> list[Tensor]:
        """Pieces for one tensor. Raises MemoryError if too little can be pinned."""
        while len(self.free_pieces) < count:
            held_gib = self.num_pieces * PIECE_BYTES / 2**30
            refusal = f"host memory could not be pinned after {held_gib:.1f} GiB, for {self.use}"
            self.free_pieces.append(allocate_host_bytes(PIECE_BYTES, self.is_pinned, refusal))
            self.num_pieces += 1
        return [self.free_pieces.pop() for _ in range(count)]


class LayerInputOffload(HostPieces):
    """Moves the inputs of the layers of transformer blocks to host memory and back."""

    def __init__(self, platform: Platform) -> None:
        super().__init__(platform, "recompute.offload_inputs; set it to false")
        # The forward pass of a block that runs now.
        self._hooks = contextlib.ExitStack()
        self._first_moved = self._num_layers = self._num_inputs = 0
        self._last_input: HostInput | None = None
        self._input_complete = torch.cuda.Event()

    def follow(self, block: TransformerBlock) -> None:
        """Moves what the layers of ``block`` keep in its forward passes from now on."""
        block.register_forward_pre_hook(self._begin_pass)
        block.register_forward_hook(self._end_pass, always_call=True)

    def _begin_pass(self, block: TransformerBlock, *_: Any) -> None:
        # The first input of a later pipeline stage is its message, which the schedule keeps on the device.
        self._first_moved = 0 if block.pre_process else 1
        self._num_layers = len(block.layers)
        self._num_inputs = 0
        self._input_complete.record(torch.cuda.current_stream())
        hooks = torch.autograd.graph.saved_tensors_hooks(
            self._pack_tensor, lambda packed: packed if isinstance(packed, Tensor) else packed.to_device()
        )
        self._hooks.enter_context(hooks)

    def _end_pass(self, *_: Any) -> None:
        self._hooks.close()
        self._last_input = None

    def _pack_tensor(self, tensor: Tensor) -> Tensor | HostInput:
        """What autograd keeps of a tensor that the block saves.

        Each layer saves its input [S, 1, H], rotary angles, which all layers share, and a mask. What comes
        after the inputs of all layers belongs to the final norm. An output that is kept as it is would keep
        its own graph alive, hence ``detach``.
        """
        if tensor.dim() != 3:
            return tensor.detach()
        input_number = self._num_inputs
        self._num_inputs += 1
        packed_tensor: Tensor | HostInput = tensor.detach()
        compute_stream = torch.cuda.current_stream()
        if self._first_moved <= input_number < self._num_layers:
            self.copy_stream.wait_event(self._input_complete)  # its kernels may still be running
            packed_tensor = self._last_input = HostInput(self, tensor, self._last_input)
            compute_stream.wait_event(packed_tensor.copied_event)  # or its memory is reused too early

        # The layer has been launched by now: the next one waits for the copy, and its input is complete.
        self._input_complete.record(compute_stream)
        return packed_tensor


def offload_layer_inputs(modules: Sequence[nn.Module], platform: Platform) -> LayerInputOffload:
    """Moves the inputs of the layers of all blocks of ``modules`` that are recomputed to host memory."""
    offload = LayerInputOffload(platform)
    for module in modules:
        for block in module.modules():
            if isinstance(block, TransformerBlock) and block.config.recompute_granularity == "full":
                offload.follow(block)
    return offload


class HostInput:
    """The copy of a tensor in host memory.

    Args:
        tensor: the tensor on the device, contiguous.
        previous: the copy that is needed next after this one; None if there is none.
    """

    def __init__(self, offload: HostPieces, tensor: Tensor, previous: HostInput | None) -> None:
        self.offload, self.previous = offload, previous
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.copied_event: Any = torch.cuda.Event()
        self._device_tensor: Tensor | None = None

        tensor_pieces = _pieces_of(tensor)
        self._host_pieces = offload.take_pieces(len(tensor_pieces))
        self._copy(tensor_pieces, self._host_pieces)

    def __del__(self) -> None:
        """Gives the host memory back when autograd is done with it, with or without a backward pass."""
        # Fetched for a backward pass that has failed: the copy still reads this host memory.
        if self._device_tensor is not None:
            torch.cuda.current_stream().wait_event(self.copied_event)
        self.offload.free_pieces += self._host_pieces

    def _copy(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        copy_stream = self.offload.copy_stream
        with torch.cuda.stream(copy_stream):
            for source, target in zip(sources, targets, strict=True):
                num_bytes = min(source.numel(), target.numel())
                target[:num_bytes].copy_(source[:num_bytes], non_blocking=True)
            self.copied_event.record(copy_stream)

    def fetch(self) -> None:
        if self._device_tensor is None:
            self._device_tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            # Kernels that were launched before may still use this memory.
            self.offload.copy_stream.wait_stream(torch.cuda.current_stream())
            self._copy(self._host_pieces, _pieces_of(self._device_tensor))

    def to_device(self) -> Tensor:
        """The tensor on the device. The copy of the next one begins."""
        self.fetch()
        torch.cuda.current_stream().wait_event(self.copied_event)  # the device waits, not the host
        if self.previous is not None:
            self.previous.fetch()

        device_tensor, self._device_tensor = self._device_tensor, None
        assert device_tensor is not None
        return device_tensor


def _pieces_of(tensor: Tensor) -> list[Tensor]:
    return list(tensor.detach().view(-1).view(torch.uint8).split(PIECE_BYTES))
