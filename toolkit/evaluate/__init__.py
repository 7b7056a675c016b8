"""``megatron-vl evaluate``: compares checkpoints with their original, from tensors to VLMEvalKit's scores.

:mod:`evaluation` starts :mod:`vlmevalkit_adapter` in a :mod:`sandbox`, in which VLMEvalKit's own program asks
the checkpoints (:mod:`checkpoint_model`).
"""
