"""``megatron-vl evaluate``: a converted checkpoint against its origin, from tensors to benchmark scores by
VLMEvalKit.

:mod:`comparison` starts :mod:`worker` processes (VLMEvalKit and the model live there), :mod:`gates` compares
what they wrote, and :mod:`report` shows it.
"""
