"""A simulated Hugging Face Hub on loopback, with buckets, repositories and Spaces for the real clients.

    with HubSim(tmp_path) as hub:
        subprocess.run([...], env=os.environ | hub.env(tmp_path / "home"))  # HF_ENDPOINT, HF_TOKEN, HF_HOME
        api = HfApi(endpoint=hub.url, token="hf_write")

**Accounts.** `user` is PRO, has a payment method and is a member of the organization `team`; `free` has
none of these. **Tokens.** hf_write and hf_read belong to `user`; so do the fine-grained hf_team (all of
`team`) and hf_bucket_read (only the bucket team/wordle), and hf_expired. hf_free may write for
`free`. `add_account` and `add_token` make others. A request that a token does not allow is answered with
401, 402, 403 or 404 and the Hub's headers.

**Spaces.** `create_repo` makes one; the first commit with a Dockerfile builds it. No clock moves a Space to
its next stage: each `get_space_runtime` (so each round of `wait_for_space`) and each visit returns the
stage, then moves on. `set_space` changes what a client cannot change, also before the Space exists:

    hub.set_space("team/wordle-env", builds=["BUILDING", "BUILD_ERROR"], error="no such image")
    hub.set_space("team/wordle-env", stage="SLEEPING")
    hub.set_space("team/wordle-env", upstream="http://127.0.0.1:7860")  # the process that runs its app

Its app is at `space_info(...).host`, a loopback URL that stands for https://*.hf.space. It forwards to
`upstream` while the Space is RUNNING, wakes a sleeping Space, answers 503 in every other stage, and 404 to
callers that may not see a private Space. It carries plain requests, no WebSockets; `set_space(...,
host=URL)` makes the Hub name another address. `space(name)` returns everything, the values of secrets
included. A static Space is RUNNING from its first commit with an index.html, and its app shows its files.

**Jobs.** `run_job` starts a real process of this machine (`jobs.py` says what stands for the container). Its
ports are served over TLS, for processes that have `ports()` in their environment. `end_job` kills a Job or
lets it expire; `exposes` decides whether Jobs get URLs.

**Faults.** `fault` makes chosen requests fail, `skew` shifts the Hub's clock, `feed` and `end_feeds`
disturb the feeds of buckets' changes, `limit` limits requests for files; `clear` ends all of these.

huggingface_hub's own tests of buckets and Spaces pass against it (`tests/store/test_hub_own.py`). Its Jobs
follow the code and the guide of huggingface_hub 2.4.0, which has no tests of them that need a Hub. Beyond
this, it is not proven to behave like the real Hub. It does not check hashes and collects no garbage. A
repository has one branch.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import httpx

REPOSITORY = Path(__file__).parents[3]


class HubSim:
    """Runs the simulator as a process of its own for the length of a `with` block."""

    url: str

    def __init__(self, root: Path) -> None:
        self.root = root

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.support.hubsim", str(self.root)]
        pipe = subprocess.PIPE
        own = {**os.environ, "HF_HOME": str(self.root / "home"), "NO_PROXY": "127.0.0.1"}
        own["HF_XET_TELEMETRY_ENABLED"] = "false"
        self._process = subprocess.Popen(command, cwd=REPOSITORY, env=own, stdin=pipe, stdout=pipe, text=True)
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self._control = httpx.Client(base_url=f"{self.url}/_sim", trust_env=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._control.close()

    def stop(self) -> None:
        try:
            self._process.communicate(timeout=30)  # closes its stdin: it ends its Jobs, then itself
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def env(self, home: Path, token: str = "hf_write") -> dict[str, str]:
        """What a client process needs in its environment. `home` must be new for each simulator: the
        client remembers there what it uploaded.
        """
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": token, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}

    def fault(self, match: str, **how: Any) -> None:
        """Let matching requests fail, see `control.Fault`; a visit is "METHOD owner/name:/path"."""
        self._tell("POST", "/faults", json={"match": match, **how})

    def feed(self, **how: Any) -> None:
        """Change how the feeds of changes are served, see `buckets.Feed`; no argument restores them."""
        self._tell("PUT", "/feed", json=how)

    def limit(self, **how: Any) -> None:
        """Limit requests for files, see `control.Limit`; without arguments there is no limit."""
        self._tell("PUT", "/limit", json=how)

    def end_feeds(self, bucket: str, *, politely: bool) -> None:
        """End all connections to a bucket's feed, with the event `reconnect` or without any."""
        self._tell("DELETE", f"/feed/{bucket}", params={"politely": politely})

    def skew(self, seconds: float) -> None:
        self._tell("PUT", f"/clock/{seconds}")

    def clear(self) -> None:
        self._tell("DELETE", "/faults")
        self.feed()
        self.limit()

    def requests(self) -> list[str]:
        return self._tell("GET", "/requests").json()

    def times(self) -> list[tuple[str, str, float, float]]:
        """Every request that has ended: "METHOD /path", token, start and end in unix seconds."""
        return self._tell("GET", "/times").json()

    def received(self) -> int:
        """The bytes that clients have uploaded to the Xet storage so far."""
        return self._tell("GET", "/received").json()

    def add_account(self, name: str, **how: Any) -> None:
        self._tell("PUT", f"/accounts/{name}", json=how)

    def add_token(self, token: str, **how: Any) -> None:
        self._tell("PUT", f"/tokens/{token}", json=how)

    def add_model(self, name: str, **how: Any) -> None:
        """Add a model repository with `files` (path -> text), maybe `gated` ("auto" or "manual"), past which
        only its owner and the users in `granted` may look.
        """
        self._tell("POST", "/models", json={"id": name, **how})

    def space(self, name: str) -> dict[str, Any]:
        return self._tell("GET", f"/spaces/{name}").json()

    def set_space(self, name: str, **how: Any) -> None:
        self._tell("PATCH", f"/spaces/{name}", json=how)

    def log(self, name: str, line: str, kind: str = "run") -> None:
        self._tell("POST", f"/spaces/{name}/logs/{kind}", params={"line": line})

    def jobs(self) -> list[dict[str, Any]]:
        """All Jobs, oldest first, with the values of their secrets."""
        return self._tell("GET", "/jobs").json()

    def ports(self) -> dict[str, str]:
        """What a process needs in its environment to find https://<id>--<port>.hf.jobs."""
        return self._tell("GET", "/ports").json()

    def end_job(self, name: str, message: str, number: int = 9) -> None:
        """Let a Job end with ERROR and this message, by this signal."""
        self._tell("POST", f"/jobs/{name}/end", params={"message": message, "number": number})

    def exposes(self, *, ports: bool) -> None:
        self._tell("PUT", f"/jobs/exposes/{ports}")

    def _tell(self, method: str, path: str, **how: Any) -> httpx.Response:
        return self._control.request(method, path, **how).raise_for_status()
