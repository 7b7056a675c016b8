"""``megatron-vl data convert | merge | verify``: converts conversation files into data sets and
verifies data sets."""
