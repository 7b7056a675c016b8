"""``megatron-vl bench``: how fast a model trains on this machine, where its time and memory go, and how a peer compares."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from toolkit.commands.arguments import positive
from toolkit.launch import run_group


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="speed, memory and time by part of a model with random weights",
        description="Times a model of an HF config with random weights on seeded rows, or on a data set. "
        "Every other option is one of `python -m toolkit.bench --help`: --rows, --warm_up, --timed, --part_steps, "
        "--language_layers, --even_routing true, --config RUN.yaml, and any field of a run by its dotted name.",
        allow_abbrev=False,
    )
    parser.add_argument("--hf", required=True, help="Hugging Face folder or config.json that gives the sizes")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpus", type=positive, metavar="N", help="processes, one a GPU")
    where.add_argument("--processes", type=positive, metavar="N", help="processes on CPU, for small models")
    parser.add_argument("--data", metavar="DIR", help="time the rows of this data set through the real loader")
    parser.add_argument(
        "--peer", action="store_true", help="also time the Hugging Face model under FSDP2 on the same seeded rows"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _keep_unknown(parser)
    parser.set_defaults(run=_run, inputs=("hf", "data"))


def _keep_unknown(parser: argparse.ArgumentParser) -> None:
    """Options that this parser does not know go into ``options``, for the benchmark's own parser to judge."""
    known = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        found, rest = known(args, namespace)
        found.options = rest
        return found, []

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def _run(args: argparse.Namespace) -> int:
    from toolkit.bench.options import parse

    options = ["--hf", args.hf, *args.options]
    if args.data:
        options += ["--data.path", args.data]
    if args.processes:
        options += ["--platform", "cpu"]
    runs = [[*options, "--peer", str(peer).lower()] for peer in ((False, True) if args.peer else (False,))]
    for parsed in [parse(run, "megatron-vl bench") for run in runs]:  # refused here, before any process starts
        parsed.check(args.gpus or args.processes)
    if args.gpus:
        _check_gpus(args.gpus)
    systems = []
    for run in runs:
        figures = _launch(args.gpus or args.processes, run, quiet=args.json, cpu=bool(args.processes))
        if isinstance(figures, int):
            return figures
        systems.append(figures)
    _report(args, systems)
    return 0


def _check_gpus(wanted: int) -> None:
    import torch

    if (found := torch.cuda.device_count()) < wanted:
        raise ValueError(f"--gpus {wanted}: torch sees {found} GPUs here; for small models on CPU use --processes {wanted}")


def _launch(processes: int, options: list[str], quiet: bool, cpu: bool) -> dict[str, Any] | int:
    """Starts one process a GPU; the figures of rank 0, or the exit code of a failure."""
    # Torch's profiler says "ERROR: gpuGetDeviceCount failed" on each rank where there is no GPU to count.
    variables = {"KINETO_LOG_LEVEL": "5"} if cpu else {}
    with tempfile.TemporaryDirectory(prefix="megatron-vl-bench-") as folder:
        out = Path(folder) / "figures.json"
        done = run_group(
            "toolkit.bench",
            [*options, "--out", out],
            processes,
            show="errors" if quiet else "all",
            # Without it, packed rows of changing sizes fragment the GPU's memory.
            environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | variables,
        )
        if done.returncode:
            return done.returncode
        return json.loads(out.read_text())


def _report(args: argparse.Namespace, systems: list[dict[str, Any]]) -> None:
    from toolkit.bench.report import compare, ratios

    result = compare(*systems) if args.peer else systems[0]
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    if args.json:
        print(json.dumps(result, indent=2))
    elif args.peer:
        print("\n".join(ratios(result)))
