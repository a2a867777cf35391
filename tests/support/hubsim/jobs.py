"""Jobs: real processes of this machine in the place of containers, and their ports behind the Hub's proxy.

Nothing isolates them. A Job's folder stands for its container: the paths /app and of its volumes are replaced
by folders in there, in its command and variables. Its image is the environment that runs the simulator:
`python3` is that Python, installers do nothing, and the library is the Job's own copy. Where a variable that
ends in _PORT names an exposed port, the process gets a free one instead, on loopback only.

Its ports are at https://<id>--<port>.hf.jobs, as on the Hub. `environ` has what a process needs to find them:
a file that trusts the certificate, and a module that finds every such host at the proxy's port.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import hf_xet

from .accounts import READ, START_JOBS
from .common import CLOCK, HubError, iso
from .store import Hub
from .xet import OWN_CAS

DEFAULT_TIMEOUT_S = 1800
GRACE_S = 15.0  # between SIGTERM and SIGKILL
# name -> micro-dollars per minute, as the client's guide of Jobs lists them
HARDWARE = {
    **{"cpu-basic": 167, "cpu-upgrade": 500, "t4-small": 6667, "l4x1": 13333, "l4x4": 63333},
    **{"a10g-small": 16667, "a10g-large": 25000, "l40sx1": 30000, "a100-large": 41667, "h200": 83333},
}
NO_CREDIT = "Pre-paid credit balance is insufficient - add more credits to your account to use Jobs."
SITE = """import os, socket
_real = socket.getaddrinfo
def _find(host, service, *rest, **more):
    name = host.decode() if isinstance(host, bytes) else host
    if str(name).endswith(".hf.jobs"):
        host, service = "127.0.0.1", int(os.environ["SIMULATED_JOBS_PORT"])
    return _real(host, service, *rest, **more)
socket.getaddrinfo = _find
"""
_PYTHON = """#!/bin/sh
case "$1 $2" in "-m pip"|"-m inference_space.compiled") exit 0;; esac
exec {python} "$@"
"""


@dataclass
class JobState:
    """One Job and its process."""

    id: str
    owner: dict[str, str]
    spec: dict[str, Any]
    initiator: str = "user"
    created: datetime = field(default_factory=CLOCK.now)
    started: datetime | None = None
    finished: datetime | None = None
    stage: str = "SCHEDULING"
    message: str | None = None
    folder: Path = Path()
    ports: dict[int, int] = field(default_factory=dict)  # the exposed ones -> those of this machine
    process: "subprocess.Popen[bytes] | None" = None
    stack: ExitStack = field(default_factory=ExitStack)

    def look(self) -> None:
        """Notice that the process has ended, or that the timeout has passed."""
        if self.stage != "RUNNING" or not self.process or not self.started:
            return
        code = self.process.poll()
        if code is not None:
            self.end(
                "COMPLETED" if code == 0 else "ERROR", f"Job failed with exit code: {code}" if code else None
            )
        elif (CLOCK.now() - self.started).total_seconds() > self.spec.get(
            "timeoutSeconds", DEFAULT_TIMEOUT_S
        ):
            self.end("ERROR", "Job timeout")

    def end(self, stage: str, message: str | None = None, *, number: int = signal.SIGTERM) -> None:
        """Enter a last stage, and end the process and all its children if it runs."""
        if self.stage not in ("SCHEDULING", "RUNNING"):
            return
        self.stage, self.message, self.finished = stage, message, CLOCK.now()
        if self.process and self.process.poll() is None:
            _signal(self.process, number)
            threading.Thread(target=_reap, args=[self.process], daemon=True).start()

    def log(self) -> Iterator[dict[str, str]]:
        yield {"data": f"===== Job started at {self.created} =====", "timestamp": iso(self.created)}
        file = self.folder / "log"
        for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
            yield {"data": line, "timestamp": iso(self.created)}

    def to_json(self) -> dict[str, Any]:
        """What `inspect_job` and `list_jobs` read."""
        self.look()
        now = self.finished or CLOCK.now()
        running = int((now - self.started).total_seconds()) if self.started else None
        expose = self.spec.get("expose") or {}
        urls = [f"https://{self.id}--{port}.hf.jobs" for port in expose.get("ports", [])]
        spec = self.spec
        return {
            "id": self.id,
            "createdAt": iso(self.created),
            "startedAt": self.started and iso(self.started),
            "finishedAt": self.finished and iso(self.finished),
            "dockerImage": spec.get("dockerImage"),
            "spaceId": spec.get("spaceId"),
            "command": spec["command"],
            "arguments": spec["arguments"],
            "environment": spec["environment"],
            "secrets": dict.fromkeys(spec.get("secrets", {}), "***"),
            "flavor": spec["flavor"],
            "labels": spec.get("labels"),
            "volumes": spec.get("volumes"),
            "status": {"stage": self.stage, "message": self.message, "exposeUrls": urls or None},
            "durations": {
                "schedulingSecs": 0,
                "runningSecs": running,
                "totalSecs": int((now - self.created).total_seconds()),
            },
            "owner": self.owner,
            "initiator": {"type": self.initiator, "id": self.owner["id"]},
            "retry": spec.get("attempts", 1) - 1,
            "expose": expose,
        }


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _reap(process: "subprocess.Popen[bytes]") -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    _signal(process, signal.SIGKILL)  # its children, too
    process.wait()


class Jobs:
    """All Jobs. `hub` gives the buckets; `url` is the Hub's own, for the processes."""

    def __init__(self, hub: Hub, url: str, environ: dict[str, str]) -> None:
        self.hub = hub
        self.url = url
        self.environ = environ  # with which a process finds the ports of Jobs
        self.all: dict[str, JobState] = {}
        self.exposes = True  # a test lets the Hub expose no port
        self._stopped = False
        self._root = hub.cas.root.parent / "jobs"

    def check(self, owner: str, who: str | None, permission: str) -> dict[str, Any]:
        """The account of the owner; refuse a caller without this right there."""
        caller = self.hub.accounts.caller(who)
        if caller.anonymous:
            raise HubError(401, "Invalid username or password.")
        if owner not in self.hub.accounts.accounts:
            raise HubError(404, "Not Found")
        if not caller.may(permission, "job", owner):
            raise HubError(403, f"Forbidden: you have no such right to the Jobs of {owner}")
        return self.hub.accounts.accounts[owner].to_json()

    def run(self, owner: str, who: str | None, spec: dict[str, Any], initiator: str = "user") -> JobState:
        account = self.check(owner, who, START_JOBS)
        if self._stopped:
            raise HubError(503, "this Hub is ending")
        if not self.hub.accounts.accounts[owner].can_pay:
            raise HubError(402, NO_CREDIT)
        if spec["flavor"] not in HARDWARE:
            raise HubError(400, f'"flavor" must be one of [{", ".join(HARDWARE)}]')
        for key, value in (spec.get("labels") or {}).items():
            if not all(len(t) <= 100 and t.replace("-", "").replace("_", "").isalnum() for t in (key, value)):
                raise HubError(400, f"labels: {key}={value} has other characters, or more than 100")
        if not self.exposes:
            spec = {**spec, "expose": None}
        known = {key: account[key] for key in ("id", "name", "type")}
        job = JobState(uuid4().hex[:24], known, spec, initiator)
        self.all[job.id] = job
        try:
            self._start(job, who)
        except BaseException:  # else it would look as if it ran
            del self.all[job.id]
            raise
        return job

    def find(self, owner: str, name: str, who: str | None, permission: str = READ) -> JobState:
        self.check(owner, who, permission)
        job = self.all.get(name)
        if job is None or job.owner["name"] != owner:
            raise HubError(404, "Job not found")
        return job

    def stop(self) -> None:
        """End all processes, and start no more."""
        self._stopped = True
        for job in [*self.all.values()]:
            job.end("CANCELED", number=signal.SIGKILL)
        for job in self.all.values():
            if job.process:
                job.process.wait()
            job.stack.close()

    def _start(self, job: JobState, who: str | None) -> None:
        job.folder = self._root / job.id
        app = job.folder / "app"
        tools = job.folder / "bin"
        tools.mkdir(parents=True)
        temporary = Path(job.stack.enter_context(TemporaryDirectory()))  # short, for the sockets of vLLM
        places = {"/app": str(app)}
        for number, volume in enumerate(job.spec.get("volumes") or []):
            places[volume["mountPath"]] = str(self._mount(job, number, volume, who))
        self._tools(tools)
        environ = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "HOME": str(job.folder),
            "TMPDIR": str(temporary),
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(job.folder / "hf"),
            "JOB_ID": job.id,
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",  # all Jobs share this machine
            **self.environ,
            "PYTHONPATH": f"{app / 'shared'}:{self.environ['PYTHONPATH']}",
            **{key: str(value) for key, value in job.spec["environment"].items()},
            **job.spec.get("secrets", {}),
        }
        exposed = [str(port) for port in (job.spec.get("expose") or {}).get("ports", [])]
        for key, value in [*environ.items()]:
            if key.endswith("_PORT") and value in exposed:
                job.ports[int(value)] = _free_port()
                environ[key] = str(job.ports[int(value)])
                environ[f"{key.removesuffix('_PORT')}_HOST"] = "127.0.0.1"
            elif key not in ("PATH", "PYTHONPATH", "HOME", "TMPDIR"):
                environ[key] = _placed(value, places)
        # Where the real one writes below /tmp, each Job has a /tmp of its own.
        environ["REPLICA_FOLDER"] = str(temporary / "replica")
        command = [_placed(word, places) for word in [*job.spec["command"], *job.spec["arguments"]]]
        if job.stage != "SCHEDULING":  # it was canceled in the meantime
            return
        with (job.folder / "log").open("wb") as log:
            job.process = subprocess.Popen(
                command,
                cwd=job.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        job.stage, job.started = "RUNNING", CLOCK.now()

    def _mount(self, job: JobState, number: int, volume: dict[str, Any], who: str | None) -> Path:
        """A copy of a bucket's folder, as of now, for which it asks this very server."""
        bucket = self.hub.bucket(volume["source"], who)
        out = job.folder / f"volume-{number}"
        start = f"{volume['path']}/" if volume.get("path") else ""
        with hf_xet.XetSession().new_file_download_group(
            endpoint=f"{self.url}{OWN_CAS}", token="xet-read", token_expiry_unix_secs=1 << 40
        ) as group:
            for path, file in [*bucket.files.items()]:  # others write to the bucket meanwhile
                if not path.startswith(start):
                    continue
                target = out / path.removeprefix(start)
                target.parent.mkdir(parents=True, exist_ok=True)
                if file.size:
                    group.start_download_file(hf_xet.XetFileInfo(file.xet_hash, file.size), str(target))
                else:
                    target.touch()
        return out

    def _tools(self, folder: Path) -> None:
        (folder / "python3").write_text(_PYTHON.format(python=sys.executable))
        (folder / "apt-get").write_text("#!/bin/sh\n")
        for file in folder.iterdir():
            file.chmod(0o755)


def _placed(text: str, places: dict[str, str]) -> str:
    for path, folder in sorted(places.items(), reverse=True):
        text = text.replace(f"{path}/", f"{folder}/").replace(f"{path}\n", f"{folder}\n")
        text = folder if text == path else text
    return text


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
