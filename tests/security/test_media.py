"""Untrusted media in the data tool: paths that lead away, files that open others, sizes that fill the memory.

tests/data_tools/test_convert.py tests why single references are refused; here, no part of a secret may reach
the data set.
"""

import io
import json
import resource
import struct
import time
import zlib
from pathlib import Path

import pytest
from PIL import Image

from data_tools.convert import ConversionOptions, convert_dataset
from tests.data.media import encoded, video, write
from tests.data_tools.test_convert import bomb

ANSWER = {"from": "gpt", "value": "Yes."}


def asked(kind: str, *references: str) -> list[dict]:
    return [
        {kind: name, "conversations": [{"from": "human", "value": f"<{kind}>"}, ANSWER]}
        for name in references
    ]


def converted(tmp_path: Path, records: list[dict]) -> tuple[bytes, dict[str, int]]:
    """Everything that was written, and the reasons of what was refused."""
    (tmp_path / "in.json").write_text(json.dumps(records))
    report = convert_dataset(
        [tmp_path / "in.json"], ConversionOptions(tmp_path / "media", tmp_path / "out", workers=1)
    )
    written = b"".join(path.read_bytes() for path in sorted((tmp_path / "out").rglob("*.tar")))
    return written, report.refused.get("in.json", {})


@pytest.fixture
def secret(tmp_path) -> bytes:
    """An image beside the media root, with a link, a linked folder and a hard path to it."""
    data = encoded(40, 40, seed=9)
    write(tmp_path / "secret/image.png", data)
    write(tmp_path / "secret/clip.mp4", video(6))
    write(tmp_path / "media/good.png", encoded(40, 40))
    (tmp_path / "media/link.png").symlink_to(tmp_path / "secret/image.png")
    (tmp_path / "media/relative.png").symlink_to("../secret/image.png")
    (tmp_path / "media/folder").symlink_to(tmp_path / "secret")
    (tmp_path / "media/chain.png").symlink_to("link.png")
    return data


def test_files_from_outside_the_media_root_are_not_written(tmp_path, secret):
    outside = "../secret/image.png link.png relative.png chain.png folder/image.png".split()
    outside += [
        f"{scheme}{tmp_path}/secret/image.png" for scheme in ("", "file://", "FILE://", "good.png/../..")
    ]
    outside += (
        "../../../../../../../../etc/passwd /etc/passwd /proc/self/environ /dev/zero ~/.ssh/id_rsa".split()
    )
    written, refused = converted(tmp_path, asked("image", "good.png", *outside))
    assert secret not in written and encoded(40, 40) in written and b"root:" not in written
    assert sum(refused.values()) == len(outside)
    assert set(refused) <= {"outside the media root", "medium missing"}


@pytest.mark.parametrize("name", ["list.m3u8", "list.mp4", "concat.mp4", "manifest.mp4"])
def test_video_that_names_other_files_is_not_followed(tmp_path, secret, name):
    """Tries playlists, concatenations and streaming descriptions under a video's name."""
    clip = tmp_path / "secret/clip.mp4"
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nfile://{clip}\n#EXT-X-ENDLIST\n"
    text = {
        "list.m3u8": playlist,
        "list.mp4": playlist,
        "concat.mp4": f"ffconcat version 1.0\nfile {clip}\n",
        "manifest.mp4": (
            f'<?xml version="1.0"?><MPD><Period><AdaptationSet><Representation><BaseURL>{clip}</BaseURL>'
            "</Representation></AdaptationSet></Period></MPD>"
        ),
    }[name]

    write(tmp_path / "media" / name, text.encode())
    _, refused = converted(tmp_path, asked("image", "good.png") + asked("video", name))
    assert refused == {"video does not decode": 1}


@pytest.mark.parametrize("name", ["program.eps", "vector.svg", "script.mvg", "page.pdf"])
def test_formats_that_start_other_programs_are_not_opened(tmp_path, secret, name):
    """Pillow would hand EPS to Ghostscript; ImageMagick's scripts name files."""
    text = {
        "program.eps": (
            "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 30 30\n%%EndComments\n(x) run\nshowpage\n"
        ),
        "vector.svg": '<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "script.mvg": "push graphic-context\nimage over 0,0 0,0 '/etc/passwd'\npop graphic-context\n",
        "page.pdf": "%PDF-1.4\n1 0 obj<<>>endobj\n",
    }[name]
    write(tmp_path / "media" / name, text.encode("latin-1"))
    _, refused = converted(tmp_path, asked("image", "good.png", name))
    assert refused == {"image does not decode": 1}


def flat(width: int, height: int, kind: str) -> bytes:
    """A real image of one colour, with many pixels in few bytes."""
    out = io.BytesIO()
    Image.new("1", (width, height)).save(out, kind)
    return out.getvalue()


def text_bomb() -> bytes:
    """A small PNG with a text chunk that unpacks to 256 MB."""
    data = encoded(30, 30)
    packed = zlib.compress(b"\0" * (256 << 20), 9)
    body = b"zTXt" + b"Comment\0\0" + packed
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return data[:33] + chunk + data[33:]


def test_bombs_are_refused_by_their_headers(tmp_path, secret):
    """Hundreds of millions of pixels, claimed by a header or really present, and text that
    unpacks without end."""
    bombs = {
        "header.png": bomb(60_000, 60_000),
        "limit.png": bomb(65_500, 65_500),
        "real.png": flat(14_000, 14_000, "PNG"),
        "real.tif": flat(14_000, 14_000, "TIFF"),
        "real.gif": flat(14_000, 14_000, "GIF"),
        "text.png": text_bomb(),
    }

    for name, data in bombs.items():
        write(tmp_path / "media" / name, data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    _, refused = converted(tmp_path, asked("image", "good.png", *bombs))

    assert refused == {"image too large": 5, "image does not decode": 1}
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000
    )  # KiB; one of them is 588 MB in RGB
    assert time.process_time() - start < 10
