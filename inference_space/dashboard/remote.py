"""Replicas elsewhere, which the dashboard asks for their reports: any vLLM with the plugin, and Spaces."""

import time

import httpx

from delta_weight_sync.replicas import read_status
from delta_weight_sync.runlog import ReplicaEvent, ReplicaReport


class RemoteReplica:
    """A replica at an address, such as `http://127.0.0.1:8000`. Calling it returns its report."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._name = self.url  # until its first answer, which has its name

    def __call__(self, after: int) -> ReplicaReport:
        """Return its state, and its commits of versions after `after`. Never raises: without a valid answer,
        the state is "unreachable", with the reason."""
        try:
            report = ReplicaReport.model_validate_json(read_status(self.url, after))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            gone = ReplicaEvent(
                t=time.time(),
                replica=self._name,
                state="unreachable",
                version=None,
                digest=None,
                error=f"{self.url} gives no status ({type(error).__name__})",
            )
            return ReplicaReport(status=gone, commits=())
        self._name = report.status.replica
        return report
