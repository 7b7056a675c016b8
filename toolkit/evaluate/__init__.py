"""``megatron-vl evaluate``: compares a converted checkpoint with its original, from tensors
to VLMEvalKit's scores.

:mod:`evaluation` starts processes of :mod:`vlmevalkit_adapter` in a :mod:`sandbox`, in which VLMEvalKit asks
the checkpoints (:mod:`checkpoint_model`); :mod:`gates` compares their answers, and :mod:`report` shows it.
"""
