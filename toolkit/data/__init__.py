"""``megatron-vl data convert | verify``: conversation files into data sets."""
