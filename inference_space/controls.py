"""The owner's controls of the dashboard, as orders to this Space's follower."""

from __future__ import annotations

from delta_weight_sync.vllm.orders import Orders
from inference_space.dashboard.controls import Following


class FollowerControls:
    """The dashboard's `Controls`; each takes effect at the follower's next turn."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self.pause, self.resume, self.pin, self.heal = orders.pause, orders.resume, orders.pin, orders.heal

    def following(self) -> Following:
        """What the replica follows now."""
        pinned = self._orders.pinned
        return Following(paused=self._orders.paused, pinned=pinned.version if pinned else None)
