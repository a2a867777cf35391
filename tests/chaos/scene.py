"""A run with its trainer and its followers, in which one fault after another strikes."""

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.chaos.actor import Actor, Died, Failed, Local
from tests.chaos.faulty import RUN, Fault, Vandal, flip_bit
from tests.chaos.followers import Claim, Kept, Living, Replica, read_kept
from tests.chaos.trainer import Published, Trainer, Truth
from tests.support.hubsim import HubSim

GRACE_S = 0.3, 1.0  # between two versions of a run that recovers: at first, at most
TRIES = 30
BETWEEN_S = 3.0  # between a commit, whose bits are checked immediately, and its report, on a busy machine


class NotSurvived(Exception):  # noqa: N818
    """Something did not come back in time, or in another way than it should."""


class NotStruck(Exception):  # noqa: N818
    """The fault did not happen; another one is drawn."""


class Place(NamedTuple):
    url: str
    folder: Path
    environ: Mapping[str, str]
    hub: HubSim | None = None
    poll_s: float = 0.01
    base: Path | None = None  # the checkpoint that the trainer begins with, if vLLM has to read it

    @property
    def truth(self) -> Path:
        return self.folder / "truth"


class Trainers:
    """One trainer: a process, or one for each of its ranks."""

    def __init__(self, place: Place, seed: int, ranks: int) -> None:
        folder = place.folder / "trainer"
        url = f"{place.url}#{RUN}"
        temporary = place.folder / "tmp"
        meeting = str(place.folder / f"ranks-{seed}")
        temporary.mkdir(exist_ok=True)
        self.ranks = [
            Actor(
                *(Trainer, url, folder, place.truth, seed, (rank, ranks, meeting), place.base),
                environ={**place.environ, "TMPDIR": str(temporary)},
            )
            for rank in range(ranks)
        ]

    def open(self) -> None:
        self.call("open")

    def step(self, *, large: bool = False, full: bool = False) -> Published:
        return self.call("step", large, full)[0]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        self.send(method, *arguments)
        return self.answers()

    def send(self, method: str, *arguments: Any) -> None:
        for rank in self.ranks:
            rank.send(method, *arguments)

    def answers(self) -> list[Any]:
        return [rank.answer() for rank in self.ranks]

    def first(self, method: str, *arguments: Any) -> Any:
        """The first rank's answer: that one alone writes to the bucket."""
        return self.ranks[0].call(method, *arguments)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def close(self) -> None:
        self.send("close")
        for rank in self.ranks:
            with contextlib.suppress(Died, Failed):
                rank.answer()
            rank.close()


class Member:
    """A follower. Its kind: "local" (in this process), "process", "kept" (the command) or "vllm"."""

    def __init__(self, name: str, kind: str, place: Place) -> None:
        self.name = name
        self.kind = kind
        self.place = place
        self.actor: Any = None
        self.folder = place.folder / name
        self.starts = 0  # how many starts of its vLLM have a reason
        self.tainted: int | None = None  # the version during which a fault changed its memory

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.starts = 1
        self.tainted = None
        url = self.place.url
        environ = self.place.environ
        poll_s = self.place.poll_s
        if self.kind == "local":
            self.actor = Local(Replica(url, self.folder, self.place.truth, poll_s))
        elif self.kind == "process":
            self.actor = Actor(Replica, url, self.folder, self.place.truth, poll_s, environ=environ)
        elif self.kind == "kept":
            self.actor = Actor(Kept, url, self.folder, poll_s, environ=environ)
        else:
            self.actor = Living(url, self.folder, environ)

    def claim(self) -> Claim | None:
        """What it says; None if that cannot be known."""
        if self.kind == "kept":
            return read_kept(self.folder)
        with contextlib.suppress(Died):
            return self.actor.call("claim")
        return None

    def heal(self) -> None:
        """Let it fetch a whole version; the command cannot be asked to."""
        if self.kind != "kept":
            self.actor.call("heal")

    def revive(self) -> bool:
        if self.actor.alive:
            return False
        self.actor.kill()
        self.start()
        return True

    def killed(self) -> None:
        self.actor.signal(signal.SIGKILL)
        self.actor.process.join(30)
        self.actor.kill()

    def damage_disk(self, rng: Random) -> None:
        """A bit of a file that it kept changes while it does not run, and it starts."""
        claim = self.claim() if self.kind == "kept" else None
        files = [path for path in self.folder.rglob("*.safetensors") if path.is_file()]
        if files:
            flip_bit(rng.choice(sorted(files)), rng.randrange(100))
        self.start()
        self.tainted = claim.version if claim else None  # until it has looked


def checked(member: Member, truth: Truth) -> tuple[Claim | None, str]:
    """What the member claims, and what is wrong with it.

    Invariant: the live digest is the one that was handed over for the claimed version.
    """
    deadline = time.monotonic() + BETWEEN_S
    while True:
        try:
            claim = member.claim()
        except Failed as error:
            raise NotSurvived(f"{member.name} cannot say what it does: {error}") from None
        if claim is None or claim.version is None or claim.version == member.tainted:
            return claim, ""
        if member.kind == "vllm":
            handed_over = claim.digest if truth.holds(claim.digest) else None
        else:
            handed_over = truth.digest(claim.writer, claim.sync)
        if claim.held == claim.digest == handed_over and not claim.wrong:
            return claim, ""
        if time.monotonic() > deadline:
            return claim, f"{member.name} claims {claim}, handed over was {handed_over}"
        time.sleep(0.005)


class Scene:
    """Waits for everything that should happen, and never forever."""

    def __init__(self, place: Place, *, ranks: int, cast: Mapping[str, str], patience_s: float) -> None:
        """`cast`: the kind of each follower by its name."""
        self.patience_s = patience_s
        self.place = place
        self._ranks = ranks
        self._trainers = 0
        self.truth = Truth(place.truth)
        self.wrong = list[str]()
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
        """Let the trainer take the run over; if it dies, another one."""
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
        """The next version; if the trainer fails, by a new one."""
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
        deadline = time.monotonic() + self.patience_s
        grace = GRACE_S[0]
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
        while [member for member in self.members if not self._is_at(member, published)]:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def _is_at(self, member: Member, published: Published) -> bool:
        """Whether it serves that version; if it is dead, it is started again."""
        if member.revive():
            self.notes.append(f"{member.name} was started again")
        claim = self.check(member)
        return claim is not None and (claim.version, claim.digest) == published

    def check(self, member: Member) -> Claim | None:
        """Note it if the member breaks the invariant."""
        claim, problem = checked(member, self.truth)
        if problem:
            self.wrong.append(problem)
        return claim

    def _claims(self) -> dict[str, Claim | None]:
        return {member.name: member.claim() for member in self.members}

    def until_struck(self, struck: Callable[[], bool], member: Member) -> None:
        """Publish until the fault has happened; halfway, the follower is healed."""
        for attempt in range(12):
            if attempt == 6:
                member.heal()
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

        self.until_struck(struck, member)

    def choose(self, rng: Random, *kinds: str) -> Member:
        return rng.choice([member for member in self.members if not kinds or member.kind in kinds])

    def close(self) -> None:
        """End all; raises `AssertionError` if something does not end."""
        for member in self.members:
            if member.actor:
                member.actor.close()
        self.trainer.close()
        self.vandal.close()


Strike = Callable[[Scene, Random], str]
"""Makes one thing go wrong and describes it; raises `NotStruck` if it cannot, and `NotSurvived`."""
