"""Checks that need CUDA, Transformer Engine and NCCL. Run them by hand; figures go into benchmarks/log/."""
