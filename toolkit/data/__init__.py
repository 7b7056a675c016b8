<<<<<<< HEAD
"""``megatron-vl data convert | merge | verify``: converts conversation files into data sets and
verifies data sets."""
=======
"""``megatron-vl data``: converts conversation files into data sets, verifies them, and shows what they
hold."""
>>>>>>> main
