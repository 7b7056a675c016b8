"""``megatron-vl plan``: lists the layouts of a model that fit."""
