"""Changes of bytes and of JSON values, drawn from a generator."""

from collections.abc import Callable
from random import Random
from typing import Any

ODD: list[Any] = [None, True, 0, -1, 5, 1e308, 0.5, -0.0, 2**70]
ODD += ["", "x", "\0", "\ud800", "<image>", "<|image_pad|>", "../a", "é" * 400]
ODD += [[], {}, [[]], {"a": {}}, ["<image>"], [{"type": "image"}], {"type": "text"}]
ODD += ["file:///etc/passwd", "https://x/y.png"]


def flipped(data: bytes, random: Random) -> bytes:
    out = bytearray(data)
    for _ in range(random.choice([1, 1, 4, 40])):
        out[random.randrange(len(out))] ^= 1 << random.randrange(8)
    return bytes(out)


def cut(data: bytes, random: Random) -> bytes:
    return data[: random.choice([random.randrange(len(data)), len(data) - 1, len(data) // 2, 8, 0])]


def extended(data: bytes, random: Random) -> bytes:
    return data + random.choice([b"\0", b" ", b"\n{}", random.randbytes(40)])


def spliced(data: bytes, random: Random) -> bytes:
    at, to, size = (random.randrange(len(data)) for _ in range(3))
    return data[:at] + data[to : to + size // 4] + data[at:]


def numbers(data: bytes, random: Random) -> bytes:
    """Bytes of a header, where sizes are, set to extremes."""
    out = bytearray(data)
    at = random.randrange(min(len(out), 200))
    out[at : at + 4] = random.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4), b"\0\1\0\0"])
    return bytes(out)


def zeroed(data: bytes, random: Random) -> bytes:
    """A page of a disk set to zeros."""
    page = random.randrange(len(data) // 4096 + 1) * 4096
    return data[:page] + bytes(len(data[page : page + 4096])) + data[page + 4096 :]


def noise(data: bytes, random: Random) -> bytes:
    return random.choice([b"", b"null", b"[]", b"{}", b"\xff\xfe", b'"x"', random.randbytes(100)])


BYTE_CHANGES: list[Callable[[bytes, Random], bytes]] = [flipped, flipped, cut, spliced, numbers, noise]


def edited(value: Any, random: Random, path: tuple[Any, ...] = ()) -> tuple[Any, tuple[Any, ...]]:
    """A JSON value with one edit somewhere within (changed, removed, doubled or renamed), and its path."""
    if not isinstance(value, dict | list) or not value or random.random() > 0.85:
        return _other(value, random), path
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = random.choice(keys)
    path = (*path, key)
    if random.random() < 0.2:
        del (value := value.copy())[key]
        return value, path
    if isinstance(value, dict) and random.random() < 0.2:
        return {name + "s" if name == key else name: each for name, each in value.items()}, path
    changed, path = edited(value[key], random, path)
    value = value.copy()
    value[key] = changed
    return value, path


def _other(value: Any, random: Random) -> Any:
    near: list[Any] = []
    if isinstance(value, bool):
        near = [not value]
    elif isinstance(value, int | float):
        near = [value + 1, value - 1, value * 2, -value, 0]
    elif isinstance(value, str):
        near = [value + "x", value[:-1], value[::-1]]
    elif isinstance(value, list):
        near = [value[1:], value + value[:1], value[::-1]]
    choices = [choice for choice in near if choice != value]
    if choices and random.random() < 0.7:
        return random.choice(choices)
    return random.choice([choice for choice in ODD if choice != value])
