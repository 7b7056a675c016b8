"""Untrusted media in the data tool: paths that lead away, files that open others, large sizes."""

import resource
import struct
import time
import zlib
from pathlib import Path

import pytest
from PIL import Image

from tests.data import datasets
from tests.data.media import encoded, video, write
from tests.data_tools.test_convert import bomb


def asked(kind: str, *references: str) -> list[dict]:
    turns = [{"from": "human", "value": f"<{kind}>"}, {"from": "gpt", "value": "Yes."}]
    return [{kind: name, "conversations": turns} for name in references]


def converted(tmp_path: Path, records: list[dict]) -> tuple[bytes, dict[str, int]]:
    out, report = datasets.converted(tmp_path, records, workers=1)
    return b"".join(path.read_bytes() for path in sorted(out.rglob("*.tar"))), report.refused["in.json"]


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
    outside = "../secret/image.png link.png relative.png chain.png folder/image.png ~/.ssh/id_rsa".split()
    outside += f"{'../' * 8}etc/passwd /etc/passwd /proc/self/environ /dev/zero".split()
    outside += [
        f"{start}{tmp_path}/secret/image.png" for start in ("", "file://", "FILE://", "good.png/../..")
    ]
    written, refused = converted(tmp_path, asked("image", "good.png", *outside))
    assert secret not in written and encoded(40, 40) in written and b"root:" not in written
    assert sum(refused.values()) == len(outside)
    assert set(refused) <= {"outside the media root", "medium missing"}


PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nfile://CLIP\n#EXT-X-ENDLIST\n"
HOSTILE = {
    # Playlists, concatenations and streaming descriptions under a video's name.
    "list.m3u8": PLAYLIST,
    "list.mp4": PLAYLIST,
    "concat.mp4": "ffconcat version 1.0\nfile CLIP\n",
    "manifest.mp4": '<?xml version="1.0"?><MPD><Period><AdaptationSet><Representation><BaseURL>CLIP</BaseURL>'
    "</Representation></AdaptationSet></Period></MPD>",
    # Pillow would hand EPS to Ghostscript; ImageMagick's scripts name files.
    "program.eps": "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 30 30\n%%EndComments\n(x) run\nshowpage\n",
    "vector.svg": '<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "script.mvg": "push graphic-context\nimage over 0,0 0,0 '/etc/passwd'\npop graphic-context\n",
    "page.pdf": "%PDF-1.4\n1 0 obj<<>>endobj\n",
}


def test_media_that_name_files_or_start_programs_are_not_opened(tmp_path, secret):
    records = asked("image", "good.png")
    for name, text in HOSTILE.items():
        write(tmp_path / "media" / name, text.replace("CLIP", f"{tmp_path}/secret/clip.mp4").encode())
        records += asked("video" if name.endswith(("m3u8", "mp4")) else "image", name)
    _, refused = converted(tmp_path, records)
    assert refused == {"video does not decode": 4, "image does not decode": 4}


def text_bomb() -> bytes:
    """A small PNG with a text chunk that unpacks to 256 MB."""
    data = encoded(30, 30)
    packed = zlib.compress(b"\0" * (256 << 20), 9)
    body = b"zTXt" + b"Comment\0\0" + packed
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return data[:33] + chunk + data[33:]


def test_bombs_are_refused_by_their_headers(tmp_path, secret):
    bombs = {"header.png": bomb(60_000, 60_000), "limit.png": bomb(65_500, 65_500), "text.png": text_bomb()}
    for name, data in bombs.items():
        write(tmp_path / "media" / name, data)
    real = ["real.png", "real.tif", "real.gif"]
    for name in real:
        Image.new("1", (14_000, 14_000)).save(tmp_path / "media" / name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    _, refused = converted(tmp_path, asked("image", "good.png", *bombs, *real))
    assert refused == {"image too large": 5, "image does not decode": 1}
    # KiB; one of them is 588 MB in RGB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000
    assert time.process_time() - start < 10
