"""``megatron-vl data``: converts conversation files to data sets, verifies them, and shows their content."""
