"""``megatron-vl convert | split | merge | export | verify``: converts weights between all layouts."""
