"""The one table of names that are answered with what to give instead.

It has fields of a run, commands and their options of 0.1.0 that are gone, and names that other programs use.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from os.path import commonprefix

ANSWERS = "the loss is still evaluated; answer a split with `megatron-vl generate --eval.split val`"
VIDEOS = "videos are always presented as to the released models"
BUCKETS = "gradients are always reduced, and weights gathered, during the passes"
PATTERNS = "all matrices get lora.rank and lora.alpha; lora.adapter reads PEFT folders that have others"
ATTENTION = "set model.attention: auto takes the fastest kernels, reference none"

RATES = "times are predicted with the efficiencies in megatron_vl/estimate/gpus.json"
SPLIT = "the planned split does not depend on the number of GPUs"
ROWS = "data.seq_len and data.max_patches describe the rows; the rest is assumed"
DRY_RUN = "`megatron-vl train --dry-run --config RUN.yaml` makes every check of a start"
EXPORTED = "give the run or the adapters as --trained; they are exported first"
TEXT_ONLY = "the result is printed as text, and the exit code tells success"
THREADS = "one thread a core is used, at most 8"
CONSTANT_STEPS = "2 steps warm up, and the parts of 2 more are timed"
SHARDS = "shards have at most 1,000 samples and 256 MiB of media"
LOOK = "convert the first records (`--input <(head -200 FILE)`), and look at them with `data show`"
DEMO = "the demo has 4 ranks, TP2 x PP2"
PIXELS = "the checkpoint's image and video processors decide, as in the released evaluation"

EPOCHS = "set epochs"
MICRO_BATCH = "set data.seq_len and global_batch_size; a micro-batch is one row of packed samples"
BATCH = "set global_batch_size, the rows of a step over all ranks"
ZERO = "set parallel.distributed_optimizer (ZeRO-1), parallel.tp and parallel.pp"
RATE = "set optimizer.lr"
FOLDER = "set checkpoint.dir"
MODEL = "set model.hf"
DATA = "set data.path, a folder written by `megatron-vl data convert`"
LENGTH = "set data.seq_len"
RECOMPUTE = "set recompute.language and recompute.vision"

REMOVED = {
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
    "parallel.tp_comm_overlap": "leave it out: collectives beside products made steps 4 % slower",
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
    # Options, with their command.
    "bench --calibrate": RATES,
    "bench --calibration": RATES,
    "bench --data": "give --data.path",
    "bench --distinct-rows": "at most 64 random rows are drawn, in turn",
    "data convert --dataset": "name the data sets of an index as `--input dataset_info.json:NAME,NAME`",
    "data convert --dry-run": LOOK,
    "data convert --force": "remove the folder --out",
    "data convert --json": "OUT/report.json has the counts",
    "data convert --max-megapixels": "images and frames have at most 128 megapixels; shrink larger ones",
    "data convert --processor": "run `megatron-vl data index` after the conversion",
    "data convert --samples-per-shard": SHARDS,
    "data convert --shard": "`--part I/N` writes a data set of its own; OUT with all parts is one data set",
    "data convert --shard-mb": SHARDS,
    "data index --json": "`megatron-vl data show --json` has the numbers",
    "data index --shard": "convert the data with --part, and index each part",
    "data index --split": "all splits are indexed",
    "data verify --json": "the exit code is 1 if a shard differs, and each one is named on a line",
    "bench --gpus": "give --nproc-per-node",
    "bench --hf": "give --model.hf",
    "bench --part-steps": CONSTANT_STEPS,
    "bench --processes": "give --nproc-per-node, and --platform cpu on a machine with GPUs",
    "bench --rows": "give --data.path: a data set, synthetic:images or synthetic:text; or none",
    "bench --warm-up": CONSTANT_STEPS,
    "checkpoint show --json": "read STEP/run.json, which is JSON",
    "checkpoint verify --json": TEXT_ONLY,
    "convert --json": TEXT_ONLY,
    "convert --workers": THREADS,
    "demo --pp": DEMO,
    "demo --ranks": DEMO,
    "demo --tp": DEMO,
    "convert --gpus": SPLIT,
    "doctor --checkpoint": "`megatron-vl verify DIR` compares weights with their hashes",
    "doctor --config": DRY_RUN,
    "doctor --data": DRY_RUN,
    "doctor --world-size": DRY_RUN,
    "evaluate --adapter": EXPORTED,
    "evaluate --dtype": "all models have the data type of the original",
    "evaluate --judge-base-url": "write it after the judge's name, as in --judge NAME@http://localhost:8000/v1",
    "evaluate --json": "read report.json in --out",
    "evaluate --lmu-data": "set the variable LMUData, or give the path of a table",
    "evaluate --max-pixels": PIXELS,
    "evaluate --min-pixels": PIXELS,
    "evaluate --no-scores": "`megatron-vl verify` compares tensors, `megatron-vl parity` losses and layers",
    "evaluate --processes": "as many processes run as the GPUs hold models",
    "evaluate --video-max-frames": PIXELS,
    "export --json": TEXT_ONLY,
    "export --workers": THREADS,
    "generate --data": "give --data.path and --out",
    "generate --samples": "all samples are answered, line by line; stop it when there are enough",
    "generate --show-thinking": "what the model thinks goes to standard error, its answer to standard output",
    "generate --split": "give --eval.split",
    "merge --json": TEXT_ONLY,
    "merge --workers": THREADS,
    "parity --family": "give the family's name as --hf",
    "parity --image": "images of the package are compared",
    "parity --json": TEXT_ONLY,
    "parity --platform": "a GPU is used if there is one; without it, CUDA_VISIBLE_DEVICES= takes the CPU",
    "parity --reference-device": "transformers runs on a GPU that holds it, else on CPU",
    "parity --steps": "one forward and backward pass is compared; tests compare trainings",
    "plan --calibration": RATES,
    "plan --data": ROWS,
    "plan --gpus-per-node": "NVLink is taken to connect 8 GPUs",
    "plan --keep": "8 layouts are shown",
    "plan --picture": "a step is a closed form; the table says how long stages wait",
    "plan --rows": ROWS,
    "plan --search": "layouts are always searched; the run's own comes first",
    "split --gpus": SPLIT,
    "split --json": TEXT_ONLY,
    "split --workers": THREADS,
    "train --job-id": "give runs on the same nodes different ports: --master-addr HOST:PORT",
    "train --json": "--dry-run prints text; `megatron-vl plan --json` has the figures",
    "train --master-port": "give --master-addr HOST:PORT",
    "verify --json": TEXT_ONLY,
    "verify --show": "ten tensors that differ are named",
    "verify --workers": THREADS,
    # Commands.
    "card": "run `python -m benchmarks.card` in a checkout",
    "data inspect": "`megatron-vl data show --sample KEY` shows one sample",
    "data merge": "`data convert --part I/N` writes data sets; give the folder of all of them as data.path",
    "data stats": "`megatron-vl data show` counts all samples",
    # Fields of a run as other programs call them.
    "batch_size": BATCH,
    "bf16": "dtype is bfloat16 unless it is set",
    "dataset": DATA,
    "deepspeed": ZERO,
    "fsdp": ZERO,
    "gradient_accumulation_steps": BATCH,
    "gradient_checkpointing": RECOMPUTE,
    "learning_rate": RATE,
    "lora_alpha": "set lora.alpha",
    "lora_rank": "set lora.rank",
    "max_length": LENGTH,
    "max_seq_length": LENGTH,
    "max_steps": "set steps",
    "micro_batch_size": MICRO_BATCH,
    "model_name_or_path": MODEL,
    "num_epochs": EPOCHS,
    "num_train_epochs": EPOCHS,
    "output_dir": FOLDER,
    "per_device_train_batch_size": MICRO_BATCH,
    "pipeline_model_parallel_size": "set parallel.pp",
    "resume_from_checkpoint": "a run resumes by itself if checkpoint.dir has a checkpoint",
    "save_steps": "set checkpoint.interval",
    "seq_length": LENGTH,
    "tensor_model_parallel_size": "set parallel.tp",
    "train_iters": "set steps",
    "warmup_ratio": "set optimizer.warmup_steps",
}
for _command in ("convert", "split"):
    for _size in ("tp", "pp", "vpp", "layers", "ep", "etp"):
        REMOVED[f"{_command} --{_size}"] = f"give --parallel.{_size}, or --config with the YAML of a run"


def explain_unknown(name: str, known_names: Sequence[str], command: str = "") -> str:
    """What to give instead of an unknown field, option or command, in one line.

    Args:
        name: a dotted field, the word of an option such as ``--learning-rate``, or a command.
        known_names: the names that are valid here, spelled in the same way.
        command: the command whose option it is.
    """
    plain_name = name.removeprefix("--").replace("-", "_")
    advice = REMOVED.get(f"{command} {name}") or REMOVED.get(plain_name) or REMOVED.get(name)
    if advice:
        return f"there is no {name}: {advice}"
    if name.endswith((".yaml", ".yml")):
        return f"unexpected word {name}; did you mean --config {name}?"
    # A name may be cut short (nproc), or lack its section (lr for optimizer.lr).
    near = [known for known in known_names if len(commonprefix([name, known])) >= max(4, len(name) - 1)]
    by_leaf = {known.rpartition(".")[2]: known for known in known_names}
    leaf = name.removeprefix("--").rpartition(".")[2]
    if not near:
        near = [by_leaf[leaf]] if leaf in by_leaf else get_close_matches(name, known_names, 3)
    near = near or [by_leaf[each] for each in get_close_matches(leaf, by_leaf, 3)]
    if near:
        return f"{name} is unknown; did you mean {' or '.join(near[:3])}?"
    in_section = [known for known in known_names if known.startswith(f"{name.partition('.')[0]}.")]
    return f"{name} is unknown; valid: {', '.join(in_section or known_names)}"
