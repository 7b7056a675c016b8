"""``megatron-vl evaluate``: compares a converted checkpoint with its original, from tensors
to VLMEvalKit's scores.

:mod:`comparison` starts :mod:`worker` processes, which hold VLMEvalKit and the model; :mod:`gates` compares
their output, and :mod:`report` shows it.
"""
