"""Damage to a record: bytes, JSON with a right checksum that says odd things, and no plain file.

Each kind of damage is a function of (path, its bytes, a generator), which makes the path anew.
What carries a seal is sealed again in half of the cases, so that readers see values of wrong types,
which a checksum would else keep from them.
"""

import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from stability.records import metric_log, sealed_json

DEEP = 100_000
ESCAPES = "\x1b[31m\x1b]0;title\x07\u202e\u2066\x9b2J\r"
"""Changes a terminal's colour and title, and turns the reading direction."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 10**4000, -(10**400), 2**63, 0.0, -0.0, 1e308, 5e-324),
    *(float("nan"), float("inf"), "nan", "inf", "-inf", "", "0", "1e999", ESCAPES, "x" * 100_000),
    *("../../etc/passwd", "/etc/passwd", "\0", "\ud800", [], {}, [None], [[]], {"": 0}, {"a": {}}),
)


def _torn(path: Path, data: bytes, draw: Random) -> None:
    path.write_bytes(data[: draw.randrange(len(data))] if data else b"")


def _emptied(path: Path, data: bytes, draw: Random) -> None:
    path.write_bytes(b"")


def _flipped(path: Path, data: bytes, draw: Random) -> None:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 8))):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(changed)


def _noise(path: Path, data: bytes, draw: Random) -> None:
    path.write_bytes(draw.randbytes(draw.choice((1, 100, 10_000))))


def _inserted(path: Path, data: bytes, draw: Random) -> None:
    at = draw.randrange(len(data))
    odd = draw.choice((b"\0" * 512, b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"{", ESCAPES.encode()))
    path.write_bytes(data[:at] + odd + data[at:])


def _doubled(path: Path, data: bytes, draw: Random) -> None:
    path.write_bytes(data + data)


def _nested(path: Path, data: bytes, draw: Random) -> None:
    opening, closing = draw.choice(((b"[", b"]"), (b'{"step":', b"}")))
    line = opening * DEEP + (b"0" + closing * DEEP if draw.random() < 0.5 else b"")
    path.write_bytes(data + line + b"\n" if path.suffix == ".jsonl" else line)


def _as_utf_16(path: Path, data: bytes, draw: Random) -> None:
    path.write_bytes(data.decode("latin-1").encode("utf-16"))


def _fifo(path: Path, data: bytes, draw: Random) -> None:
    os.mkfifo(path)


def _socket(path: Path, data: bytes, draw: Random) -> None:
    # the address of a socket may be no longer than 108 bytes
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def _folder(path: Path, data: bytes, draw: Random) -> None:
    path.mkdir()


def _link(path: Path, data: bytes, draw: Random) -> None:
    path.symlink_to(draw.choice((path.name, "/nowhere", "/dev/null", "/dev/zero", "..", "/proc")))


def _gone(path: Path, data: bytes, draw: Random) -> None:
    """Leave nothing."""


def _of_another(path: Path, data: bytes, draw: Random) -> None:
    others = sorted(x for x in path.parents[2].rglob(f"*{path.suffix}") if x.is_file())
    path.write_bytes(draw.choice(others).read_bytes() if others else b"{}")


def _odd_json(path: Path, data: bytes, draw: Random) -> None:
    content = json.loads(data)
    sealed = content.pop("checksum", None)
    change(content, draw)
    if sealed and draw.random() < 0.9:
        sealed_json.write_sealed(path, content)
    else:
        path.write_text(json.dumps(content))


def _odd_line(path: Path, data: bytes, draw: Random) -> None:
    lines = data.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    said = json.loads(lines[at])
    del said[metric_log._CRC]
    change(said, draw)
    text = json.dumps(said).encode()
    lines[at] = metric_log._sealed(text) if draw.random() < 0.9 else text + b"\n"
    if draw.random() < 0.1:
        lines.insert(draw.randrange(len(lines)), lines[at])
    path.write_bytes(b"".join(lines))


def _odd_header(path: Path, data: bytes, draw: Random) -> None:
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header, draw)
    text = json.dumps(header).encode()
    said = draw.choice((len(text), len(text), 2**63, 0, len(data)))
    path.write_bytes(struct.pack("<Q", said) + text + data[8 + size :])


def change(content: Any, draw: Random, values: Sequence[Any] = VALUES) -> None:
    """Change one place of a tree of dicts and lists, at any depth."""
    while True:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        if not keys:
            break
        key = draw.choice(keys)
        below = content[key]
        if isinstance(below, dict | list) and below and draw.random() < 0.8:
            content = below
            continue
        how = draw.random()
        if how < 0.7:
            content[key] = draw.choice(values)
        elif how < 0.85:
            del content[key]
        elif isinstance(content, dict):
            content[draw.choice((ESCAPES, "", "step", "x" * 5000))] = content.pop(key)
        else:
            content.insert(key, draw.choice(values))
        return


Damage = Callable[[Path, bytes, Random], None]

ANY: tuple[Damage, ...] = (
    *(_torn, _emptied, _flipped, _noise, _inserted, _doubled, _nested, _as_utf_16),
    *(_fifo, _socket, _folder, _link, _gone, _of_another),
)
_BY_SUFFIX: dict[str, Damage] = {
    ".json": _odd_json,
    ".jsonl": _odd_line,
    ".safetensors": _odd_header,
}


def damage(path: Path, draw: Random) -> str:
    """Damage the record at `path`, which others may be linked to, and return what was done."""
    data = path.read_bytes()
    odd = _BY_SUFFIX.get(path.suffix)
    how = odd if odd and data and draw.random() < 0.5 else draw.choice(ANY)
    path.unlink()  # a hard link: the others keep their bytes
    how(path, data, draw)
    return how.__name__.strip("_")
