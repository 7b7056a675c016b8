"""``megatron-vl evaluate``: compares checkpoints with their original, from tensors to VLMEvalKit's scores."""
