"""What the HTML pages share that commands write: templates and embedded pictures."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image


def template_environment(template_dir: Path) -> Environment:
    """The templates in ``template_dir``. Text that they show is escaped, and a name that is not set is an
    error."""
    return Environment(
        loader=FileSystemLoader(template_dir),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def jpeg_base64(picture: Image.Image, max_size: tuple[int, int]) -> str:
    """A picture as JPEG in base64, shrunk in place to at most ``max_size`` (width, height)."""
    picture.thumbnail(max_size)
    jpeg_buffer = io.BytesIO()
    picture.save(jpeg_buffer, "JPEG", quality=80)
    return base64.b64encode(jpeg_buffer.getvalue()).decode()
