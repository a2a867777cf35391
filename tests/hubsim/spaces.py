"""What a Space is besides its files: settings, hardware, and the stages that it goes through.

A Space moves on when somebody looks: each `GET .../runtime` shows the present stage and then takes the next
of those `ahead`. So a client that polls sees every stage, at whatever pace, and no test waits for a clock.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from . import front_matter
from .clock import now
from .errors import HubError
from .hardware import CPU_BASIC, TWO_DAYS
from .repos import RepoState

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
    door: str  # URL at which the simulator lets its app be visited
    stage: str = "NO_APP_FILE"
    ahead: list[str] = field(default_factory=list)  # the stages that follow, one per look at the runtime
    builds: Builds = Builds()
    error: str = ""  # shown with the stages that end in ERROR
    hardware: str | None = None  # None until the first start
    requested: str = CPU_BASIC
    sleep_time: int | None = None  # seconds; on cpu-basic it is fixed
    variables: dict[str, Setting] = field(default_factory=dict)
    secrets: dict[str, Setting] = field(default_factory=dict)
    volumes: list[dict[str, Any]] = field(default_factory=list)
    dev_mode: bool = False
    logs: dict[str, list[dict[str, str]]] = field(default_factory=lambda: {"build": [], "run": []})
    live_logs: bool = False  # keep log streams open for lines to come
    upstream: str = ""  # URL of the process that a test runs behind the door
    host: str = ""  # URL that the Hub names as the app's; the door, if a test has not set another

    def __post_init__(self) -> None:
        self.host = self.host or self.door

    @property
    def id(self) -> str:
        return self.repo.id

    def set(self, kind: str, key: str, value: str, description: str | None = None) -> None:
        """Add or replace a variable or a secret. A running app is started again with it."""
        getattr(self, kind)[key] = Setting(key, value, description)
        self.start()

    def unset(self, kind: str, key: str) -> None:
        """Delete a variable or a secret; one that is not there does not matter."""
        if getattr(self, kind).pop(key, None):
            self.start()

    def enter(self, stage: str, *, ahead: tuple[str, ...] = (), error: str = "") -> None:
        """Be in `stage` at once, and later in those `ahead`."""
        self.stage, self.ahead, self.error = stage, list(ahead), error
        self._arrived()

    def start(self) -> None:
        """Start the app again, without a build; what does not run stays as it is."""
        if self.stage in (*START, "RUNNING_APP_STARTING"):
            self._begin(START)

    def build(self) -> None:
        """Build the image from the newest commit and start it."""
        self.log(
            "build", f"===== Build Queued at {now()} / Commit SHA: {self.repo.commits[-1].oid[:7]} ====="
        )
        self._begin(self.builds.stages, self.builds.error)

    def restart(self, *, factory: bool = False) -> None:
        """What the owner's button does: also ends a pause, and builds where there is no image to start."""
        if factory or self.hardware is None or self.stage.endswith("ERROR"):
            self.build()
        else:
            self._begin(START)

    def visit(self) -> str:
        """Somebody opens the app: the stage in which they find it. A sleeping Space wakes up."""
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
        """Append a line to the log of kind "build" or "run"."""
        self.logs[kind].append({"data": f"{line}\n", "timestamp": now()})

    def to_json(self) -> dict[str, Any]:
        """What `space_info` reads beyond what every repository has."""
        subdomain = self.id.replace("/", "-").replace("_", "-").lower()
        shown = {"sdk": self.sdk, "subdomain": subdomain, "host": self.host, "runtime": self.runtime()}
        return {**shown, "cardData": front_matter.parse(self.repo.text("README.md"))}

    def runtime(self) -> dict[str, Any]:
        """What `get_space_runtime` reads."""
        hardware = {"current": self.hardware, "requested": self.requested}
        domain = {"domain": self.host.split("//")[-1], "isCustom": False, "stage": "READY"}
        shown = {"stage": self.stage, "hardware": hardware, "storage": None, "gcTimeout": self._gc_timeout()}
        rest = {"devMode": self.dev_mode, "replicas": {"requested": 1}, "domains": [domain], "sdk": self.sdk}
        error = {"errorMessage": self.error} if self.error and self.stage.endswith("ERROR") else {}
        return shown | rest | error | ({"volumes": self.volumes} if self.volumes else {})

    def _gc_timeout(self) -> int | None:
        return TWO_DAYS if self.requested == CPU_BASIC else self.sleep_time

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
        else:
            self.enter(stages[0], ahead=stages[1:], error=error)

    def _problem(self) -> tuple[str, str] | None:
        """Why there is nothing to run: stage and message."""
        if front_matter.parse(self.repo.text("README.md")).get("sdk") != self.sdk:
            return "CONFIG_ERROR", "Missing configuration in README"
        if self.variables.keys() & self.secrets.keys():
            return "CONFIG_ERROR", "Collision on variables and secrets names"
        if APP_FILE[self.sdk] not in self.repo.files:
            return "NO_APP_FILE", ""
        return None
