"""Spaces: their card, settings, and the stages they go through."""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from .common import HubError, now
from .repos import RepoState

CPU_BASIC = "cpu-basic"
TWO_DAYS = 48 * 3600  # seconds without a visit after which a Space on cpu-basic sleeps

FLAVORS = (
    *(CPU_BASIC, "cpu-upgrade", "t4-small", "t4-medium", "l4x1", "l4x4", "l40sx1"),
    *("a10g-small", "a10g-large", "a100-large"),
)
COLORS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")
SDKS = ("gradio", "docker", "static", "streamlit")


def parse_card(text: str) -> dict[str, Any]:
    """The block as a dict; empty if there is none. Raises yaml.YAMLError."""
    match = re.match(r"\s*---\r?\n(.*?)\r?\n---\r?(\n|$)", text, re.DOTALL)
    parsed = yaml.safe_load(match[1]) if match else None
    return parsed if isinstance(parsed, dict) else {}


def card_errors(card: dict[str, Any], kind: str) -> list[str]:
    """The errors that the Hub reports, by those of its rules that can make a deployment fail."""
    if kind == "space":
        return _space_errors(card) if card else []
    return [] if isinstance(card.get("model-index", []), list) else ['"model-index" must be an array']


def _space_errors(card: dict[str, Any]) -> list[str]:
    colors = [name for name in ("colorFrom", "colorTo") if card.get(name, "red") not in COLORS]
    found = [f'"{name}" must be one of [{", ".join(COLORS)}]' for name in colors]
    if card.get("sdk") not in SDKS:
        found.append(f'"sdk" must be one of [{", ".join(SDKS)}]')
    if len(card.get("short_description", "")) > 60:
        found.append('"short_description" length must be less than or equal to 60 characters long')
    if card.get("suggested_hardware", CPU_BASIC) not in FLAVORS:
        found.append('"suggested_hardware" must be a known flavor')
    return found


START = ("APP_STARTING", "RUNNING")
APP_FILE = {"docker": "Dockerfile", "gradio": "app.py", "streamlit": "app.py", "static": "index.html"}
KEY = re.compile(r"[a-zA-Z][_a-zA-Z0-9]*")
README = "---\ntitle: {}\nsdk: {}\n---\n\nCheck out the configuration reference at spaces-config-reference\n"


@dataclass(frozen=True)
class Builds:
    """How the builds of a Space go; a test makes them fail."""

    stages: tuple[str, ...] = ("BUILDING", *START)
    error: str = ""


@dataclass
class Setting:
    """A variable or a secret. What is read back never holds a secret's value."""

    key: str
    value: str
    description: str | None = None
    updated_at: str = field(default_factory=now)

    def __post_init__(self) -> None:
        if not KEY.fullmatch(self.key):
            raise HubError(400, f'"key" with value "{self.key}" fails to match the required pattern')

    def to_json(self, *, secret: bool) -> dict[str, Any]:
        shown = {"key": self.key, "updatedAt": self.updated_at}
        shown |= {"description": self.description} if self.description else {}
        return shown if secret else {**shown, "value": self.value}


@dataclass
class SpaceState:
    """One Space, around the repository with its files."""

    repo: RepoState
    sdk: str
    address: str  # URL of its app on the simulator
    stage: str = "NO_APP_FILE"
    ahead: list[str] = field(default_factory=list)  # the stages that follow, one per look at the runtime
    builds: Builds = Builds()
    error: str = ""  # shown with the stages that end in ERROR
    hardware: str | None = None  # None until the first start
    requested: str | None = CPU_BASIC  # None for a static Space, which runs nothing
    sleep_time: int | None = None  # seconds; on cpu-basic it is fixed
    variables: dict[str, Setting] = field(default_factory=dict)
    secrets: dict[str, Setting] = field(default_factory=dict)
    logs: dict[str, list[dict[str, str]]] = field(default_factory=lambda: {"build": [], "run": []})
    upstream: str = ""  # URL of the process that a test runs for its app
    host: str = ""  # URL of the app that the Hub names

    @property
    def id(self) -> str:
        return self.repo.id

    def set(self, kind: str, key: str, value: str, description: str | None = None) -> None:
        """Add or replace a variable or a secret. A running app is started again with it."""
        getattr(self, kind)[key] = Setting(key, value, description)
        self.start()

    def unset(self, kind: str, key: str) -> None:
        if getattr(self, kind).pop(key, None):
            self.start()

    def enter(self, stage: str, *, ahead: tuple[str, ...] = (), error: str = "") -> None:
        """Be in `stage` now, and later in those `ahead`."""
        self.stage = stage
        self.ahead = list(ahead)
        self.error = error
        self._arrived()

    def start(self) -> None:
        if self.stage in (*START, "RUNNING_APP_STARTING"):
            self._begin(START)

    def build(self) -> None:
        commit = self.repo.commits[-1].oid[:7]
        self.log("build", f"===== Build Queued at {now()} / Commit SHA: {commit} =====")
        self._begin(self.builds.stages, self.builds.error)

    def restart(self, *, factory: bool = False) -> None:
        if factory or self.hardware is None or self.stage.endswith("ERROR"):
            self.build()
        else:
            self._begin(START)

    def visit(self) -> str:
        """A client opens the app: returns the stage it finds. A sleeping Space wakes up."""
        seen = self.stage
        if seen == "SLEEPING":
            self._begin(START)
        else:
            self.look()
        return seen

    def pushed(self) -> None:
        """There is a new commit: build it, unless the owner has paused the Space."""
        if self.stage != "PAUSED":
            self.build()

    def look(self) -> dict[str, Any]:
        """The runtime as of now; the next look finds the next stage."""
        seen = self.runtime()
        if self.ahead:
            self.stage = self.ahead.pop(0)
            self._arrived()
        return seen

    def log(self, kind: str, line: str) -> None:
        self.logs[kind].append({"data": f"{line}\n", "timestamp": now()})

    def to_json(self) -> dict[str, Any]:
        """What `space_info` reads beyond what every repository has."""
        subdomain = self.id.replace("/", "-").replace("_", "-").lower()
        shown = {"sdk": self.sdk, "subdomain": subdomain, "host": self.host, "runtime": self.runtime()}
        return {**shown, "cardData": parse_card(self.repo.text("README.md"))}

    def runtime(self) -> dict[str, Any]:
        """What `get_space_runtime` reads."""
        shown = {
            "stage": self.stage,
            "hardware": {"current": self.hardware, "requested": self.requested},
            "gcTimeout": TWO_DAYS if self.requested == CPU_BASIC else self.sleep_time,
            "sdk": self.sdk,
        }
        return shown | ({"errorMessage": self.error} if self.stage.endswith("ERROR") and self.error else {})

    def _arrived(self) -> None:
        if self.stage == "APP_STARTING":
            self.logs["run"].clear()
            self.log("run", f"===== Application Startup at {now()} =====")
        elif self.stage == "RUNNING":
            self.hardware = self.requested

    def _begin(self, stages: tuple[str, ...], error: str = "") -> None:
        """Go through `stages`, unless the files or the settings forbid it."""
        if problem := self._problem():
            self.enter(problem[0], error=problem[1])
        elif self.sdk == "static":
            self.enter("RUNNING")
        else:
            self.enter(stages[0], ahead=stages[1:], error=error)

    def _problem(self) -> tuple[str, str] | None:
        """Why there is nothing to run: stage and message."""
        if parse_card(self.repo.text("README.md")).get("sdk") != self.sdk:
            return "CONFIG_ERROR", "Missing configuration in README"
        if self.variables.keys() & self.secrets.keys():
            return "CONFIG_ERROR", "Collision on variables and secrets names"
        if APP_FILE[self.sdk] not in self.repo.files:
            return "NO_APP_FILE", ""
        return None
