"""Tells the replicas of a new version, so that they need not wait for their next look at the bucket.

A poke says "look now" and nothing else. A replica that gets none finds the version all the same, a moment
later; so nobody waits for pokes, and nobody minds where one fails.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import httpx

from trainer import space_access

PATH = "/delta_weight_sync/poke"
TIMEOUT_S = 5.0


class Pokes:
    """A thread per replica: one that does not answer keeps none of the others waiting."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises `ValueError` for a key that no header can hold."""
        self._http = httpx.Client(timeout=TIMEOUT_S)
        self._closed = False
        self._news = [threading.Event() for _ in urls]
        self._threads = [
            threading.Thread(
                target=self._poke, args=(url, space_access.headers(url), news), name="poke", daemon=True
            )
            for url, news in zip(urls, self._news, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, _: object = None) -> None:
        """Poke all, whatever the version is; returns at once. Where one is on its way, one more follows."""
        for news in self._news:
            news.set()

    def close(self) -> None:
        """Stop, at the latest when the requests that are on their way have failed."""
        self._closed = True
        self.send()
        for thread in self._threads:
            thread.join()
        self._http.close()

    def _poke(self, url: str, headers: dict[str, str], news: threading.Event) -> None:
        while news.wait() and not self._closed:
            news.clear()
            with contextlib.suppress(httpx.HTTPError):
                self._http.post(f"{url}{PATH}", headers=headers)
