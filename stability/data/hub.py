"""Keeps clients of the Hugging Face hub from hanging when there is no network.

They retry for 23 s before they give up. Here one short request decides whether they may ask the hub
or only the local cache. Leaves out what is loaded (`sources`, `tokenizers`).
"""

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import datasets.config
import huggingface_hub.constants as hub

__all__ = ["is_reachable", "offline_if_unreachable"]

_TIMEOUT_SECONDS = 3.0


def is_reachable() -> bool:
    """Whether the hub answers, in whatever way, within 3 seconds; proxies are honoured."""
    request = urllib.request.Request(hub.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Let hub clients use their cache alone inside the block, if the hub does not answer."""
    before = (hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)
    offline = any(before) or not is_reachable()
    # both read their module's constant at each call; the environment only sets it at import
    hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
