"""``megatron-vl data convert | verify``: converts conversation files into data sets and
verifies data sets."""
