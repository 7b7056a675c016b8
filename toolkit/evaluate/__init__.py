"""``megatron-vl evaluate``: compares a converted checkpoint with its original, from tensors
to VLMEvalKit's scores.

:mod:`comparison` starts processes of :mod:`adapter` in a :mod:`sandbox`, in which VLMEvalKit asks the
checkpoints (:mod:`model`); :mod:`gates` compares their answers, and :mod:`report` shows it.
"""
