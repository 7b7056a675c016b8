"""Draws the motifs of the demo's photographs, in the same sizes.

The drawings are used on machines without scikit-image, which provides the photographs.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Canvas = ImageDraw.ImageDraw


def drawings() -> dict[str, Callable[[], NDArray[np.uint8]]]:
    """Maps each photograph's name to a function that draws it, height x width x 3, always in the same way."""
    return {
        "astronaut": lambda: _draw((512, 512), "midnightblue", _astronaut),
        "chelsea": lambda: _draw((451, 300), "tan", _cat),
        "coffee": lambda: _draw((600, 400), "saddlebrown", _coffee),
        "rocket": lambda: _draw((640, 427), "darkslateblue", _rocket),
        "motorcycle": lambda: _draw((741, 500), "lightgrey", _motorcycle),
        "hubble": lambda: _draw((1000, 872), "black", _galaxies),
    }


def _draw(size: tuple[int, int], background: str, paint: Callable[[Canvas], None]) -> NDArray[np.uint8]:
    picture = Image.new("RGB", size, background)
    paint(ImageDraw.Draw(picture))
    return np.asarray(picture)


def _astronaut(d: Canvas) -> None:
    for row in range(0, 200, 40):
        d.rectangle((340, row, 512, row + 20), "white" if row % 80 else "firebrick")
    d.rectangle((120, 260, 400, 512), "darkorange")
    d.ellipse((170, 60, 350, 260), "white", "grey", 8)
    d.ellipse((205, 100, 315, 230), "peru")


def _cat(d: Canvas) -> None:
    for left in (110, 270):
        d.polygon([(left, 130), (left + 35, 20), (left + 80, 110)], "sienna")
    d.ellipse((100, 70, 360, 290), "peru", "sienna", 6)
    for x in (170, 290):
        d.ellipse((x - 25, 140, x + 25, 190), "greenyellow", "black", 4)
        d.ellipse((x - 6, 145, x + 6, 185), "black")
    for x in range(190, 280, 20):
        d.line((x, 80, x, 120), "saddlebrown", 6)
    d.polygon([(215, 215), (245, 215), (230, 235)], "pink")


def _coffee(d: Canvas) -> None:
    for y in range(0, 400, 50):
        d.line((0, y, 600, y), "peru", 3)
    d.ellipse((130, 80, 470, 360), "white")
    d.ellipse((420, 160, 520, 270), None, "white", 20)
    d.ellipse((180, 120, 420, 320), "black")
    d.line((40, 330, 180, 380), "silver", 14)


def _rocket(d: Canvas) -> None:
    d.rectangle((0, 330, 640, 427), "darkorange")
    d.rectangle((200, 380, 440, 427), "dimgrey")
    d.rectangle((290, 120, 350, 380), "white")
    d.polygon([(290, 120), (350, 120), (320, 50)], "firebrick")
    d.rectangle((400, 90, 415, 400), "black")


def _motorcycle(d: Canvas) -> None:
    d.rectangle((0, 400, 741, 500), "dimgrey")
    for x in (130, 480):
        d.ellipse((x, 270, x + 160, 430), "black", "silver", 14)
    d.polygon([(210, 340), (330, 210), (520, 220), (560, 340)], "red")
    d.line((330, 210, 280, 150), "black", 12)


def _galaxies(d: Canvas) -> None:
    chance = random.Random(0)
    for _ in range(250):
        x = chance.randrange(1000)
        y = chance.randrange(872)
        r = chance.randrange(1, 14)
        d.ellipse(
            (x - 2 * r, y - r, x + 2 * r, y + r),
            chance.choice(("white", "lightyellow", "lightblue", "coral")),
        )
