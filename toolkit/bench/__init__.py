"""Measures speed, memory, and the time of each part of a step, for real-size models with random weights.

    torchrun --nproc-per-node 8 -m toolkit.bench --hf CONFIG_OR_FOLDER --rows images,text

:mod:`.measure` measures the trainer's own model, schedule, DDP, optimizer and feed, takes its rows
from :mod:`.workload` and writes its figures with :mod:`.report`. ``benchmarks.fsdp2`` does so with a Hugging
Face model under FSDP2.
"""
