"""``megatron-vl checkpoint show | verify``: describes a run's checkpoints and checks their hashes."""
