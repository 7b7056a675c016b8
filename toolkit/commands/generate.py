"""``megatron-vl generate``: answers of a Megatron checkpoint to pictures, videos and text."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from toolkit.commands.arguments import add_video_rules, chosen_platform, numbers, positive
from toolkit.commands.weights import CHECKPOINT

NOTES = """
The answer is greedy: the likeliest token each time, until a token that ends a turn (generation_config.json) or
--max-new-tokens. In float32 it is that of transformers' generate(do_sample=False, repetition_penalty=1.0), token for token.
Keys and values of earlier tokens are kept on each rank (memory: 4 x layers x key/value heads x head dimension bytes a token in
bfloat16, divided by tp x pp); pictures are encoded once. Prompts are answered --batch at a time; a model of another layout on
disk needs no splitting. One process a rank is started on this machine: with GPUs, tp x pp of them, and where the experts are
spread further (--ep, --etp), as many times more as they need; each of these replicas answers its share of the prompts.
"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    text = "answers of Megatron weights to pictures, videos and text, under any tensor x pipeline x expert layout"
    parser = subparsers.add_parser(
        "generate",
        help=text,
        description=f"{text[0].upper() + text[1:]}.",
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help=CHECKPOINT)
    parser.add_argument(
        "--hf", type=Path, required=True, metavar="DIR", help="Hugging Face folder of origin: tokenizer, chat template, processor"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="what the user says, behind the pictures and videos (one; else --prompt-file)",
    )
    what.add_argument(
        "--prompt-file",
        type=Path,
        action="append",
        metavar="FILE",
        help="JSON or JSON lines of conversations, OpenAI messages or ShareGPT; each gets its next turn answered (a last turn of "
        "the assistant's is left out); may be repeated",
    )
    parser.add_argument("--image", type=Path, action="append", default=[], metavar="FILE", help="with --prompt; may be repeated")
    parser.add_argument("--video", type=Path, action="append", default=[], metavar="FILE", help="with --prompt; may be repeated")
    parser.add_argument(
        "--media-root", type=Path, metavar="DIR", help="where the media of --prompt-file lie (default: the file's folder)"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, default=128, metavar="N", help="most tokens of an answer (default: 128)"
    )
    parser.add_argument("--tp", type=positive, default=1, metavar="T", help="tensor parallel size in ranks (default: 1)")
    parser.add_argument("--pp", type=positive, default=1, metavar="P", help="pipeline parallel size in stages (default: 1)")
    parser.add_argument(
        "--ep", type=positive, default=1, metavar="E", help="expert parallel size in ranks, for models with experts (default: 1)"
    )
    parser.add_argument(
        "--etp", type=positive, default=1, metavar="R", help="expert tensor parallel size: experts' matrices are cut (default: 1)"
    )
    parser.add_argument("--layers", type=numbers, metavar="6,8,8,6", help="decoder layers of each stage (default: even)")
    parser.add_argument("--batch", type=positive, default=8, metavar="N", help="prompts answered together (default: 8)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on GPUs, float32 on CPU")
    parser.add_argument("--platform", choices=["auto", "cpu", "cuda"], default="auto", help="default: cuda where there is a GPU")
    parser.add_argument(
        "--video-fps", type=float, default=2.0, metavar="F", help="frames a second taken from a video (default: 2)"
    )
    parser.add_argument("--video-max-frames", type=positive, default=32, metavar="N", help="most frames of a video (default: 32)")
    add_video_rules(parser)
    parser.add_argument("--json", action="store_true", help="print JSON: text, tokens and prompt_tokens of each answer")
    parser.set_defaults(run=_run, inputs=("checkpoint", "hf", "prompt_file", "image", "video"))


def _run(args: argparse.Namespace) -> int:
    from megatron_vl.config import DataConfig
    from toolkit.generate.command import Request, one_conversation, read_prompt_files, run_generate

    if len(args.prompt or []) > 1:
        raise ValueError("--prompt is given more than once; several prompts go into a --prompt-file")
    if args.prompt and not (args.prompt[0].strip() or args.image or args.video):
        raise ValueError("--prompt is empty; say something, or give a picture or video (--image, --video)")
    if args.prompt_file and (args.image or args.video):
        raise ValueError("--image and --video go with --prompt; a --prompt-file names its own")
    for path in (*args.image, *args.video, *(args.prompt_file or [])):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file")
    if args.prompt_file:
        roots = [(args.media_root or path.parent).resolve() for path in args.prompt_file]
        conversations = read_prompt_files(list(zip(args.prompt_file, roots, strict=True)))
    else:
        conversations = [(one_conversation(args.prompt[0], args.image, args.video), Path("/"), "")]
    platform = chosen_platform(args.platform)
    request = Request(
        hf=args.hf,
        checkpoint=args.checkpoint,
        conversations=conversations,
        layout={"tp": args.tp, "pp": args.pp, "layers": args.layers, "ep": args.ep, "etp": args.etp},
        max_new_tokens=args.max_new_tokens,
        dtype=args.dtype or ("bfloat16" if platform == "cuda" else "float32"),
        platform=platform,
        batch=args.batch,
        data=DataConfig(
            video_fps=args.video_fps,
            video_max_frames=args.video_max_frames,
            video_positions=args.video_positions,
            video_prompt=args.video_prompt,
        ),
    )
    answers = run_generate(request, lambda line: print(line, file=sys.stderr))
    if args.json:
        print(json.dumps(answers, indent=2, ensure_ascii=False))
        return 0
    for number, answer in enumerate(answers, 1):
        text = _shown(answer["text"])
        print(f"[{number}] {text}" if len(answers) > 1 else text)
    return 0


def _shown(text: str) -> str:
    """For a terminal: without control characters, which could be commands to it."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
