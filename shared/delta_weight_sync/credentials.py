"""Credentials go only to the user's own Spaces, which the environment variable `SPACES` lists.

So a mistyped URL receives none. No secret is part of a URL, an option or a log line.
"""

import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from delta_weight_sync.errors import ConfigError

_SENDABLE: Final = re.compile(r"[!-~]*")
# Only URLs that all programs parse in the same way: no user name, no backslash, no host that ends in a dot.
_URL: Final = re.compile(r"(?a)(https?)://([\w.-]*\w|\[[\da-f:]+\])(?::(\d+))?(?:/.*)?", re.IGNORECASE)
_ON_THE_HUB: Final = (".hf.space", ".hf.jobs")  # hosts of Spaces, and of the ports that Jobs expose
_own = defaultdict[str, set[str]](set)  # value of `SPACES` -> the URLs that it has named so far


def expand(entries: Iterable[str]) -> list[str]:
    """The URLs among the entries, and the URLs in the files that the other entries name."""
    words = " ".join(entry if "://" in entry else Path(entry).read_text() for entry in entries).split()
    return [word.rstrip("/") for word in words]


def is_own(url: str) -> bool:
    """Whether `SPACES` lists a URL with this URL's scheme, host and port. Raises `ConfigError`."""
    origin = _origin(url)
    listed = os.environ.get("SPACES", "")
    own = _own[listed]
    try:
        own.update(expand(listed.split()))
    except OSError as error:
        if not own:  # otherwise the file is perhaps being replaced
            raise ConfigError(
                f"SPACES must have URLs or files with URLs; this is neither: {error}"
            ) from error
    return origin is not None and origin in map(_origin, own)


def hub_token(url: str) -> str:
    """`SPACE_HF_TOKEN`, for an own private Space or an own Job's port on the Hub; "" for any other URL.

    Never `HF_TOKEN`, which can write. Raises `ConfigError` for a bad value.
    """
    origin = _origin(url)
    if origin is None or (origin[0], origin[2]) != ("https", 443) or not origin[1].endswith(_ON_THE_HUB):
        return ""
    from huggingface_hub import get_token  # takes a second to import, and most commands ask no Space

    token = variable("SPACE_HF_TOKEN") if is_own(url) else ""
    if token and token == get_token():
        raise ConfigError("SPACE_HF_TOKEN is HF_TOKEN, which may write: set it to a token of type Read")
    return token


def variable(name: str) -> str:
    """The value of an environment variable, to send in a header. Raises `ConfigError`."""
    value = os.environ.get(name, "").strip()
    if not _SENDABLE.fullmatch(value):
        raise ConfigError(f"{name} cannot be sent in a header: set it to printable ASCII without spaces")
    return value


@functools.cache
def _origin(url: str) -> tuple[str, str, int] | None:
    """Scheme, host and port that a request to `url` reaches; None if `url` is not a plain URL."""
    if not (match := _URL.fullmatch(url)):
        return None
    scheme = match[1].lower()
    return scheme, match[2].lower(), int(match[3] or {"http": 80, "https": 443}[scheme])
