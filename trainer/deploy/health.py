"""Waits until the Spaces of a deployment are up; a sentence for each way in which they do not get there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from huggingface_hub import HfApi

from trainer import cold_spaces
from trainer.cold_spaces import Answer, SpacesUnavailableError
from trainer.deploy.errors import DeployError, masked
from trainer.deploy.hub import FAILED, PAUSED, log_lines, runtime
from trainer.deploy.stage import App

PATIENCE_S = 3600.0  # the first build pulls vLLM's image, some 10 GB
POLL_S = 5.0
_TROUBLE_S = 120.0  # for what may yet pass: a fault that the Space itself reports, a host name still unknown
_FAILED_S = 15.0  # the Hub may still show how things stood before the last change
_LOG_LINES = 15
_FAULTS = {
    "NO_APP_FILE": "has no files to build; run `up` again",
    "CONFIG_ERROR": "cannot be built as it is configured; correct what the Hub says and run `up` again",
    "BUILD_ERROR": "could not be built; correct what the log says and run `up` again",
    "RUNTIME_ERROR": "ended right after its start; correct what the log says and run `up` again",
}
_HEALTHY = {"env": ("healthy",), "replica": ("serving", cold_spaces.WAITING)}


@dataclass(frozen=True)
class Home:
    """Where a Space's app can be asked."""

    repo_id: str
    app: App
    url: str


class Waiting:
    """One wait for some Spaces. `secrets` are kept out of what is said."""

    def __init__(self, api: HfApi, secrets: tuple[str, ...], say: Callable[[str], None]) -> None:
        self._api, self._secrets, self._say = api, secrets, say
        self._started = time.monotonic()
        self._said: dict[str, str] = {}
        self._troubled: dict[str, float] = {}  # since when

    def until_healthy(self, homes: list[Home]) -> None:
        """Block until every app is up; a replica that waits for the run's first version is.

        Raises `DeployError` for a Space that fails, or is not up within an hour.
        """
        while time.monotonic() < self._started + PATIENCE_S:
            homes = [home for home in homes if not self._healthy(home)]
            if not homes:
                return
            time.sleep(POLL_S)
        states = ", ".join(f"{home.repo_id}: {self._said[home.repo_id]}" for home in homes)
        raise DeployError(f"not up within {PATIENCE_S:.0f} s ({states}); see `logs`, then run `up` again")

    def _healthy(self, home: Home) -> bool:
        answer = self._ask(home)
        state = masked(str(answer), self._secrets)
        if self._said.get(home.repo_id) != state:
            self._said[home.repo_id] = state
            self._say(f"[{time.monotonic() - self._started:5.0f} s] {home.repo_id}: {state}")
        self._lose_patience(home, answer)
        return answer.state in _HEALTHY[home.app] and not answer.error

    def _lose_patience(self, home: Home, answer: Answer) -> None:
        if answer.error is None:
            self._troubled.pop(home.repo_id, None)
            return
        patience = _FAILED_S if answer.state in FAILED else _TROUBLE_S
        if time.monotonic() < self._troubled.setdefault(home.repo_id, time.monotonic()) + patience:
            return
        if answer.state in FAILED:
            raise DeployError(failure(self._api, home.repo_id, answer, self._secrets))
        raise DeployError(masked(f"{home.repo_id} does not get ready: {answer}", self._secrets))

    def _ask(self, home: Home) -> Answer:
        now = runtime(self._api, home.repo_id)
        if now.stage in FAILED:
            return Answer(now.stage, error=now.error or "the Hub gives no reason")
        if now.stage in PAUSED:
            raise DeployError(f"{home.repo_id} was paused meanwhile; `resume` it")
        if now.stage not in ("RUNNING", "SLEEPING"):  # to ask a sleeping one wakes it
            return Answer(now.stage)
        try:
            return cold_spaces.look(home.url, home.app)
        except SpacesUnavailableError as error:
            return Answer(now.stage, error=str(error))


def failure(api: HfApi, repo_id: str, answer: Answer, secrets: tuple[str, ...]) -> str:
    """What is wrong with a Space that failed, with the end of the log that says why."""
    build = answer.state != "RUNTIME_ERROR"
    log = "build" if build else "run"
    sentence = f"{repo_id} {_FAULTS[answer.state]} ({answer.error}). The end of its {log} log:"
    lines = log_lines(api, repo_id, build=build)[-_LOG_LINES:] or ["(nothing)"]
    return masked("\n  ".join([sentence, *lines]), secrets)
