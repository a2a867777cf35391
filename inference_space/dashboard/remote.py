"""Asks replicas elsewhere for their reports: any vLLM with the plugin, and replica Spaces."""

import time

import httpx

from delta_weight_sync.runlog import ReplicaEvent, ReplicaReport

# A vLLM with the plugin answers under the first path, a Space under the second.
_PATHS = ("/delta_weight_sync/status", "/status")
_TIMEOUT_S = 5.0
_MAX_ANSWER = 4 << 20  # bytes; a report names at most 1,024 commits


class RemoteReplica:
    """A replica at an address, such as `http://127.0.0.1:8000`. Calling it returns its report."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._name = self._url  # until its first answer, which has its name
        self._http = httpx.Client(timeout=_TIMEOUT_S)

    def __call__(self, after: int) -> ReplicaReport:
        """Return its state, and its commits of versions after `after`. Never raises: without a valid answer,
        the state is "unreachable", with the reason."""
        try:
            report = ReplicaReport.model_validate_json(self._get(after))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            reason = f"{self._url} gives no status ({type(error).__name__})"
            gone = ReplicaEvent(
                t=time.time(),
                replica=self._name,
                state="unreachable",
                version=None,
                digest=None,
                error=reason,
            )
            return ReplicaReport(status=gone, commits=())
        self._name = report.status.replica
        return report

    def _get(self, after: int) -> bytes:
        for path in _PATHS:
            with self._http.stream("GET", self._url + path, params={"after": after}) as answer:
                if answer.status_code == httpx.codes.NOT_FOUND and path != _PATHS[-1]:
                    continue
                body = b""
                for part in answer.raise_for_status().iter_bytes(1 << 16):
                    body += part
                    if len(body) > _MAX_ANSWER:
                        raise ValueError("the answer is too large")
                return body
        raise AssertionError("the last path returns or raises")
