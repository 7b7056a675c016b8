"""Fields of a run, commands and options of 0.1.0 that are gone, and what to do instead."""

from __future__ import annotations

ANSWERS = "the loss is still evaluated; answer a split with `megatron-vl generate --data SET --split val`"
VIDEOS = "videos are always presented as to the released models"
BUCKETS = "gradients are always reduced, and weights gathered, during the passes"

PATTERNS = "all matrices get lora.rank and lora.alpha; lora.adapter reads PEFT folders that have others"

ATTENTION = "set model.attention: auto takes the fastest kernels, reference none"

REMOVED_FIELDS = {
    "checkpoint.attempt": "leave it out: `checkpoint rollback` and `checkpoint restart-data` act once",
    "checkpoint.background": "checkpoints are always written while training continues",
    "checkpoint.branch": "steps that a roll-back abandoned are moved to abandoned/ in checkpoint.dir",
    "checkpoint.restart_data": "run `megatron-vl checkpoint restart-data RUN` before the start",
    "checkpoint.resume": "a run resumes if checkpoint.dir has a checkpoint; to begin anew, give another one",
    "checkpoint.step": "run `megatron-vl checkpoint rollback RUN STEP` before the start",
    "data.on_changed_blend": "a run continues with a changed blend, and names the change",
    "data.packing_buffer": "the packer chooses among 64 samples",
    "data.sample_timeout_s": "reading, encoding and decoding a sample may each take 300 seconds",
    "data.shuffle_block": "blocks of 16 samples are drawn; shuffle sorted input before it is converted",
    "eval.samples": ANSWERS,
    "eval.max_new_tokens": ANSWERS,
    "max_bad_steps": "a run stops after 10 skipped steps in a row",
    "lora.alpha_pattern": PATTERNS,
    "lora.exclude": "name what is adapted in lora.targets, if need be by a regular expression",
    "lora.rank_pattern": PATTERNS,
    "model.language_attention": ATTENTION,
    "model.vision_attention": ATTENTION,
    "model.window_attention": ATTENTION,
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

RATES = "times are predicted with the efficiencies in megatron_vl/estimate/gpus.json"
SPLIT = "the planned split does not depend on the number of GPUs"
ROWS = "data.seq_len and data.max_patches describe the rows; the rest is assumed"
DRY_RUN = "`megatron-vl train --dry-run --config RUN.yaml` makes every check of a start"
EXPORTED = "give the run or the adapters as --trained; they are exported first"
REMOVED_OPTIONS = {
    "bench --calibrate": RATES,
    "bench --calibration": RATES,
    "bench --distinct-rows": "at most 64 random rows are drawn, in turn",
    "convert --gpus": SPLIT,
    "doctor --checkpoint": "`megatron-vl verify DIR` compares weights with their hashes",
    "doctor --config": DRY_RUN,
    "doctor --data": DRY_RUN,
    "doctor --world-size": DRY_RUN,
    "evaluate --adapter": EXPORTED,
    "evaluate --no-scores": "`megatron-vl verify` compares tensors, `megatron-vl parity` losses and layers",
    "plan --calibration": RATES,
    "plan --data": ROWS,
    "plan --gpus-per-node": "NVLink is taken to connect 8 GPUs",
    "plan --keep": "8 layouts are shown",
    "plan --picture": "a step is a closed form; the table says how long stages wait",
    "plan --rows": ROWS,
    "plan --search": "layouts are always searched; the run's own comes first",
    "split --gpus": SPLIT,
}
"""Command and option -> what to do instead."""

REMOVED_COMMANDS = {"card": "run `python -m benchmarks.card` in a checkout"}
"""Words of the command line -> what to do instead."""
