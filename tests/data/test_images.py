"""Images of every mode, depth and orientation against values worked out by hand, and damaged files."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageDraw

from megatron_vl.data.sample.frame_archive import PixelError
from megatron_vl.data.sample.images import decode_image, image_size
from megatron_vl.data.sample.medium import UnusableError, inspect_medium

from .media import encoded, image

RED, BLACK, WHITE = [200, 30, 30], [0, 0, 0], [255, 255, 255]
MIDDLE = (16, 16, 47, 47)


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def drawn(mode: str, ground: object, ink: object) -> Image.Image:
    image = Image.new(mode, (64, 64), ground)
    ImageDraw.Draw(image).rectangle(MIDDLE, fill=ink)
    return image


def palette(*colors: int) -> Image.Image:
    image = drawn("P", 0, 1)
    image.putpalette([*colors, *[0] * (768 - len(colors))])
    return image


def png(depth: int, color_type: int, rows: list[bytes], width: int, transparent: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, len(rows), depth, color_type, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = chunk(b"IHDR", header) + (chunk(b"tRNS", transparent) if transparent else b"")
    return b"\x89PNG\r\n\x1a\n" + chunks + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def pixels(data: bytes) -> np.ndarray:
    """[height, width, 3]"""
    return decode_image(data).permute(1, 2, 0).numpy().astype(int)


CLEAR_RED = drawn("RGBA", (0, 0, 0, 0), (*RED, 255))
"""Red in the middle; what lies around it is black, and transparent."""
SCRAP = drawn("LA", (0, 0), (0, 255))
PARTLY = palette(0, 0, 0, 0, 0, 200)
LAID_ON_WHITE = {  # the file, and its middle
    "RGBA png": (saved(CLEAR_RED, "PNG"), RED),
    "LA png": (saved(SCRAP, "PNG"), BLACK),
    "palette png": (saved(PARTLY, "PNG", transparency=0), [0, 0, 200]),
    "palette png of alphas": (saved(PARTLY, "PNG", transparency=b"\0\x80"), [127, 127, 227]),
    "webp": (saved(CLEAR_RED, "WEBP", lossless=True), RED),
    "gif": (saved(PARTLY, "GIF", transparency=0), [0, 0, 200]),
    "RGBA tiff": (saved(CLEAR_RED, "TIFF"), RED),
    "RGBA jpeg 2000": (saved(CLEAR_RED, "JPEG2000"), RED),
    "RGBA tga": (saved(CLEAR_RED, "TGA"), RED),
    "avif": (saved(CLEAR_RED, "AVIF", quality=100, subsampling="4:4:4"), RED),
    "RGB tRNS": (saved(drawn("RGB", (1, 2, 3), (1, 2, 4)), "PNG", transparency=(1, 2, 3)), [1, 2, 4]),
    "L tRNS": (saved(drawn("L", 0, 1), "PNG", transparency=0), [1, 1, 1]),
    "1 tRNS": (saved(drawn("1", 0, 1), "PNG", transparency=0), WHITE),
    "apng": (saved(CLEAR_RED, "PNG", save_all=True, append_images=[drawn("RGBA", "blue", "blue")]), RED),
}


@pytest.mark.parametrize("name", LAID_ON_WHITE)
def test_transparent_pixels_are_white(name):
    data, middle = LAID_ON_WHITE[name]
    got = pixels(data)
    assert abs(got[0, 0] - WHITE).max() == 0
    assert abs(got[32, 32] - middle).max() <= (2 if name == "avif" else 0)


@pytest.mark.parametrize(
    ("color", "seen"),
    [
        ((255, 0, 0, 128), [255, 127, 127]),  # 0 x 128/255 + 255 x 127/255
        ((10, 200, 30, 77), [181, 238, 187]),  # 10 x 77/255 + 178 = 181.02, 238.4, 187.06
        ((0, 0, 0, 1), [254, 254, 254]),
        ((9, 8, 7, 254), [10, 9, 8]),  # 9 x 254/255 + 1 = 9.96
    ],
)
def test_transparency_worked_out_by_hand(color, seen):
    assert pixels(saved(Image.new("RGBA", (4, 4), color), "PNG"))[2, 2].tolist() == seen


def shorts(*values: int) -> bytes:
    return struct.pack(f">{len(values)}H", *values)


TRANSPARENT = [0x0A00] * 3


@pytest.mark.parametrize(
    ("depth", "color_type", "row", "width", "transparent", "seen"),
    [
        (2, 0, b"\x1b", 4, shorts(2), [0, 85, 255, 255]),  # 0 1 2 3; 2 is transparent
        (4, 0, b"\x3f\x10", 4, shorts(3), [255, 255, 17, 0]),
        (16, 0, shorts(0x1234, 0x1235, 0xFFFF, 0), 4, shorts(0x1234), [255, 18, 255, 0]),
        (16, 0, shorts(0, 255, 256, 65535), 4, b"", [0, 0, 1, 255]),
        (16, 4, shorts(0, 0, 0x8000, 0xFFFF), 2, b"", [255, 128]),
        (16, 2, shorts(*TRANSPARENT, *[0x0BFF] * 3), 2, shorts(*TRANSPARENT), [255, 11]),
        (16, 6, shorts(*[0x0AFF] * 3, 0xFFFF, 0, 0, 0, 0), 2, b"", [10, 255]),
    ],
)
def test_png_depths_worked_out_by_hand(depth, color_type, row, width, transparent, seen):
    got = pixels(png(depth, color_type, [row], width, transparent))
    assert got[0].tolist() == [[value] * 3 for value in seen]


RAMP = np.tile(np.arange(0, 65536, 256, dtype=np.uint16), (64, 1))  # column i is i x 256
BIG_ENDIAN = Image.frombytes("I;16B", (256, 64), RAMP.astype(">u2").tobytes())


def grey_tiff(bits: int, data: bytes, width: int, sample_format: int = 1) -> bytes:
    """An uncompressed TIFF of one row."""
    tags = [(256, 4, width), (257, 4, 1), (258, 3, bits), (259, 3, 1), (262, 3, 1), (273, 4, 8)]
    tags += [(277, 3, 1), (278, 4, 1), (279, 4, len(data)), (339, 3, sample_format)]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + directory


@pytest.mark.parametrize(
    "data",
    [
        saved(Image.fromarray(RAMP), "PNG"),
        saved(Image.fromarray(RAMP), "TIFF"),
        saved(BIG_ENDIAN, "TIFF"),
        saved(Image.fromarray(RAMP), "TIFF", compression="tiff_lzw"),
        saved(Image.fromarray(RAMP), "JPEG2000"),
        b"P5\n256 64\n65535\n" + RAMP.astype(">u2").tobytes(),
        png(16, 2, [np.dstack([row[None]] * 3).astype(">u2").tobytes() for row in RAMP], 256),
    ],
    ids=["png", "tiff", "big-endian tiff", "lzw tiff", "jpeg 2000", "pgm", "rgb png"],
)
def test_images_of_16_bits_are_scaled(data):
    got = pixels(data)
    assert got.shape == (64, 256, 3)
    assert (got == np.arange(256)[None, :, None]).all()


def test_images_of_12_bits_are_scaled():
    """In a 16-bit PNG nothing says that they are 12; in a TIFF the header does."""
    assert len(np.unique(pixels(saved(Image.fromarray(RAMP >> 4), "PNG")))) == 16
    tiff = grey_tiff(12, bytes([0x12, 0x3F, 0xFF, 0x80, 0x00, 0x10]), 4)  # 0x123 0xfff 0x800 0x010
    assert pixels(tiff)[0, :, 0].tolist() == [0x12, 0xFF, 0x80, 0x01]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (saved(Image.fromarray(RAMP.astype(np.int32)), "TIFF"), "32-bit integer"),
        (saved(Image.fromarray((RAMP / 65535).astype(np.float32)), "TIFF"), "32-bit float"),
        (saved(Image.fromarray((RAMP / 257).astype(np.float32)), "TIFF"), "32-bit float"),
        (grey_tiff(32, bytes(16), 4), "32-bit integer"),
        (b"Pf\n2 1\n-1.0\n" + bytes(8), "32-bit float"),
    ],
)
def test_images_of_32_bits_are_refused_by_name(data, reason):
    with pytest.raises(PixelError, match=reason):
        decode_image(data)
    with pytest.raises(UnusableError, match=f"x.tif: .*{reason}"):
        inspect_medium("image", "x.tif", data, 1 << 20)


CORNERS = {"top left": (0, 0), "top right": (0, 1), "bottom left": (1, 0), "bottom right": (1, 1)}


def corners(image: np.ndarray) -> tuple[str, str]:
    """Where the white and the grey quarter of an image [height, width] are."""
    height, width = (side // 2 for side in image.shape)
    quarters = image.reshape(2, height, 2, width).mean((1, 3))
    found = sorted(CORNERS, key=lambda name: quarters[CORNERS[name]])
    return found[-1], found[-2]


TURNS = {  # of an image with a white quarter at the top left and a grey one at the top right
    1: ("top left", "top right"),
    2: ("top right", "top left"),
    3: ("bottom right", "bottom left"),
    4: ("bottom left", "bottom right"),
    5: ("top left", "bottom left"),
    6: ("top right", "bottom right"),
    7: ("bottom right", "top right"),
    8: ("bottom left", "top left"),
}


@pytest.mark.parametrize(
    "kind", ["JPEG", "L JPEG", "CMYK JPEG", "PNG", "RGBA PNG", "I;16 PNG", "WEBP", "TIFF"]
)
def test_exif_orientations_are_applied(kind):
    mode, _, form = kind.rpartition(" ")
    image = Image.new("L", (64, 32))
    image.paste(255, (0, 0, 32, 16))
    image.paste(128, (32, 0, 64, 16))
    image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257) if "16" in mode else image
    for orientation, where in TURNS.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = saved(image if "16" in mode else image.convert(mode or "RGB"), form, exif=exif)
        got = pixels(data)
        assert got.shape[:2] == image_size(data) == ((64, 32) if orientation > 4 else (32, 64))
        assert corners(got[..., 0]) == where, orientation


def zeroed(data: bytes) -> bytes:
    half = len(data) // 2
    return data[:half] + bytes(len(data) - half - 2) + data[-2:]


def flipped(data: bytes) -> bytes:
    """One bit of the pixels of an uncompressed PNG changed, which only a checksum shows."""
    at = data.index(b"IDAT") + 60
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


STORED_PNG = saved(Image.fromarray(np.full((20, 20), 77, np.uint8)), "PNG", compress_level=0)
KINDS = "jpeg", "jpeg420", "progressive", "grey_jpeg", "cmyk", "exif"
JPEGS = {kind: encoded(90, 130, kind) for kind in KINDS}
DAMAGED = {f"half of {kind}": data[: len(data) // 2] for kind, data in JPEGS.items()}
DAMAGED |= {f"{kind} with a zeroed half": zeroed(data) for kind, data in JPEGS.items()}
DAMAGED |= {
    "jpeg without its last data": JPEGS["jpeg"][:-4],
    "progressive jpeg without its end": saved(Image.fromarray(image(40, 40)), "JPEG", progressive=True)[:-2],
    "jpeg of the header alone": JPEGS["jpeg"][:200],
    "half of a png": encoded(90, 130, "png")[:20000],
    "png with a zeroed half": zeroed(encoded(90, 130, "png")),
    "png with a changed bit": flipped(STORED_PNG),
    "half of a gif": saved(Image.fromarray(image(40, 40)), "GIF")[:1500],
    "half of a webp": encoded(90, 130, "webp")[:9000],
    "half of a tiff": saved(CLEAR_RED, "TIFF")[:9000],
    "half of a jpeg 2000": saved(CLEAR_RED, "JPEG2000")[:400],
    "half of an avif": saved(CLEAR_RED, "AVIF")[:400],
    "half of a bmp": saved(CLEAR_RED.convert("RGB"), "BMP")[:6000],
    "half of a ppm": saved(CLEAR_RED.convert("RGB"), "PPM")[:6000],
    "a page of HTML": b"<!doctype html><title>404</title>",
    "nothing": b"",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_images_are_refused(name):
    with pytest.raises(PixelError, match="not a readable image"):
        decode_image(DAMAGED[name])
    with pytest.raises(UnusableError, match=r"x\.jpg: not a readable image") as caught:
        inspect_medium("image", "x.jpg", DAMAGED[name], 1 << 20)
    assert caught.value.reason == "image does not decode"


def test_usual_images_are_taken():
    """Also a JPEG with bytes after its end or without its end marker, and one with two images in it."""
    first, second = (Image.new("RGB", (16, 16), (value,) * 3) for value in (90, 10))
    trailing = saved(first, "JPEG") + b"maker's notes"
    two = saved(first, "MPO", save_all=True, append_images=[second])
    yuv = saved(first, "JPEG", subsampling=2, progressive=True)
    stored_rgb = saved(first, "JPEG", keep_rgb=True)
    endless = saved(first, "JPEG")[:-2]
    for data in (trailing, endless, two, yuv, stored_rgb, saved(first, "BMP"), saved(first, "TGA")):
        assert abs(pixels(data) - 90).max() <= 2
        assert not inspect_medium("image", "x", data, 1 << 20).has_more_images


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_first_of_several_images_is_taken(form):
    first, second = (Image.new("RGB", (16, 16), (value,) * 3) for value in (90, 10))
    data = saved(first, form, save_all=True, append_images=[second])
    assert abs(pixels(data) - 90).max() <= 2
    assert inspect_medium("image", "x", data, 1 << 20).has_more_images
