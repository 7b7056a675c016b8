"""Optimizer state in chunks, in host memory, streamed through the GPU when weights are updated, or on the
GPU.

The state of a share of the parameters (``optimizer.offload_fraction``) lies in chunks of pinned host memory.
To update, each chunk is copied to the GPU, the optimizer's own Adam kernel runs on it there, and it is copied
back; copies in both directions and the kernel overlap. So the arithmetic is that of a run without offload,
and all bits are, for every fraction: gradients stay on the GPU, and clipping knows the norm before the first
chunk is updated.

A chunk holds 10 bytes for each parameter: both moments in fp32, and the 16 bits of the master weight that
the model's bf16 weight lacks (:mod:`megatron_vl.kernels.master_halves`). A model in fp32 is its own master,
and a chunk holds the moments alone.

With moments in bf16 (``optimizer.moments_dtype``), these are 6 bytes, and all state is in chunks, because the
optimizers know fp32 alone. Chunks that are not offloaded stay on the GPU. One kernel of ours updates a chunk
(:mod:`megatron_vl.kernels.adam`), in place of the optimizer's own.

Megatron-core's optimizer keeps its parameters as they are, so that its norm, its clipping and its groups work
as before. Those whose state is in chunks have no storage between two updates.

On the platform ``cpu`` the same code copies between buffers that are all in host memory.
"""
