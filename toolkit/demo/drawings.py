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


def motif_drawings() -> dict[str, Callable[[], NDArray[np.uint8]]]:
    """Maps each photograph's name to a function that draws it, height x width x 3, always in the same way."""
    return {
        "astronaut": lambda: _paint_picture((512, 512), "midnightblue", _draw_astronaut),
        "chelsea": lambda: _paint_picture((451, 300), "tan", _draw_cat),
        "coffee": lambda: _paint_picture((600, 400), "saddlebrown", _draw_coffee),
        "rocket": lambda: _paint_picture((640, 427), "darkslateblue", _draw_rocket),
        "motorcycle": lambda: _paint_picture((741, 500), "lightgrey", _draw_motorcycle),
        "hubble": lambda: _paint_picture((1000, 872), "black", _draw_galaxies),
    }


def _paint_picture(
    picture_size: tuple[int, int], background: str, paint_motif: Callable[[Canvas], None]
) -> NDArray[np.uint8]:
    picture = Image.new("RGB", picture_size, background)
    paint_motif(ImageDraw.Draw(picture))
    return np.asarray(picture)


def _draw_astronaut(canvas: Canvas) -> None:
    for row in range(0, 200, 40):
        canvas.rectangle((340, row, 512, row + 20), "white" if row % 80 else "firebrick")
    canvas.rectangle((120, 260, 400, 512), "darkorange")
    canvas.ellipse((170, 60, 350, 260), "white", "grey", 8)
    canvas.ellipse((205, 100, 315, 230), "peru")


def _draw_cat(canvas: Canvas) -> None:
    for ear_left in (110, 270):
        canvas.polygon([(ear_left, 130), (ear_left + 35, 20), (ear_left + 80, 110)], "sienna")
    canvas.ellipse((100, 70, 360, 290), "peru", "sienna", 6)
    for x in (170, 290):
        canvas.ellipse((x - 25, 140, x + 25, 190), "greenyellow", "black", 4)
        canvas.ellipse((x - 6, 145, x + 6, 185), "black")
    for x in range(190, 280, 20):
        canvas.line((x, 80, x, 120), "saddlebrown", 6)
    canvas.polygon([(215, 215), (245, 215), (230, 235)], "pink")


def _draw_coffee(canvas: Canvas) -> None:
    for y in range(0, 400, 50):
        canvas.line((0, y, 600, y), "peru", 3)
    canvas.ellipse((130, 80, 470, 360), "white")
    canvas.ellipse((420, 160, 520, 270), None, "white", 20)
    canvas.ellipse((180, 120, 420, 320), "black")
    canvas.line((40, 330, 180, 380), "silver", 14)


def _draw_rocket(canvas: Canvas) -> None:
    canvas.rectangle((0, 330, 640, 427), "darkorange")
    canvas.rectangle((200, 380, 440, 427), "dimgrey")
    canvas.rectangle((290, 120, 350, 380), "white")
    canvas.polygon([(290, 120), (350, 120), (320, 50)], "firebrick")
    canvas.rectangle((400, 90, 415, 400), "black")


def _draw_motorcycle(canvas: Canvas) -> None:
    canvas.rectangle((0, 400, 741, 500), "dimgrey")
    for x in (130, 480):
        canvas.ellipse((x, 270, x + 160, 430), "black", "silver", 14)
    canvas.polygon([(210, 340), (330, 210), (520, 220), (560, 340)], "red")
    canvas.line((330, 210, 280, 150), "black", 12)


def _draw_galaxies(canvas: Canvas) -> None:
    random_generator = random.Random(0)
    for _ in range(250):
        x = random_generator.randrange(1000)
        y = random_generator.randrange(872)
        radius = random_generator.randrange(1, 14)
        canvas.ellipse(
            (x - 2 * radius, y - radius, x + 2 * radius, y + radius),
            random_generator.choice(("white", "lightyellow", "lightblue", "coral")),
        )
