"""The one table of names that are answered with what to give instead.

It has fields of a run and commands of 0.1.0 that are gone, and names that other programs use.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from os.path import commonprefix

MODEL = "set model.hf"
FOLDER = "set checkpoint.dir"
DATA = "set data.path: a file of records, or a folder written by `megatron-vl data convert`"
_ADVICE_BY_NAMES = {
    # Fields of a run, by their dotted name.
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
    "eval.samples, eval.max_new_tokens": (
        "the loss is still evaluated; answer a split with `megatron-vl generate --eval.split val`"
    ),
    "max_bad_steps": "a run stops after 10 skipped steps in a row",
    "lora.alpha_pattern, lora.rank_pattern": (
        "all matrices get lora.rank and lora.alpha; lora.adapter reads PEFT folders that have others"
    ),
    "lora.exclude": "name what is adapted in lora.targets, if need be by a regular expression",
    "model.language_attention, model.vision_attention, model.window_attention": (
        "set model.attention: auto takes the fastest kernels, reference none"
    ),
    "parallel.bucket_size, parallel.overlap_grad_reduce, parallel.overlap_param_gather": (
        "gradients are always reduced, and weights gathered, during the passes"
    ),
    "parallel.tp_comm_overlap": "leave it out: collectives beside products made steps 4 % slower",
    "data.video_positions, data.video_prompt": "videos are always presented as to the released models",
    "profile.dir": "traces go to profile/ in checkpoint.dir",
    "vision.backward_patches": "set vision.patches_a_call",
    "vision.encode_patches": "set vision.patches_a_call; calls without activations take four times as many",
    "vision.keep_patches": "the tower runs its images forward a second time; keeping them gained 0.5 %",
    "wandb.dir": "set the variable WANDB_DIR",
    "wandb.entity": "set the variable WANDB_ENTITY",
    "wandb.mode": "set the variable WANDB_MODE",
    "wandb.name": "set the variable WANDB_NAME",
    # Commands.
    "card": "run `python -m benchmarks.card` in a checkout",
    "data inspect": "`megatron-vl data show --sample KEY` shows one sample",
    "data merge": "`data convert --part I/N` writes data sets; give the folder of all of them as data.path",
    "data stats": "`megatron-vl data show` counts all samples",
    "data verify": "compare `sha256sum` of the shards with .nv-meta/convert.json of the data set",
    # Fields of a run as other programs call them.
    "batch_size, gradient_accumulation_steps": "set global_batch_size, the rows of a step over all ranks",
    "bf16": "dtype is bfloat16 on GPUs unless it is set",
    "checkpoint": "set checkpoint.dir, the run's folder, or model.checkpoint, the weights to start from",
    "cutoff_len, max_length": "set data.seq_len",
    "data, dataset": DATA,
    "deepspeed, fsdp": "set parallel.distributed_optimizer (ZeRO-1), parallel.tp and parallel.pp",
    "eval_steps": "set eval.interval",
    "finetuning_type, train_type": "set lora.rank to train adapters; without it, the weights are trained",
    "gradient_checkpointing": "set recompute.language and recompute.vision",
    "gpus": "give --nproc-per-node",
    "learning_rate": "set optimizer.lr",
    "max_grad_norm": "set optimizer.clip_grad",
    "micro_batch_size, per_device_train_batch_size": (
        "set data.seq_len and global_batch_size; a micro-batch is one row of packed samples"
    ),
    "model, model_name_or_path": MODEL,
    "logging_steps": "set log.interval",
    "lr_scheduler_type": "set optimizer.schedule",
    "num_train_epochs": "set epochs",
    "output_dir": FOLDER,
    "pipeline_model_parallel_size": "set parallel.pp",
    "quantization_bit": "QLoRA is not supported; set lora.rank to adapt weights in bfloat16",
    "report_to": "set log.tensorboard or wandb.project; metrics.jsonl is always written",
    "resume_from_checkpoint": "a run resumes by itself if checkpoint.dir has a checkpoint",
    "save_steps": "set checkpoint.interval",
    "save_total_limit": "set checkpoint.keep",
    "tensor_model_parallel_size": "set parallel.tp",
    "train_iters": "set steps",
    "val_size": "give --val-fraction",
    "warmup_ratio": "set optimizer.warmup_steps",
}
REMOVED = {name: advice for names, advice in _ADVICE_BY_NAMES.items() for name in names.split(", ")}

OWN_OPTIONS = {MODEL: "--hf", FOLDER: "--out", DATA: "--input"}
"""Options of single commands for what other commands read from a field of a run."""


def explain_unknown(name: str, known_names: Sequence[str], words_before: Sequence[str] = ()) -> str:
    """What to give instead of an unknown field, option or command, in one line.

    Args:
        name: a dotted field, the word of an option such as ``--learning-rate``, or a command.
        known_names: the names that are valid here, spelled in the same way.
        words_before: the words of the command line before it.
    """
    flags = [word.partition("=")[0] for word in words_before if word.startswith("--")]
    if flags[-1:] == ["--data.path"] and not name.startswith("--"):
        return (
            f"--data.path takes one path, and {name} is another: make one data set of several files with"
            " `megatron-vl data convert --input FILE FILE --out DIR`, or write a blend of data sets into the"
            " run's YAML, as a list of {path, weight}"
        )
    if advice := REMOVED.get(name.removeprefix("--").replace("-", "_")) or REMOVED.get(name):
        if (own_option := OWN_OPTIONS.get(advice)) in known_names:
            advice = f"give {own_option}"
        return f"there is no {name}: {advice}"
    if name.endswith((".yaml", ".yml")):
        return f"unexpected word {name}; did you mean --config {name}?"
    if known_names[0].startswith("--") and not name.startswith("-"):
        return f"unexpected word {name}: a value follows the name of its option, as in --model.hf DIR"
    if in_section := [known for known in known_names if known.startswith(f"{name}.")]:
        return f"{name} is a section; give its fields, such as {' or '.join(in_section[:3])}"
    # A name may be cut short (nproc), or lack its section (lr for optimizer.lr).
    near = [known for known in known_names if len(commonprefix([name, known])) >= max(4, len(name) - 1)]
    by_leaf = {known.rpartition(".")[2]: known for known in known_names}
    leaf = name.removeprefix("--").rpartition(".")[2]
    near = near or ([by_leaf[leaf]] if leaf in by_leaf else get_close_matches(name, known_names, 3))
    if near := near or [by_leaf[each] for each in get_close_matches(leaf, by_leaf, 3)]:
        return f"{name} is unknown; did you mean {' or '.join(near[:3])}?"
    valid = [known for known in known_names if known.startswith(f"{name.partition('.')[0]}.")] or known_names
    return f"{name} is unknown" + (f"; valid: {', '.join(valid)}" if len(valid) < 40 else "")
