"""``megatron-vl checkpoint``: describes, checks and rolls back a run's checkpoints, and restarts its data."""
