"""Writes the demo's conversations as ShareGPT JSON, with image and video files.

The images are photographs of scikit-image or, if it is not installed, drawings. The video is a file of
this package, because encoders write other bytes on other machines.
"""

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

IMAGE_QUESTION = "What is in this picture?"

ANSWER_BY_IMAGE = {
    "astronaut": "An astronaut in an orange space suit, with a flag behind her.",
    "chelsea": "A tabby cat that looks straight at you.",
    "coffee": "A cup of coffee on a wooden table, with a spoon beside it.",
    "rocket": "A rocket on its launch pad at dusk.",
    "motorcycle": "A red motorcycle parked in a garage.",
}
"""Answers to :data:`IMAGE_QUESTION`; it is always the same, so they can only come from the image."""

FILE_NAMES = {name: f"{name}.jpg" for name in (*ANSWER_BY_IMAGE, "hubble")} | {"chelsea": "chelsea.png"}

DEMO_CONVERSATIONS: list[tuple[str, dict[str, Any], str]] = [
    *[(n, {"image": FILE_NAMES[n]}, f"<image>\n{IMAGE_QUESTION}|{a}") for n, a in ANSWER_BY_IMAGE.items()],
    (
        "two_images",
        {"image": ["chelsea.png", "coffee.jpg"]},
        "<image>\n<image>\nWhich of the two can purr?|The first one, the cat.",
    ),
    (
        "image_between_texts",
        {"image": ["rocket.jpg"]},
        "Look at the sky here: <image>\nIs it day or night?|It gets dark, and the lights are on.",
    ),
    (
        "several_turns",
        {"image": ["astronaut.jpg", "hubble.jpg"]},
        "<image>\nWhat does she do for a living?|She is an astronaut.|<image>\nAnd where might she fly?|"
        "To the stars, perhaps to these galaxies.|How far is that?|Billions of light years.",
    ),
    ("text_only", {}, "What is seven times eight?|Seven times eight is fifty-six."),
    ("text_only_2", {}, "Name three primary colours.|Red, yellow and blue."),
    ("video", {"video": "camera_pan.mp4"}, "<video>\nHow does the camera move?|It moves from left to right."),
]
"""Id, media in the order of the text, and turns. The first five differ in their image and answer alone."""

VIDEO_FILE = Path(__file__).parent.parent / "resources" / "camera_pan.mp4"
"""Three seconds of a pan over a photograph, 8 frames a second (H.264)."""


def write_raw_data(raw_dir: Path) -> Path:
    """Writes ``media/*`` and ``conversations.json`` (ShareGPT style), whose path it returns."""
    media_dir = raw_dir / "media"
    media_dir.mkdir(parents=True, exist_ok=True)
    for name, load_image in load_images().items():
        image = Image.fromarray(load_image())
        image.thumbnail((256, 256))
        image.save(media_dir / FILE_NAMES[name], quality=92)  # PNG ignores it
    shutil.copyfile(VIDEO_FILE, media_dir / VIDEO_FILE.name)

    samples = [
        {
            "id": name,
            **media,
            "conversations": [
                {"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(turns.split("|"))
            ],
        }
        for name, media, turns in DEMO_CONVERSATIONS
    ]
    json_path = raw_dir / "conversations.json"
    json_path.write_text(json.dumps(samples, indent=2) + "\n")
    return json_path


def conversation_texts() -> list[str]:
    texts = [text for _, _, turns in DEMO_CONVERSATIONS[len(ANSWER_BY_IMAGE) :] for text in turns.split("|")]
    roles = ["system", "user", "assistant", "You are a helpful assistant."]
    return [IMAGE_QUESTION, *ANSWER_BY_IMAGE.values(), *texts, *roles]


def load_images() -> dict[str, Callable[[], NDArray[np.uint8]]]:
    try:
        from skimage import data
    except ModuleNotFoundError:
        return {name: partial(_draw, name) for name in FILE_NAMES}
    # Only images inside the wheel are used; the others would be downloaded.
    loaders = {name: getattr(data, name) for name in FILE_NAMES if hasattr(data, name)}
    return loaders | {"motorcycle": lambda: data.stereo_motorcycle()[0], "hubble": data.hubble_deep_field}


def _draw(name: str) -> NDArray[np.uint8]:
    generator = random.Random(name)  # always the same drawing
    image = Image.new("RGB", (640, 480), tuple(generator.choices(range(256), k=3)))
    for _ in range(12):
        left, top = generator.randrange(500), generator.randrange(400)
        box = (left, top, left + generator.randrange(40, 300), top + generator.randrange(40, 300))
        ImageDraw.Draw(image).ellipse(box, tuple(generator.choices(range(256), k=3)))
    return np.asarray(image)
