"""Optimizer state in chunks of memory, on the GPU or in host memory.

The state of a share of the parameters (``optimizer.offload_fraction``) lies in chunks of pinned host memory.
For an update, each chunk is copied to the GPU, the optimizer's own Adam kernel runs on it there, and the
chunk is copied back. Copies in both directions and the kernel overlap. Gradients stay on the GPU, and the
gradient norm is known before the first chunk is updated. So all weights are bitwise those of a run without
offload, for every fraction.

A chunk holds 10 bytes for each parameter: both moments in fp32, and the 16 bits of the master weight that
the model's bf16 weight lacks (:mod:`megatron_vl.kernels.optimizer.master_halves`). A model in fp32 is its own
master copy, and its chunks hold only the moments.

With moments in bf16 (``optimizer.moments_dtype``), a chunk holds 6 bytes for each parameter. Then all state
is in chunks, because the optimizers themselves only hold fp32. Chunks that are not offloaded stay on the GPU.
A kernel of this project (:mod:`megatron_vl.kernels.optimizer.adam`) updates them in place of the optimizer's
own.

Megatron-core's optimizer keeps its parameters, so that its norm, its clipping and its groups work as before.
Parameters whose state is in chunks have no storage between two updates.

:mod:`.layer_inputs` is apart from this: it moves inputs of layers, and no state.

On the platform ``cpu``, the same code copies between buffers that are all in host memory.
"""
