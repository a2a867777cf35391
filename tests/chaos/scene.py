"""A run with its trainer and its followers, in which one fault after another strikes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from random import Random

from tests.chaos.actor import Actor, Died, Failed
from tests.chaos.faulty import Fault
from tests.chaos.members import Member, Place, Trainers
from tests.chaos.replica import Claim
from tests.chaos.trainer import Published
from tests.chaos.truth import Truth
from tests.chaos.vandal import Vandal

DAY_S = 86400.0
GRACE_S = 0.3, 1.0  # between two versions of a run that recovers: at first, at most
TRIES = 30
BETWEEN_S = 3.0  # between a commit, whose bits are checked at once, and what is said of it, on a busy machine


class NotSurvived(Exception):  # noqa: N818
    """Something did not come back in time, or in another way than it should."""


class NotStruck(Exception):  # noqa: N818
    """The fault did not happen; another one is drawn."""


class Scene:
    """Everything is waited for, and not for ever."""

    def __init__(self, place: Place, *, ranks: int, cast: Mapping[str, str], patience_s: float) -> None:
        """`cast`: the kind of each follower by its name."""
        self.patience_s = patience_s
        self.place, self._ranks, self._trainers = place, ranks, 0
        self.truth, self.wrong = Truth(place.truth), []
        self.notes: list[str] = []
        self.vandal = Actor(Vandal, place.url, environ=place.environ)
        self.trainer = self.new_trainer()
        self.members = [Member(name, kind, place) for name, kind in cast.items()]

    def start(self) -> None:
        """Returns when all serve the run's first version."""
        self.open_trainer()
        for member in self.members:
            member.start()
        if not self._all_at(published := self.publish(), self.patience_s):
            raise NotSurvived(f"not all begin at version {published.version}: {self._claims()}")

    def new_trainer(self) -> Trainers:
        self._trainers += 1
        return Trainers(self.place, self._trainers, self._ranks)

    def open_trainer(self) -> None:
        """Let the trainer take the run over, another one where it dies."""
        for _ in range(TRIES):
            try:
                return self.trainer.open()
            except (Died, Failed) as error:
                self.notes.append(f"opening: {error}")
                self.replace_trainer(opened=False)
        raise NotSurvived(f"no trainer can open the run: {self.notes[-1]}")

    def replace_trainer(self, *, opened: bool = True) -> None:
        self.trainer.kill()
        self.trainer = self.new_trainer()
        if opened:
            self.open_trainer()

    def publish(self, *, large: bool = False, full: bool = False) -> Published:
        """The next version, by a new trainer where this one is no more."""
        for _ in range(TRIES):
            try:
                return self.trainer.step(large=large, full=full)
            except (Died, Failed) as error:
                self.notes.append(f"trainer: {error}")
                self.replace_trainer()
                full = False
        raise NotSurvived(f"nothing is published: {self.notes[-1]}")

    def recover(self) -> None:
        """Publish until all are at the newest version, with one start of vLLM for each good reason."""
        deadline, grace = time.monotonic() + self.patience_s, GRACE_S[0]
        while not self._all_at(published := self.publish(), grace):
            if time.monotonic() > deadline:
                raise NotSurvived(f"not all reach version {published.version}: {self._claims()}")
            grace = min(1.5 * grace, GRACE_S[1])
        for member in self.members:
            claim = self.check(member)
            if claim and claim.starts > member.starts:
                raise NotSurvived(f"{member.name} started vLLM {claim.starts} times: {self._claims()}")
            member.tainted = None

    def _all_at(self, published: Published, patience: float) -> bool:
        deadline = time.monotonic() + patience
        while not self._are_at(published):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def _are_at(self, published: Published) -> bool:
        """Whether each of them is; each is asked, and started again where it is dead."""
        there = [self._is_at(member, published) for member in self.members]
        return all(there)

    def _is_at(self, member: Member, published: Published) -> bool:
        if member.revive():
            self.notes.append(f"{member.name} was started again")
        claim = self.check(member)
        return claim is not None and (claim.version, claim.digest) == (published.version, published.digest)

    def check(self, member: Member) -> Claim | None:
        """The invariant: what is held has the digest of what was handed over as the claimed version."""
        deadline = time.monotonic() + BETWEEN_S
        while True:
            try:
                claim = member.claim()
            except Failed as error:
                raise NotSurvived(f"{member.name} cannot say what it does: {error}") from None
            if claim is None or claim.version is None or claim.version == member.tainted:
                return claim
            told = self._told(member, claim)
            if claim.held == claim.digest == told and not claim.wrong:
                return claim
            if time.monotonic() > deadline:
                self.wrong.append(f"{member.name} claims {claim}, handed over was {told}")
                return claim
            time.sleep(0.005)

    def _told(self, member: Member, claim: Claim) -> str | None:
        if member.kind == "vllm":
            return claim.digest if self.truth.holds(claim.digest) else None
        return self.truth.digest(claim.writer, claim.sync)

    def _claims(self) -> dict[str, Claim | None]:
        return {member.name: member.claim() for member in self.members}

    def until_struck(self, struck: Callable[[], bool], force: Callable[[], object] | None = None) -> None:
        """Publish until the fault has happened; `force` is tried halfway."""
        for attempt in range(12):
            if attempt == 6 and force:
                force()
            self.publish()
            deadline = time.monotonic() + 0.15
            while time.monotonic() < deadline:
                if struck():
                    return
                time.sleep(0.003)
        raise NotStruck

    def arm(self, member: Member, fault: Fault) -> None:
        """Let a fault happen to a follower, and see that it does."""
        member.actor.call("arm", fault)

        def struck() -> bool:
            try:
                return not member.actor.alive or member.actor.call("struck") > 0
            except Died:
                return True

        def join() -> None:
            if member.kind != "kept":
                member.actor.call("heal")

        self.until_struck(struck, join)

    def choose(self, rng: Random, *kinds: str) -> Member:
        return rng.choice([member for member in self.members if not kinds or member.kind in kinds])

    def close(self) -> None:
        """End all; raises `AssertionError` where something does not end."""
        for member in self.members:
            if member.actor:
                member.actor.close()
        self.trainer.close()
        self.vandal.close()


Strike = Callable[[Scene, Random], str]
"""Lets one thing go wrong, and says what it was; raises `NotStruck` where it cannot, and `NotSurvived`."""
