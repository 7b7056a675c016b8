"""``megatron-vl data``: converts conversation files into data sets, verifies them, and shows what they
hold."""
