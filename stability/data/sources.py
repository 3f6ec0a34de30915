"""Reads the training text: Python's standard library, a local file, or a data set of the hub.

All are read with `datasets`. Local files are streamed, since `datasets` might otherwise serve a
cached copy of an older content. Leaves out tokens (`tokenizers`) and blocks (`datamodule`).
"""

import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetsError

from stability.config.schema import DataConfig
from stability.data.hub import offline_if_unreachable

__all__ = ["load_texts"]

_LOADERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {"sample_by": "document"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
"""The loader of `datasets`, and its arguments, for each kind of file."""


def load_texts(data: DataConfig) -> list[str]:
    """Return the documents that `data.source` names, in a fixed order; rows of None are left out.

    A hub data set with several configurations is named `name:config`. ValueError, one line,
    for a source that is missing, unreadable, empty, or without the text column.
    """
    path = Path(data.source)
    if data.source == "stdlib":
        texts = _read_stdlib()
    elif path.suffix in _LOADERS or path.exists():
        texts = _read_file(path, data.text_column)
    else:
        texts = _read_hub(data)
    if not any(texts):
        raise ValueError(f"data.source must hold text, got {data.source!r}, which is empty")
    return texts


def _read_stdlib() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda path: path.name)
    rows = {"text": [path.read_text(encoding="utf-8") for path in files]}
    return list(datasets.Dataset.from_dict(rows)["text"])


def _read_file(path: Path, column: str) -> list[str]:
    if not path.is_file():
        raise ValueError(
            f"data.source must be stdlib, a file or a data set, got {str(path)!r}; no such file"
        )
    if path.suffix not in _LOADERS:
        raise ValueError(
            f"data.source must be a file of {', '.join(_LOADERS)}, got {str(path)!r}; convert it"
        )
    if path.stat().st_size == 0:
        return []
    kind, arguments = _LOADERS[path.suffix]
    try:
        with _quiet():
            rows = datasets.load_dataset(
                kind, data_files=str(path), split="train", streaming=True, **arguments
            )
            return list(_texts(rows, column, str(path)))
    except ValueError as error:
        if str(error).startswith("data."):
            raise
        raise ValueError(
            f"data.source must be readable as {path.suffix}, got {str(path)!r}: {_line(error)}"
        ) from error


def _read_hub(data: DataConfig) -> list[str]:
    name, _, configuration = data.source.partition(":")
    try:
        with offline_if_unreachable():
            rows = datasets.load_dataset(name, configuration or None, split=data.split)
    except (OSError, ValueError, DatasetsError) as error:
        raise ValueError(
            f"data.source: {data.source!r} is neither stdlib, a file, nor a reachable data set: "
            f"{_line(error)}"
        ) from error
    return list(_texts(rows, data.text_column, data.source))


def _texts(rows: Iterable[Any], column: str, source: str) -> Iterator[str]:
    for row in rows:
        if column not in row:
            raise ValueError(
                f"data.text_column must be a column of {source} ({', '.join(row)}), got {column!r}"
            )
        text = row[column]
        if text is not None and not isinstance(text, str):
            raise ValueError(
                f"data.text_column must hold strings, got {text!r} in column {column!r} of {source}"
            )
        if text is not None:
            yield text


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep `datasets` from logging what is raised anyway."""
    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(before)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
