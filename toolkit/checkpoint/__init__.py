"""``megatron-vl checkpoint show | verify``: what is in a run's checkpoint, and whether it is whole."""
