"""Checks that need CUDA, Transformer Engine and NCCL; run by hand on a GPU machine, figures go into
docs/log/2026-11.md."""
