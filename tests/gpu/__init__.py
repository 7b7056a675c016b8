"""Checks that need CUDA, Transformer Engine and NCCL. Run them by hand; their figures go into docs/log/."""
