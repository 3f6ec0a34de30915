"""A model of Hugging Face named by its folder or config.json, as the values of a `ModelConfig`.

The whole config goes into the arm's own, so that a record says what was trained, and a run goes on
whatever has become of the folder. Every dropout in it is set to 0, which the record shows: the
attention that a study puts in place drops nothing, and a shadow could not drop the same. Leaves out
transformers itself, which isn't needed to read a config.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stability.config.convert import Place
from stability.config.model import HUGGINGFACE, shape_of

__all__ = ["is_huggingface", "model_of_folder"]

_CONFIG = "config.json"
_MOST_BYTES = 2**20
_NEEDED = ("depth", "width", "heads", "context", "vocab_size")
_OF_A_FILE = ("_name_or_path", "transformers_version")
"""What a config.json says of how it was written."""


def is_huggingface(name: str) -> bool:
    """Whether `name` is a folder with a config.json, or such a file."""
    path = Path(name)
    return (path / _CONFIG).is_file() or (path.suffix == ".json" and path.is_file())


def model_of_folder(name: Any, values: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return the values of the model whose config lies in the folder or file `name`.

    `values` go over those of the config: `context`, a shorter one, `weights`, `random` or `given`
    (those of the folder, `random` by default), and what the config does not tell. ConfigError for
    a folder without a config, one that is damaged, or that tells no shape of a decoder.
    """
    if not isinstance(name, str) or not is_huggingface(name):
        raise place.error(f"must be a folder with a config.json, or such a file, got {name!r}")
    path = Path(name) / _CONFIG if Path(name).is_dir() else Path(name)
    config = _read(path, place)
    rest = {key: value for key, value in values.items() if key not in ("hf", "weights")}
    model = {**shape_of(config), **rest}
    lacking = [key for key in _NEEDED if key not in model]
    if lacking:
        raise place.error(
            f"{path} must be the config of a decoder, and does not tell its {', '.join(lacking)}; "
            "give them beside hf"
        )
    options = {
        "folder": str(path.parent),
        "weights": values.get("weights", "random"),
        "config": config,
    }
    return {**model, "builder": HUGGINGFACE, "options": options}


def _read(path: Path, place: Place) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"holds more than {_MOST_BYTES} bytes")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise place.error(f"{path} must be a config of transformers: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise place.error(f"{path} must be a config of transformers, and has no model_type")
    kept = {key: value for key, value in config.items() if key not in _OF_A_FILE}
    return {key: 0.0 if _drops(key, value) else value for key, value in kept.items()}


def _drops(key: str, value: Any) -> bool:
    names = "drop" in key or key.endswith("pdrop")
    return names and isinstance(value, float) and 0 < value < 1
