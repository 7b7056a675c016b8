"""Writes conversations about COCO-shaped photographs, to time loader and trainer with real JPEG files.

    python benchmarks/photographs.py --count 400 --out RAW
    megatron-vl data convert --input RAW/conversations.json --media-root RAW/media --out DATA --val-fraction 0
    megatron-vl bench --hf HF_DIR --gpus 8 --data DATA

The pictures are crops of the photographs that come with scikit-image, in the sizes of
:mod:`toolkit.bench.workload`. The text consists of words from this repository's documents, about 40 to 260
tokens per conversation. Everything is seeded.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

from PIL import Image

from toolkit.bench.workload import COCO_SIZES
from toolkit.demo.demo_data import random_crop

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket", "stereo_motorcycle", "retina", "hubble_deep_field")


def photographs() -> list[Image.Image]:
    from skimage import data

    arrays = [getattr(data, name)() for name in PHOTOGRAPHS]
    return [
        Image.fromarray(array[0] if isinstance(array, tuple) else array).convert("RGB") for array in arrays
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--count", type=int, default=400, help="number of conversations, each about its own picture"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for conversations.json and media/")
    args = parser.parse_args()
    rng = random.Random(5)
    sources = photographs()
    words = re.findall(r"[A-Za-z]{2,}", Path(__file__).parents[1].joinpath("README.md").read_text())
    media = args.out / "media"
    media.mkdir(parents=True, exist_ok=True)
    conversations = []

    for number in range(args.count):
        name = f"{number:05d}.jpg"
        random_crop(rng.choice(sources), rng.choice(COCO_SIZES), rng).save(media / name, quality=85)
        question, answer = (" ".join(rng.choices(words, k=rng.randint(15, 95))) for _ in range(2))
        turns = [{"from": "human", "value": f"<image>\n{question}?"}, {"from": "gpt", "value": answer}]
        conversations.append({"id": str(number), "image": name, "conversations": turns})

    (args.out / "conversations.json").write_text(json.dumps(conversations))


if __name__ == "__main__":
    main()
