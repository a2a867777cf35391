"""What the owner of a replica may do from the dashboard, and how the dashboard knows the owner."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Protocol

from delta_weight_sync.protocol import Manifest


class Controls(Protocol):
    """A replica's follower as its owner sees it. Methods return at once; the replica acts soon after."""

    paused: bool  # whether it stays at the version that it serves
    pinned: Manifest | None  # the version that it stays at

    def pause(self) -> None:
        """Stay at the version that is served."""

    def resume(self) -> None:
        """Follow the newest version again, whatever it was told before."""

    def pin(self, version: int) -> None:
        """Go to `version` and stay there; raises `ValueError` with a sentence if that cannot be."""

    def heal(self) -> None:
        """Compare all live weights with the published ones, and write what differs."""


@dataclass(frozen=True)
class Owner:
    """Who may use the controls: whoever has the key, or is logged in to Hugging Face as `name`."""

    key: str = ""
    name: str = ""

    def allows(self, key: str, login: str) -> bool:
        """Compare in constant time; what is not set never matches."""
        by_key = bool(self.key) and hmac.compare_digest(key.encode(), self.key.encode())
        by_name = bool(self.name) and hmac.compare_digest(login.encode(), self.name.encode())
        return by_key or by_name
