"""Writes the demo's conversations as ShareGPT JSON, with image and video files.

The pictures are the photographs that come with scikit-image or, if it is not installed, drawings of the same
motifs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .drawings import motif_drawings

PICTURE_QUESTION = "What is in this picture?"

ANSWER_BY_PICTURE = {
    "astronaut": "An astronaut in an orange space suit, with a flag behind her.",
    "chelsea": "A tabby cat that looks straight at you.",
    "coffee": "A cup of coffee on a wooden table, with a spoon beside it.",
    "rocket": "A rocket on its launch pad at dusk.",
    "motorcycle": "A red motorcycle parked in a garage.",
}
"""Maps each photograph to the answer to :data:`PICTURE_QUESTION`. The question is always the same, so the
answer can only come from the picture."""

# Media are the files for the conversation's placeholders, in the order of the text.
DEMO_CONVERSATIONS: list[dict[str, Any]] = [
    {
        "id": "two_images",
        "image": ["chelsea.png", "coffee.jpg"],
        "turns": ["<image>\n<image>\nWhich of the two can purr?", "The first one, the cat."],
    },
    {
        "id": "image_between_texts",
        "image": ["rocket.jpg"],
        "turns": [
            "Look at the sky here: <image>\nIs it day or night?",
            "It gets dark, and the lights are on.",
        ],
    },
    {
        "id": "several_turns",
        "image": ["astronaut.jpg", "hubble.jpg"],
        "turns": [
            "<image>\nWhat does she do for a living?",
            "She is an astronaut.",
            "<image>\nAnd where might she fly?",
            "To the stars, perhaps to these galaxies.",
            "How far is that?",
            "Billions of light years.",
        ],
    },
    {"id": "text_only", "turns": ["What is seven times eight?", "Seven times eight is fifty-six."]},
    {"id": "text_only_2", "turns": ["Name three primary colours.", "Red, yellow and blue."]},
    {
        "id": "video",
        "video": "camera_pan.mp4",
        "turns": ["<video>\nHow does the camera move?", "It moves from left to right."],
    },
]


def write_raw_data(raw_dir: Path) -> Path:
    """Writes ``folder/media/*`` and ``folder/conversations.json`` (ShareGPT style).

    Returns:
        The path of the JSON file.
    """
    media_dir = raw_dir / "media"
    media_dir.mkdir(parents=True, exist_ok=True)
    pictures = load_pictures()
    file_names = _write_images(media_dir, pictures)
    _write_video(media_dir / "camera_pan.mp4", pictures["coffee"]())

    samples: list[dict[str, Any]] = []
    for name, answer in ANSWER_BY_PICTURE.items():
        samples.append(
            {
                "id": name,
                "image": file_names[name],
                "conversations": _sharegpt_turns(["<image>\n" + PICTURE_QUESTION, answer]),
            }
        )

    for conversation in DEMO_CONVERSATIONS:
        sample = {}
        for name, value in conversation.items():
            if name != "turns":
                sample[name] = value

        samples.append(sample | {"conversations": _sharegpt_turns(conversation["turns"])})
    json_path = raw_dir / "conversations.json"
    json_path.write_text(json.dumps(samples, indent=2) + "\n")
    return json_path


def conversation_texts() -> list[str]:
    """All texts of the conversations, from which the tokenizer is made."""
    all_texts = [PICTURE_QUESTION, *ANSWER_BY_PICTURE.values()]
    for conversation in DEMO_CONVERSATIONS:
        all_texts += conversation["turns"]
    return [*all_texts, "system", "user", "assistant", "You are a helpful assistant."]


def _sharegpt_turns(turn_texts: list[str]) -> list[dict[str, str]]:
    return [{"from": "gpt" if i % 2 else "human", "value": text} for i, text in enumerate(turn_texts)]


def load_pictures() -> dict[str, Callable[[], NDArray[np.uint8]]]:
    """Maps each name to a function that returns the picture, height x width x 3."""
    try:
        from skimage import data
    except ModuleNotFoundError:
        return motif_drawings()
    # Only pictures inside the wheel are used; the others would be downloaded.
    return {
        "astronaut": data.astronaut,
        "chelsea": data.chelsea,
        "coffee": data.coffee,
        "rocket": data.rocket,
        "motorcycle": lambda: data.stereo_motorcycle()[0],
        "hubble": data.hubble_deep_field,
    }


def random_crop(photograph: Image.Image, size: tuple[int, int], generator: random.Random) -> Image.Image:
    """A random crop of at least half the photograph's width or height, scaled to ``size`` (width, height)."""
    width, height = photograph.size
    scale = min(width / size[0], height / size[1]) * generator.uniform(0.5, 1.0)
    crop_width, crop_height = size[0] * scale, size[1] * scale
    left, top = generator.uniform(0, width - crop_width), generator.uniform(0, height - crop_height)
    box = (left, top, left + crop_width, top + crop_height)
    return photograph.resize(size, Image.Resampling.BICUBIC, box=box)


def _write_images(media_dir: Path, pictures: dict[str, Callable[[], NDArray[np.uint8]]]) -> dict[str, str]:
    """Writes the pictures, in different shapes with sides of at most 256 pixels. Maps names to file names."""
    files = {}
    for name, load_picture in pictures.items():
        picture = Image.fromarray(load_picture())
        picture.thumbnail((256, 256))
        files[name] = f"{name}.png" if name == "chelsea" else f"{name}.jpg"
        picture.save(media_dir / files[name], quality=92)  # PNG ignores it
    return files


def _write_video(video_path: Path, picture: NDArray[np.uint8]) -> None:
    """Writes a three-second pan over a photograph, 8 frames per second, as H.264 in MP4."""
    import av

    num_frames = 24
    frame_rate = 8
    height = 112
    width = 168
    crop_top = (picture.shape[0] - height) // 2
    pan_width = picture.shape[1] - width

    with av.open(str(video_path), "w") as container:
        video_stream = container.add_stream("libx264", rate=Fraction(frame_rate))
        video_stream.width = width
        video_stream.height = height
        video_stream.pix_fmt = "yuv420p"
        for i in range(num_frames):
            crop_left = pan_width * i // (num_frames - 1)
            frame_crop = np.ascontiguousarray(
                picture[crop_top : crop_top + height, crop_left : crop_left + width]
            )
            container.mux(video_stream.encode(av.VideoFrame.from_ndarray(frame_crop, format="rgb24")))
        container.mux(video_stream.encode())
