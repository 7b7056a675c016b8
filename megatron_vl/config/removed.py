"""Fields of a run, commands and options of 0.1.0 that are gone, and what to do instead."""

from __future__ import annotations

ANSWERS = "the loss is still evaluated; answer a split with `megatron-vl generate --data SET --split val`"
VIDEOS = "videos are always presented as to the released models"
BUCKETS = "gradients are always reduced, and weights gathered, during the passes"

REMOVED_FIELDS = {
    "eval.samples": ANSWERS,
    "eval.max_new_tokens": ANSWERS,
    "max_bad_steps": "a run stops after 10 skipped steps in a row",
    "parallel.bucket_size": BUCKETS,
    "parallel.overlap_grad_reduce": BUCKETS,
    "parallel.overlap_param_gather": BUCKETS,
    "data.video_positions": VIDEOS,
    "data.video_prompt": VIDEOS,
    "profile.dir": "traces go to profile/ in checkpoint.dir",
    "vision.backward_patches": "set vision.patches_a_call",
    "vision.encode_patches": "set vision.patches_a_call; calls without activations take four times as many",
    "vision.keep_patches": "the tower runs its images forward a second time; keeping them gained 0.5 %",
    "wandb.dir": "set the variable WANDB_DIR",
    "wandb.entity": "set the variable WANDB_ENTITY",
    "wandb.mode": "set the variable WANDB_MODE",
    "wandb.name": "set the variable WANDB_NAME",
}
"""Dotted name -> what to do instead."""

RATES = "times are predicted with the rates of the package, measured on H200"
REMOVED_OPTIONS = {
    "bench --calibrate": RATES,
    "bench --calibration": RATES,
    "bench --distinct-rows": "at most 64 random rows are drawn, in turn",
    "plan --calibration": RATES,
}
"""Command and option -> what to do instead."""

REMOVED_COMMANDS = {"card": "run `python -m benchmarks.card` in a checkout"}
"""Words of the command line -> what to do instead."""
