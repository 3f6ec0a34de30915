"""Passwords and keys of a command: on record a hash stands in their place, and all can be shared.

Two arms with one key still say the same, and one with another key differs. What holds one is told
by its name, as `--api-key` and `HF_TOKEN`, or by its form, as `postgres://name:password@host`. A
hash hides what nobody can guess, which a short password is not, and a name that is not known here
hides nothing. Leaves out what a script prints, and files that it reads.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "MASKED",
    "has_masked",
    "is_secret",
    "masked_text",
    "masked_values",
    "masked_words",
    "secrets_in",
    "without_secrets",
]

MASKED = "masked:"
"""How what stands in a value's place begins; its hash follows."""

_OF_TOKENS = (
    "hf|hub|huggingface|api|auth|access|session|security|secret|bearer|refresh|wandb|git|github|"
    "gitlab|slack|npm|pypi|login|sas|neptune|mlflow|tracking"
)
"""What a token that lets somebody in is of; all others, as `eos_token`, are of a language."""
_KEYS = "api|access|private|auth|secret|account|wandb|openai|anthropic|signing|encryption"
_NAME = (
    r"(?:[\w+-]*[-_+])?(?:secrets?|passw(?:or)?d|passphrase|pwd|credentials?"
    rf"|(?:{_KEYS})[-_]?keys?(?:[-_]id)?)(?:[-_](?:access[-_]?)?(?:key|value))?"
    rf"|(?:[\w+-]*[-_+])?(?:{_OF_TOKENS})[-_]?token|token|[\w-]*signature|sig|pgpassword"
)
_VARIABLE = r"(?!(?:EOS|BOS|PAD|UNK|SEP|CLS|MASK|MAX)_)[A-Z0-9_]+_(?:TOKEN|PASS|PAT)"
_SECRET = re.compile(rf"(?i:{_NAME})|{_VARIABLE}")
_ABOVE = re.compile(r"(?i:secrets?|credentials?)")
"""What all that is below is secret, as `secrets.mine`."""
_INSIDE = re.compile(
    rf"""(?<![\w.+-])(-{{0,2}})((?:[\w-]+\.)*(?:(?i:{_NAME})|{_VARIABLE}))"""
    r"""(["']\s*:\s*["']?|=["']?|\s+(?!-))(?!\{\w+\})([^\s"',;&}\]]+)"""
)
"""A flag, a setting, a member of JSON or a part of an address's query, inside of a text."""
_BY_FORM = re.compile(
    r"(?<![\w-])(?:hf_|sk-|ghp_|github_pat_|AKIA)[\w-]{16,}|(?<=Bearer )[\w.-]{8,}"
)
"""Keys of some services, whatever they are given as."""
_IN_ADDRESS = re.compile(r"(?<=https://)[^\s/@'\"]+(?=@)|(?<=://)[^\s/@'\":]+:[^\s/'\"]+(?=@)")
_FLAG = re.compile(r"--?[A-Za-z][\w.\-/]*")
_LIKE_FLAG = re.compile(r"-[A-Za-z](?=[\w\-]*\d)[\w\-]{7,}")
"""A value after a secret's flag that begins as a flag does, and is none by its look."""
_PLACEHOLDER = re.compile(r"\{\w+\}")
_NO_SECRET = re.compile(r"(?i:true|false|none|null|yes|no)|[-+]?[\d.]{1,5}")
"""Whether there is one, or a number of something."""
_DONE = re.compile(rf"{MASKED}[0-9a-f]{{16}}")
_LEAST = 6
"""Characters of a secret that is looked for in a message: others are parts of words."""


def is_secret(name: str) -> bool:
    """Whether what is called `name`, as a flag or a variable, holds a password or a key.

    Of a name with dots the last part counts, and whether it is below a `secrets`.
    """
    *above, last = name.lstrip("-+~").split(".")
    return bool(_SECRET.fullmatch(last)) or any(map(_ABOVE.fullmatch, above))


def masked_words(words: Sequence[str]) -> list[str]:
    """Return a command's words with what is secret in them masked."""
    found: list[str] = []
    before = ""
    for word in words:
        name, equals, value = word.partition("=")
        is_value = is_secret(before) and (not _FLAG.fullmatch(name) or _LIKE_FLAG.fullmatch(word))
        # a word of a shell's has more in it than this
        is_whole = word.startswith("-") or not re.search(r"[\s,;]", value)
        if is_value:
            found.append(_mask(word))
        elif equals and is_whole and is_secret(name):
            found.append(f"{name}={_mask(value)}")
        else:
            found.append(masked_text(word))
        before = word if _FLAG.fullmatch(word) and not is_value else ""
    return found


def masked_text(text: str) -> str:
    """Return a text with passwords in addresses masked, and those of flags that stand in it."""
    text = _IN_ADDRESS.sub(lambda found: _mask(found[0]), text)
    text = _INSIDE.sub(_mask_inside, text)
    return _BY_FORM.sub(lambda found: _mask(found[0]), text)


def masked_values(value: Any, name: str = "") -> Any:
    """Return JSON values, as of a config, with what is called, or is below, a secret's name masked.

    Masked once more they stay as they are.
    """
    if isinstance(value, Mapping):
        return {key: masked_values(x, f"{name}.{key}") for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked_values(item, name) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if is_secret(name):
        masked = _mask(str(value))
        return value if masked == str(value) else masked
    return masked_text(value) if isinstance(value, str) else value


def without_secrets(text: str, words: Sequence[str], env: Mapping[str, str]) -> str:
    """Return a message without what a command was given in secret, which it may quote."""
    known = {x: instead for x, instead in secrets_in(words, env).items() if len(x) >= _LEAST}
    if known:
        longest = sorted(known, key=len, reverse=True)
        text = re.sub("|".join(map(re.escape, longest)), lambda found: known[found[0]], text)
    return masked_text(text)


def secrets_in(words: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return what a command is given in secret, each with what stands in its place on record."""
    given = [*words, *env.values()]
    masked = [*masked_words(words), *masked_values(dict(env)).values()]
    found: dict[str, str] = {}
    for text, instead in zip(given, masked, strict=True):
        kept = [re.escape(part) for part in _DONE.split(instead)]
        inside = re.fullmatch("(.+?)".join(kept), text, flags=re.DOTALL)
        if inside and len(kept) > 1:
            found |= dict(zip(inside.groups(), _DONE.findall(instead), strict=True))
    return found


def has_masked(value: Any) -> bool:
    """Whether something in JSON values is masked: no command can be made of them."""
    if isinstance(value, Mapping):
        return any(map(has_masked, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_masked, value))
    return isinstance(value, str) and _DONE.search(value) is not None


def _mask(text: str) -> str:
    if not text or _PLACEHOLDER.fullmatch(text) or _NO_SECRET.fullmatch(text) or _DONE.search(text):
        return text
    return MASKED + hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _mask_inside(found: re.Match[str]) -> str:
    dashes, name, between, value = found.groups()
    is_told = dashes or not between.isspace()  # a word of a sentence is none
    return f"{dashes}{name}{between}{_mask(value)}" if is_told else found[0]
