"""Reads the pages of the documentation as their readers do: blocks, commands, studies in short."""

import re

import yaml

__all__ = ["blocks_of", "commands_of", "in_short"]


def blocks_of(text):
    """Return the fenced blocks of a page: language and content."""
    return re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL)


def commands_of(blocks):
    """Return the commands of a page's shell blocks, without comments."""
    return [
        line.split(" #")[0].strip()
        for language, block in blocks
        if language in ("sh", "bash")
        for line in block.splitlines()
        if line.strip() and not line.startswith("#")
    ]


def in_short(text):
    """Return a template's study with one seed, six steps, and a small model where it names one."""
    content = yaml.safe_load(text)
    base = content["base"]
    base["train"].update(steps=6, snapshot_steps=[2, 4])
    if "model" in base:
        base["model"] = {"depth": 1, "width": 32, "heads": 1, "context": 16, "vocab_size": 256}
        base["train"].update(batch_size=2, checkpoint_every=3)
        content["early_step"] = 2
    for arm in content["arms"].values():
        arm.update({"until": 4} if "until" in arm else {})
    content["seeds"], content["policy"]["step"] = [0], 4
    return yaml.safe_dump(content)
