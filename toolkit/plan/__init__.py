"""``megatron-vl plan``: finds a layout, or predicts a given one."""
