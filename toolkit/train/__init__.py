"""``megatron-vl train``: starts the ranks of a training, or is one of them; or says what the training would
be."""
