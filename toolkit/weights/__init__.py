"""``megatron-vl convert | split | merge | export | verify``: weights between Hugging Face and Megatron, in
any layout."""
