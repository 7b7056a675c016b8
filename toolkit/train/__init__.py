"""``megatron-vl train``: starts the ranks of a run, acts as one of them, or prints its plan."""
