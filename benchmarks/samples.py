"""Processor seconds of one core to make a sample: the loader's code beside the processor of Hugging Face.

    python -m benchmarks.samples --hf HF_DIR --count 200

Conversations about COCO-shaped JPEGs (crops of the demo's photographs) go through both. The Hugging Face side
opens each file with Pillow, applies the chat template and calls the processor, as a collate function would;
the loader also makes the loss mask. Tokens and pixels are compared before anything is timed. The two take
turns, so that whatever else runs on the machine disturbs both alike. A turn is a pass over all samples: a
loader process has the caches for itself, and with ``--turn 1`` each side finds them full of what the other
has left there.
"""

import argparse
import io
import json
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import batched
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from megatron_vl.config import DataConfig
from megatron_vl.data.row_encoder import RawSample, RowEncoder
from megatron_vl.data.sample.images import decode_image, image_size
from megatron_vl.data.source.tolerant_reader import append_crc32
from megatron_vl.data.synthetic import IMAGE_SIZES
from megatron_vl.spec.families import read_spec
from toolkit.common.hf_loading import load_hf_processor
from toolkit.demo.demo_data import load_images

ROW_SAMPLES = 10
"""Samples of a row, whose texts a loader process encodes before it decodes their pixels."""


def random_crop(photograph: Image.Image, size: tuple[int, int], generator: random.Random) -> Image.Image:
    """A random crop of at least half the photograph's width or height, scaled to ``size`` (width, height)."""
    width, height = photograph.size
    scale = min(width / size[0], height / size[1]) * generator.uniform(0.5, 1.0)
    crop_width, crop_height = size[0] * scale, size[1] * scale
    left, top = generator.uniform(0, width - crop_width), generator.uniform(0, height - crop_height)
    box = (left, top, left + crop_width, top + crop_height)
    return photograph.resize(size, Image.Resampling.BICUBIC, box=box)


def samples(count: int) -> list[tuple[list[dict[str, Any]], bytes]]:
    """Messages and the JPEG of each sample."""
    rng = random.Random(5)
    sources = [Image.fromarray(load()).convert("RGB") for load in load_images().values()]
    words = Path(__file__).parents[1].joinpath("README.md").read_text().split()
    made = []
    for _ in range(count):
        file = io.BytesIO()
        random_crop(rng.choice(sources), rng.choice(IMAGE_SIZES), rng).save(file, "JPEG", quality=92)
        said = [" ".join(rng.choices(words, k=rng.randint(10, 60))) for _ in range(2)]
        asked = [{"type": "image", "image": "0.jpg"}, {"type": "text", "text": said[0]}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said[1]}]
        made.append((messages, file.getvalue()))
    return made


def stored(messages: list[dict[str, Any]], jpeg: bytes) -> RawSample:
    """A sample as a shard stores it."""
    height, width = image_size(jpeg)
    size = {"height": height, "width": width}
    medium = {"key": "0.jpg", "kind": "image", **size, "crc32": zlib.crc32(jpeg)}
    text = append_crc32(json.dumps({"messages": messages, "media": [medium]}).encode())
    return RawSample("0", text, {"0.jpg": jpeg})


def ours(encoder: RowEncoder, raw: RawSample) -> tuple[RawSample, torch.Tensor]:
    """The encoded sample and its planes."""
    encoded = encoder.preencode_sample(raw)
    return encoded, encoder.postencode_sample(encoded).media_items[0].planes


def open_image(jpeg: bytes) -> Image.Image:
    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def theirs(processor: Any, messages: list[dict[str, Any]], jpeg: bytes) -> Any:
    image = open_image(jpeg)
    text = processor.apply_chat_template(messages, tokenize=False)
    return processor(text=[text], images=[image], return_tensors="pt")


def check(encoder: RowEncoder, processor: Any, messages: list[dict[str, Any]], jpeg: bytes) -> None:
    """Stops if tokens or pixels differ."""
    encoded, planes = ours(encoder, stored(messages, jpeg))
    found = theirs(processor, messages, jpeg)
    side = encoder.pixel_settings.patch_size**2
    pixels = found["pixel_values"].view(planes.shape[1], 3, -1, side)[:, :, 0].flatten(1)
    assert torch.equal(encoded.token_ids, found["input_ids"][0]), "tokens differ"
    assert (encoder.pixel_settings.norm.normalize_planes(planes)[0] - pixels).abs().max() < 2e-6, (
        "pixels differ"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf", type=Path, help="folder of tokenizer and processor; default: a small one")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn", type=int, help="samples of one side before the other's; default: all")
    args = parser.parse_args()
    from toolkit.common.tiny_checkpoint import write_tiny_checkpoint

    torch.set_num_threads(1)
    if args.hf is None:
        import tempfile

        args.hf = write_tiny_checkpoint(Path(tempfile.mkdtemp()) / "hf", "qwen2_5_vl")
    encoder = RowEncoder(DataConfig(seq_len=8192), read_spec(args.hf), args.hf)
    processor = load_hf_processor(args.hf)

    made = samples(args.count)
    for messages, jpeg in made:
        check(encoder, processor, messages, jpeg)
    print(f"tokens and pixels of {len(made)} samples are equal")

    raw = [stored(*sample) for sample in made]
    ratios, ratios_without_jpeg = [], []
    for _ in range(args.rounds):
        spent = time_round(encoder, processor, made, raw, args.turn or args.count)
        for stage, seconds in spent.items():
            print(f"{stage:20s} {seconds / len(made) * 1e3:6.2f} ms a sample")

        loader = spent["loader, text"] + spent["loader, pixels"]
        ratios.append(spent["Hugging Face"] / loader)
        rest = spent["Hugging Face"] - spent["Hugging Face's JPEG"]
        ratios_without_jpeg.append(rest / (loader - spent["loader's JPEG"]))
        print(f"{len(made) / loader:.0f} samples/s a core, {ratios[-1]:.2f} times Hugging Face")
    print(
        f"median of {args.rounds} rounds: {median(ratios):.2f} times Hugging Face,"
        f" {median(ratios_without_jpeg):.2f} without the decoding of JPEGs on both sides"
    )


def time_round(
    encoder: RowEncoder,
    processor: Any,
    made: list[tuple[list[dict[str, Any]], bytes]],
    raw: list[RawSample],
    turn_length: int,
) -> dict[str, float]:
    """Processor seconds of each side for all samples. JPEGs are decoded once more, alone, after each turn."""
    spent: Counter[str] = Counter()

    def timed(stage: str, work: Callable[..., Any], *arguments: Any) -> Any:
        start = time.process_time()
        result = work(*arguments)
        spent[stage] += time.process_time() - start
        return result

    for first in range(0, len(made), turn_length):
        turn = slice(first, first + turn_length)
        for row in batched(raw[turn], ROW_SAMPLES):
            encoded_row = [timed("loader, text", encoder.preencode_sample, sample) for sample in row]
            for encoded in encoded_row:
                timed("loader, pixels", encoder.postencode_sample, encoded)
        for sample in raw[turn]:
            timed("loader's JPEG", decode_image, sample.media_bytes["0.jpg"])

        for messages, jpeg in made[turn]:
            timed("Hugging Face", theirs, processor, messages, jpeg)
        for _, jpeg in made[turn]:
            timed("Hugging Face's JPEG", open_image, jpeg)
    return spent


if __name__ == "__main__":
    main()
