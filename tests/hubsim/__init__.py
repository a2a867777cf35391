"""A simulated Hugging Face Hub on loopback: buckets, repositories and Spaces, for the real client libraries.

    with HubSim(tmp_path) as hub:
        subprocess.run([...], env=os.environ | hub.env(tmp_path / "home"))  # HF_ENDPOINT, HF_TOKEN, HF_HOME
        api = HfApi(endpoint=hub.url, token="hf_write")

**Accounts.** `user` is PRO, has a payment method and is a member of the organization `team`; `free` has none
of these. **Tokens.** hf_write and hf_read belong to `user`; so do the fine-grained hf_team (all of `team`),
hf_bucket and hf_bucket_read (only the bucket team/wordle), and hf_expired. hf_free may write for `free`.
`add_account` and `add_token` make others. What a token may not do is answered with 401, 402, 403 or 404 and
the Hub's headers.

**Spaces.** `create_repo` makes one; the first commit with a Dockerfile builds it. It goes on to its next
stage when somebody looks: each `get_space_runtime` (so each round of `wait_for_space`) and each visit shows
the stage, then takes the next. `set_space` changes what a client cannot, also before the Space exists:

    hub.set_space("team/wordle-env", builds=["BUILDING", "BUILD_ERROR"], error="no such image")
    hub.set_space("team/wordle-env", stage="SLEEPING")
    hub.set_space("team/wordle-env", upstream="http://127.0.0.1:7860")  # the process that runs its app

Its app is visited at `space_info(...).host`, a loopback URL that stands for https://*.hf.space: it forwards
to `upstream` while the Space is RUNNING, wakes a sleeping one, answers 503 in every other stage, and 404 to
whoever may not see a private Space. It carries plain requests, no WebSockets; `set_space(..., host=URL)`
makes the Hub name another address. `space(name)` shows everything, the values of secrets included.

**Faults.** `fault` makes chosen requests fail, `skew` sets the Hub's clock wrong, `feed` and `end_feeds`
trouble the feeds of buckets' changes, `limit` limits requests for files; `clear` ends all of it.

huggingface_hub's own tests of buckets, commits and Spaces pass against it (`tests/bucket/test_hub_own.py`);
beyond them, how close it is to the real Hub is not proven. It does not check hashes or collect garbage, and
has no pull requests.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import httpx

REPOSITORY = Path(__file__).parents[2]


class HubSim:
    """Runs the simulator as a process of its own for the length of a `with` block."""

    url: str

    def __init__(self, root: Path) -> None:
        self.root = root

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.hubsim", str(self.root)]
        pipe = subprocess.PIPE
        own = {**os.environ, "HF_HOME": str(self.root / "home"), "NO_PROXY": "127.0.0.1"}
        self._process = subprocess.Popen(command, cwd=REPOSITORY, env=own, stdin=pipe, stdout=pipe, text=True)
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self._control = httpx.Client(base_url=f"{self.url}/_sim", trust_env=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._control.close()

    def stop(self) -> None:
        """Kill the server: from now on its port refuses connections."""
        self._process.kill()
        self._process.communicate()

    def env(self, home: Path, token: str = "hf_write") -> dict[str, str]:
        """What a client process needs in its environment. `home` must be new for each simulator: the
        client remembers there what it uploaded.
        """
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": token, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}

    def fault(self, match: str, **how: Any) -> None:
        """Let requests fail whose "METHOD /path" matches; see `faults.Fault` for the ways. A visit of a Space
        reads "METHOD owner/name:/path".
        """
        self._tell("POST", "/faults", json={"match": match, **how})

    def feed(self, **how: Any) -> None:
        """Serve the feeds of changes so from now on, see `bucket_events.Feed`; as usual without anything."""
        self._tell("PUT", "/feed", json=how)

    def limit(self, **how: Any) -> None:
        """Limit requests for files from now on, see `limits.Limit`; not at all without anything."""
        self._tell("PUT", "/limit", json=how)

    def end_feeds(self, bucket: str, *, politely: bool) -> None:
        """End all connections to a bucket's feed, with the word `reconnect` or without any."""
        self._tell("DELETE", f"/feed/{bucket}", params={"politely": politely})

    def skew(self, seconds: float) -> None:
        """Set the Hub's clock that much ahead of this machine's, or behind it if negative."""
        self._tell("PUT", f"/clock/{seconds}")

    def clear(self) -> None:
        """End all faults, the clock's, the feeds' and all limits included."""
        self._tell("DELETE", "/faults")
        self.feed()
        self.limit()

    def requests(self) -> list[str]:
        """Every request so far, as "METHOD /path"."""
        return self._tell("GET", "/requests").json()

    def add_account(self, name: str, **how: Any) -> None:
        """Add a user or an organization, or replace one; see `accounts.Account`."""
        self._tell("PUT", f"/accounts/{name}", json=how)

    def add_token(self, token: str, **how: Any) -> None:
        """Add an access token, or replace one; see `accounts.Token`."""
        self._tell("PUT", f"/tokens/{token}", json=how)

    def add_model(self, name: str, **how: Any) -> None:
        """Add a model repository with `files` (path -> text), maybe `gated` ("auto" or "manual"), past which
        only its owner and the users in `granted` may look.
        """
        self._tell("POST", "/models", json={"id": name, **how})

    def space(self, name: str) -> dict[str, Any]:
        """All that there is to know of a Space: stage, variables, secrets, hardware, files, commits, logs."""
        return self._tell("GET", f"/spaces/{name}").json()

    def set_space(self, name: str, **how: Any) -> None:
        """Change a Space behind its owner's back; see `control.SpaceChange`."""
        self._tell("PATCH", f"/spaces/{name}", json=how)

    def log(self, name: str, line: str, kind: str = "run") -> None:
        """Append a line to a Space's log of kind "build" or "run"."""
        self._tell("POST", f"/spaces/{name}/logs/{kind}", params={"line": line})

    def _tell(self, method: str, path: str, **how: Any) -> httpx.Response:
        return self._control.request(method, path, **how).raise_for_status()
