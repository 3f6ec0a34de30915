"""A model of a disk that keeps only what was forced to it, and the states a power cut may leave.

`recorded()` writes down each operation of `records.file_operations` as it is done. `Disk` applies
them one after another and knows what is durable: a file's bytes once it was synced, a name once its
folder was. All else is pending, and a power cut keeps any part of it: of the names in a folder any
subset, in order; of a file's bytes any sectors, up to a length between the old and the new one,
with zeros where data is missing. That is what POSIX promises, less than most file systems keep.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from unittest import mock

from stability.records import file_operations

SECTOR = 512
"""Bytes that reach a disk together."""
MOST = 24
"""States of one moment that are visited; where there are more they are drawn."""

Operation = tuple
Tree = dict[str, bytes | None]
"""What is there by path, None for a folder."""


@contextmanager
def recorded(root: Path) -> Iterator[list[Operation]]:
    """Record the operations on files below `root`, with paths relative to it."""
    operations: list[Operation] = []
    real = {name: getattr(file_operations, name) for name in file_operations.__all__}

    def inside(path: object) -> str:
        return Path(str(path)).resolve().relative_to(root.resolve()).as_posix()

    def noted(name: str):
        def operation(*arguments):
            first = arguments[0]
            is_new = name in ("append_to", "open_lock") and not first.exists()
            done = real[name](*arguments)
            if name == "fill":
                operations.append(("fill", inside(first), first.read_bytes()))
            elif name == "write":
                operations.append(("write", inside(first.name), bytes(arguments[1][:done])))
            elif name == "truncate":
                operations.append((name, inside(first), arguments[1]))
            elif is_new:
                operations.append(("create", inside(first)))
            elif name in ("make_folder", "sync", "unlink"):
                operations.append((name, inside(first)))
            elif name in ("rename", "link"):
                operations.append((name, inside(first), inside(arguments[1])))
            return done

        return operation

    wrapped = {name: noted(name) for name in real if name != "allowed_by"}
    with mock.patch.multiple(file_operations, **wrapped):
        yield operations


@dataclass(eq=False)
class File:
    """A file's bytes on the disk, and the changes that may not be there yet."""

    durable: bytes = b""
    pending: list[tuple[str, int, bytes]] = field(default_factory=list)
    """("cut", length, b"") or ("put", offset, data), in order."""

    @property
    def live(self) -> bytes:
        """What a reader finds as long as the power is on."""
        return _changed(self.durable, self.pending)

    def torn(self, dice: random.Random) -> list[bytes]:
        """Return what a power cut may leave of it, whole and not at all first."""
        if not self.pending:
            return [self.durable]
        count = len(self.pending)
        found = [self.live, self.durable]
        found.append(_changed(self.durable, self.pending[: dice.randint(0, count)]))
        cut = dice.randint(0, len(self.live))
        found.append(self.live[: max(cut, min(len(self.durable), len(self.live)))])
        zeros = bytes(max(0, len(self.live) - len(self.durable)))
        found.append((self.durable + zeros)[: len(self.live)])
        found.append(_sectors(self.durable, self.live, dice))
        if any(kind == "cut" for kind, *_ in self.pending):
            found.append(_changed(self.durable, [c for c in self.pending if c[0] != "cut"]))
        return list(dict.fromkeys(found))


def _changed(content: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    for kind, place, data in changes:
        if kind == "cut":
            content = content[:place] + bytes(max(0, place - len(content)))
        else:
            content = content[:place].ljust(place, b"\0") + data + content[place + len(data) :]
    return content


def _sectors(old: bytes, new: bytes, dice: random.Random) -> bytes:
    """Return the new content with some of its sectors still as they were, or zero."""
    old = old[: len(new)].ljust(len(new), b"\0")
    parts = [(old, new)[dice.random() < 0.5][i : i + SECTOR] for i in range(0, len(new), SECTOR)]
    return b"".join(parts)


@dataclass(eq=False)
class Folder:
    """The names in a folder, and changes to them; a rename changes two at once."""

    durable: dict[str, "File | Folder"] = field(default_factory=dict)
    pending: list[dict[str, "File | Folder | None"]] = field(default_factory=list)

    def view(self, kept: frozenset[int] | None = None) -> dict[str, "File | Folder"]:
        """Return the names with those pending changes that are `kept`; with all, if None."""
        names: dict[str, File | Folder | None] = dict(self.durable)
        for index, change in enumerate(self.pending):
            if kept is None or index in kept:
                names |= change
        return {name: node for name, node in names.items() if node is not None}


class Disk:
    """The disk below one folder, which is there."""

    def __init__(self, tree: Mapping[str, bytes | None] | None = None) -> None:
        self.root = Folder()
        for path, content in sorted((tree or {}).items()):
            folder, name = self._place(path)
            folder.durable[name] = Folder() if content is None else File(content)

    def apply(self, operation: Operation) -> None:
        """Do one operation."""
        kind, path, *rest = operation
        if kind == "sync":
            self._sync(self._node(path))
            return
        if kind in ("write", "truncate"):
            file = self._node(path)
            assert isinstance(file, File)
            place, data = (rest[0], b"") if kind == "truncate" else (len(file.live), rest[0])
            file.pending.append(("cut" if kind == "truncate" else "put", place, data))
            return
        folder, name = self._place(path)
        if kind == "rename":
            target, new = self._place(rest[0])
            assert target is folder, "a rename between folders is not one change"
            folder.pending.append({name: None, new: folder.view()[name]})
        elif kind == "link":
            target, new = self._place(rest[0])
            target.pending.append({new: folder.view()[name]})
        elif kind == "unlink":
            folder.pending.append({name: None})
        elif kind == "make_folder":
            folder.pending.append({name: Folder()})
        else:
            content = [("put", 0, rest[0])] if kind == "fill" else []
            folder.pending.append({name: File(pending=content)})

    def states(self, dice: random.Random) -> Iterator[Tree]:
        """Yield what a power cut may leave now: all of it, or MOST that are drawn."""
        folders, files = self._open()
        switches = [(folder, i) for folder in folders for i in range(len(folder.pending))]
        contents = [file.torn(dice) for file in files]
        total = 2 ** len(switches)
        for options in contents:
            total *= len(options)
        if total <= MOST:
            bits = itertools.product(*[(True, False)] * len(switches))
            chosen = itertools.product(bits, itertools.product(*contents))
        else:
            drawn = (
                (
                    tuple(dice.random() < 0.5 for _ in switches),
                    tuple(dice.choice(options) for options in contents),
                )
                for _ in range(MOST)
            )
            every = tuple(options[0] for options in contents)
            ends = [((kept,) * len(switches), every) for kept in (True, False)]
            chosen = itertools.chain(ends, drawn)
        for bits, picked in chosen:
            kept = {
                folder: frozenset(
                    i for (f, i), bit in zip(switches, bits, strict=True) if f is folder and bit
                )
                for folder in folders
            }
            yield _tree(self.root, kept, dict(zip(files, picked, strict=True)))

    def live(self) -> Tree:
        """Return what is there as long as the power is on."""
        return _tree(self.root, None, {})

    def durable(self) -> Tree:
        """Return what no power cut can take: less names and bytes that are still pending."""
        none = {folder: frozenset() for folder in self._open()[0]}
        return _tree(self.root, none, {file: file.durable for file in self._open()[1]})

    def _open(self) -> tuple[list[Folder], list[File]]:
        """Return the folders and files with pending changes that may be reached."""
        folders: dict[Folder, None] = {}
        files: dict[File, None] = {}
        waiting: list[File | Folder] = [self.root]
        while waiting:
            node = waiting.pop()
            if isinstance(node, File):
                if node.pending:
                    files[node] = None
            elif node not in folders:
                folders[node] = None
                waiting += node.durable.values()
                waiting += [x for change in node.pending for x in change.values() if x is not None]
        return [folder for folder in folders if folder.pending], list(files)

    def _sync(self, node: "File | Folder") -> None:
        node.durable = node.live if isinstance(node, File) else node.view()  # pyright: ignore
        node.pending = []

    def _place(self, path: str) -> tuple[Folder, str]:
        pure = PurePosixPath(path)
        folder = self._node(pure.parent.as_posix())
        assert isinstance(folder, Folder)
        return folder, pure.name

    def _node(self, path: str) -> "File | Folder":
        node: File | Folder = self.root
        for part in PurePosixPath(path).parts:
            assert isinstance(node, Folder)
            node = node.view()[part]
        return node


def _tree(
    folder: Folder,
    kept: Mapping[Folder, frozenset[int]] | None,
    contents: Mapping[File, bytes],
    above: str = "",
) -> Tree:
    tree: Tree = {}
    names = folder.view(None if kept is None else kept.get(folder, frozenset()))
    for name, node in names.items():
        if isinstance(node, Folder):
            tree[above + name] = None
            tree |= _tree(node, kept, contents, f"{above}{name}/")
        else:
            torn = contents.get(node)
            tree[above + name] = node.live if torn is None else torn
    return tree


class Blobs:
    """Files by their content, so that thousands of states can be laid out as links."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[int, tuple[bytes, str]] = {}
        folder.mkdir()

    def name(self, content: bytes) -> str:
        """Return the SHA-256 of a content; one object is hashed once."""
        known = self._names.get(id(content))
        if known is None or known[0] is not content:
            known = self._names[id(content)] = (content, hashlib.sha256(content).hexdigest())
        return known[1]

    def digest(self, tree: Tree) -> str:
        """Return a hash that two trees share only if they are the same."""
        lines = [f"{path} {self.name(c) if c is not None else ''}" for path, c in tree.items()]
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()

    def lay(self, tree: Tree, folder: Path, *, linked: bool) -> None:
        """Lay a tree out in a new folder: as links, to be read only, or as files of its own."""
        folder.mkdir()
        for path, content in sorted(tree.items()):
            if content is None:
                (folder / path).mkdir()
            elif linked:
                blob = self._folder / self.name(content)
                if not blob.exists():
                    blob.write_bytes(content)
                (folder / path).hardlink_to(blob)
            else:
                (folder / path).write_bytes(content)


def tree_of(folder: Path) -> Tree:
    """Return what is on the real disk below a folder."""
    return {
        path.relative_to(folder).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }
