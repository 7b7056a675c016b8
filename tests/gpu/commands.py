"""Runs the commands around a training on real GPUs.

These are a dry run, trainings with validation and with optimizer state in host memory, generate and evaluate.

    python -m tests.gpu.commands --ranks 2 [--out FOLDER] [--platform cpu]

It uses small checkpoints with the released head dimensions and synthetic images. `evaluate` distributes its
questions over the GPUs; it is left out if VLMEvalKit cannot be imported. The program prints one line per
check and returns exit code 1 if one fails.
"""

from __future__ import annotations

import base64
import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from converters.convert import convert_weights, export_weights
from tests.gpu.parity import MOE_SIZES, SIZES
from tests.gpu.results import Results, option_parser, work_folders
from tests.support.tiny_run import metrics, torchrun
from toolkit.common.hf_loading import load_hf_model, load_hf_processor
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint

COLOURS = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (40, 60, 200), "grey": (128, 128, 128)}
QUESTION = "What is in this picture?"
NEW_TOKENS = 12
RUN = """
model: {{hf: {hf}, checkpoint: {shards}}}
data: {{path: {data}, seq_len: 1024, num_workers: 1}}
parallel: {{tp: {ranks}, sequence_parallel: {parallel}}}
eval: {{split: train, interval: 2, rows: 2}}
checkpoint: {{dir: {run}, interval: 4}}
platform: {platform}
dtype: {dtype}
steps: 4
global_batch_size: 4
"""


def image(folder: Path, name: str) -> Path:
    """A gradient into one colour."""
    path = folder / f"{name}.png"
    ramp = Image.linear_gradient("L").resize((196, 140))
    Image.merge("RGB", [ramp.point(lambda v, c=channel: v * c // 255) for channel in COLOURS[name]]).save(
        path
    )
    return path


def write_inputs(folder: Path) -> None:
    """Images, conversations about them and a table of questions."""
    media = folder / "media"
    media.mkdir()
    (folder / "lmu").mkdir()
    rows, conversations = [], []
    for number, name in enumerate(COLOURS):
        path = image(media, name)
        encoded = base64.b64encode(path.read_bytes()).decode()
        rows += [
            [2 * number + i, encoded, f"Which colour is it? {i}", *COLOURS, "ABCD"[number]] for i in range(2)
        ]
        turns = [
            {"from": "human", "value": f"<image>\n{QUESTION}"},
            {"from": "gpt", "value": f"Something {name}."},
        ]
        conversations.append({"id": name, "image": path.name, "conversations": turns})

    (folder / "conversations.json").write_text(json.dumps(conversations))
    with (folder / "lmu" / "colours.tsv").open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([["index", "image", "question", *"ABCD", "answer"], *rows])


class Checks(Results):
    """Runs commands and keeps their logs."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out

    def run(self, name: str, *command: Any) -> str:
        """Standard output of the command; a failure is printed with its last lines."""
        start = time.monotonic()
        done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
        (self.out / f"{name}.log").write_text(done.stdout + done.stderr)
        if not self.add(name, done.returncode == 0, f"{time.monotonic() - start:.0f} s"):
            print("\n".join((done.stdout + done.stderr).strip().splitlines()[-6:]), flush=True)
        return done.stdout


def transformers_answer(hf: Path, image: Path, platform: str) -> str:
    """The greedy answer of ``transformers`` after its own processor."""
    processor = load_hf_processor(hf)
    model = load_hf_model(hf, torch.bfloat16 if platform == "cuda" else torch.float32).to(platform)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    batch = processor(text=[text], images=[Image.open(image).convert("RGB")], return_tensors="pt").to(
        platform
    )
    given = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False, repetition_penalty=1.0)
    return processor.decode(given[0, batch.input_ids.shape[1] :], skip_special_tokens=True)


def prepare(work: Path, ranks: int) -> None:
    """Inputs, small checkpoints, their Megatron weights and the round trip."""
    write_inputs(work)
    write_tiny_checkpoint(work / "hf", "qwen2_5_vl", dtype=torch.bfloat16, **SIZES)
    write_tiny_checkpoint(
        work / "moe", "qwen3_vl_moe", dtype=torch.bfloat16, **MOE_SIZES, experts_per_token=4
    )
    convert_weights(work / "hf", work / "shards", {"tp": ranks, "pp": 1})
    convert_weights(work / "moe", work / "moe_shards", {"tp": 1, "pp": 1, "ep": ranks})
    export_weights(work / "shards", work / "hf", work / "again")


def check_training(checks: Checks, work: Path, ranks: int, platform: str) -> None:
    """Data, a dry run, and a training that validates."""
    source = ["--input", work / "conversations.json", "--media-root", work / "media", "--out", work / "data"]
    checks.run("data convert", "-m", "toolkit", "data", "convert", *source)
    run = work / "run.yaml"
    cuda = platform == "cuda"
    fields = {"parallel": str(ranks > 1).lower(), "dtype": "bfloat16" if cuda else "float32"}
    paths = {name: work / name for name in ("hf", "shards", "data", "run")}
    run.write_text(RUN.format(**paths, **fields, ranks=ranks, platform=platform))
    checks.run("dry run", "-m", "toolkit", "train", "--dry-run", "--config", run, "--nproc-per-node", ranks)
    train = [*torchrun(ranks)[1:], "-m", "megatron_vl.train"]
    checks.run("training with validation", *train, "--config", run)
    answers = work / "run" / "eval.jsonl"
    lines = answers.read_text().splitlines() if answers.is_file() else []
    checks.add("validation", bool(lines), f"{len(lines)} lines")


def check_offload(checks: Checks, work: Path, ranks: int, platform: str) -> None:
    """Optimizer state in host memory, with moments of both types: losses are those without, bit for bit."""
    for moments in ("float32", "bfloat16"):
        curves = []
        for share in (0, 1):
            run = work / f"{moments}_{share}"
            options = ["--checkpoint.dir", run, "--steps", 12, "--optimizer.moments_dtype", moments]
            options += ["--optimizer.offload_fraction", share]
            train = [*torchrun(ranks)[1:], "-m", "megatron_vl.train", "--config", work / "run.yaml"]
            checks.run(f"{moments} moments, {share} in host memory", *train, *options)
            curves.append([line["loss"] for line in metrics(run)])
        is_same = len(curves[0]) == 12 and curves[0] == curves[1]
        checks.add(f"{moments} moments in host memory", is_same, str(curves[0][-1:]))


def check_generate(checks: Checks, work: Path, ranks: int, platform: str) -> None:
    """Answers of the folder, and of the trained run, which is exported first."""
    image = work / "media" / "red.png"
    asked = ["--prompt", QUESTION, "--image", image, "--max-new-tokens", NEW_TOKENS]
    command = ["-m", "toolkit", "generate", "--checkpoint"]
    got = checks.run("generate", *command, work / "hf", *asked)
    want = transformers_answer(work / "hf", image, platform)
    printable = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in want)
    checks.add("generate, text", got.removesuffix("\n") == printable, repr(got))
    checks.run("generate, run", *command, work / "run", "--model.hf", work / "hf", *asked)


def check_evaluate(checks: Checks, work: Path, ranks: int, platform: str) -> None:
    """The round trip judged, its questions shared between the GPUs."""
    imports = subprocess.run([sys.executable, "-c", "import vlmeval.dataset"], capture_output=True, text=True)
    if imports.returncode:
        print(f"       evaluate left out: {imports.stderr.strip().splitlines()[-1]}")
        return

    folders = ["--original", work / "hf", "--converted", work / "again", "--out", work / "evaluated"]
    table = ["--data", work / "lmu" / "colours.tsv", "--max-new-tokens", 2]
    checks.run("evaluate", "-m", "toolkit", "evaluate", *folders, *table)


def main() -> int:
    args = option_parser(__doc__, ranks=2, platform=True).parse_args()
    work, out = work_folders(args.out, "commands")
    checks = Checks(out)
    prepare(work, args.ranks)
    for check in (check_training, check_offload, check_generate, check_evaluate):
        check(checks, work, args.ranks, args.platform)
    return checks.exit_code()


if __name__ == "__main__":
    sys.exit(main())
