"""Speed, memory and time by part of real-size models with random weights; a peer in the same harness.

    torchrun --nproc-per-node 8 -m toolkit.bench --hf CONFIG_OR_FOLDER --rows images,text [--parallel.tp 2
    ...]

:mod:`.measure` measures the trainer's own model, schedule, DDP, optimizer and feed, :mod:`.peer` a Hugging
Face model under FSDP2; both take their rows from :mod:`.workload` and write their figures with
:mod:`.report`.
"""
