"""Joins that vLLM refused for good: what would fail again in the same way is not tried again.

A replica that joins fetches a checkpoint, and a Space is billed while it does. A model whose parameters no
delta fits, and weights that do not have the published digest although they were laid out twice, stay what
they are.
"""

from __future__ import annotations

from delta_weight_sync.protocol import Manifest
from delta_weight_sync.refs import AnchorRef
from delta_weight_sync.vllm.engine import EngineError

_AT_ONCE = {"RouteError", "StepCommitError"}  # of this vLLM as it was started
_NEXT_TIME = {"CodecError"}  # unless what was fetched was damaged on this disk

Wanted = tuple[Manifest | None, AnchorRef, str]
"""What a replica is to serve: one version (None: whatever is newest), the anchor that leads to it, and its
digest where a version is served already: then this model takes deltas, and the next version may be sound."""


class RefusedError(EngineError):
    """A join that is not tried again, until something else is wanted or the refusals are forgotten."""


class Refusals:
    """The follower asks before it goes to a version, and hands every failed join over."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Whatever was refused may be tried again: vLLM is another one, or the owner wants it."""
        self._wanted: Wanted | None = None
        self._suspect: Wanted | None = None
        self._refused: tuple[Wanted, RefusedError] | None = None

    def ask(self, manifest: Manifest, held: Manifest | None, serving: Manifest | None) -> None:
        """Raise `RefusedError` if this was refused while `serving` was; `held` as the first of `Wanted`."""
        self._wanted = held, manifest.anchor, manifest.digest if serving else ""
        if self._refused and self._refused[0] == self._wanted:
            raise self._refused[1]

    def judge(self, error: EngineError) -> None:
        """Decide whether the join that was asked for last, and failed with `error`, is refused for now."""
        suspected, self._suspect = self._suspect, self._wanted if error.kind in _NEXT_TIME else None
        again = self._suspect is not None and suspected == self._suspect
        if self._wanted is None or not (again or error.kind in _AT_ONCE):
            return
        other = "version" if self._wanted[2] else "anchor"
        until = f"not tried again until the run has another {other}, or the owner heals this replica"
        self._refused = self._wanted, RefusedError(f"{error}; {until}", error.kind)
