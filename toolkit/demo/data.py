"""Writes the demo's conversations as ShareGPT JSON, with image and video files.

The pictures are the photographs that come with scikit-image or, if it is not installed, drawings of the same
motifs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .drawings import drawings

QUESTION = "What is in this picture?"

PICTURES = {
    "astronaut": "An astronaut in an orange space suit, with a flag behind her.",
    "chelsea": "A tabby cat that looks straight at you.",
    "coffee": "A cup of coffee on a wooden table, with a spoon beside it.",
    "rocket": "A rocket on its launch pad at dusk.",
    "motorcycle": "A red motorcycle parked in a garage.",
}
"""Maps each photograph to the answer to :data:`QUESTION`. The question is always the same, so the answer can
only come from the picture."""

# Media are the files for the conversation's placeholders, in the order of the text.
CONVERSATIONS: list[dict[str, Any]] = [
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


def write_raw_data(folder: Path) -> Path:
    """Writes ``folder/media/*`` and ``folder/conversations.json`` (ShareGPT style).

    Returns:
        The path of the JSON file.
    """
    media = folder / "media"
    media.mkdir(parents=True, exist_ok=True)
    pictures = load_pictures()
    files = _write_images(media, pictures)
    _write_video(media / "camera_pan.mp4", pictures["coffee"]())
    samples: list[dict[str, Any]] = [
        {"id": name, "image": files[name], "conversations": _turns(["<image>\n" + QUESTION, answer])}
        for name, answer in PICTURES.items()
    ]
    for conversation in CONVERSATIONS:
        sample = {name: value for name, value in conversation.items() if name != "turns"}
        samples.append(sample | {"conversations": _turns(conversation["turns"])})
    path = folder / "conversations.json"
    path.write_text(json.dumps(samples, indent=2) + "\n")
    return path


def texts() -> list[str]:
    """All texts of the conversations, from which the tokenizer is made."""
    said = [QUESTION, *PICTURES.values()]
    for conversation in CONVERSATIONS:
        said += conversation["turns"]
    return [*said, "system", "user", "assistant", "You are a helpful assistant."]


def _turns(said: list[str]) -> list[dict[str, str]]:
    return [{"from": "gpt" if i % 2 else "human", "value": text} for i, text in enumerate(said)]


def load_pictures() -> dict[str, Callable[[], NDArray[np.uint8]]]:
    """Maps each name to a function that returns the picture, height x width x 3."""
    try:
        from skimage import data
    except ModuleNotFoundError:
        return drawings()
    # Only pictures inside the wheel are used; the others would be downloaded.
    return {
        "astronaut": data.astronaut,
        "chelsea": data.chelsea,
        "coffee": data.coffee,
        "rocket": data.rocket,
        "motorcycle": lambda: data.stereo_motorcycle()[0],
        "hubble": data.hubble_deep_field,
    }


def _write_images(media: Path, pictures: dict[str, Callable[[], NDArray[np.uint8]]]) -> dict[str, str]:
    """Writes the pictures, in different shapes with sides of at most 256 pixels. Maps names to file names."""
    from PIL import Image

    files = {}
    for name, load in pictures.items():
        picture = Image.fromarray(load())
        picture.thumbnail((256, 256))
        files[name] = f"{name}.png" if name == "chelsea" else f"{name}.jpg"
        picture.save(media / files[name], quality=92)  # PNG ignores it
    return files


def _write_video(path: Path, picture: NDArray[np.uint8]) -> None:
    """Writes a three-second pan over a photograph, 8 frames per second, as H.264 in MP4."""
    import av

    frames = 24
    rate = 8
    height = 112
    width = 168
    top = (picture.shape[0] - height) // 2
    travel = picture.shape[1] - width

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(rate))
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuv420p"
        for i in range(frames):
            left = travel * i // (frames - 1)
            crop = np.ascontiguousarray(picture[top : top + height, left : left + width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(crop, format="rgb24")))
        container.mux(stream.encode())
