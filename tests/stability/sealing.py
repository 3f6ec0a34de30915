"""Lines of a metric log with their checksum, written without the code under test."""

import json
import zlib


def seal(line: dict | str) -> str:
    """Return a line of the log that says `line`, a JSON object; an old checksum is replaced."""
    if isinstance(line, dict):
        line = json.dumps({key: value for key, value in line.items() if key != "crc"})
    said = line.removesuffix("}")
    return f'{said}, "crc": "{zlib.crc32(said.encode()):08x}"}}\n'
