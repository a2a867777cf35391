"""The conftest.py of huggingface_hub's own tests, whose own is not published: points them to a simulator.

It is copied next to them. They expect the real Hub or its staging server, and take both URLs from a module of
constants; HF_ENDPOINT names the simulator instead.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
from huggingface_hub import HfApi, RepoUrl

from . import testing_constants, testing_utils

RepoFactory = Callable[..., RepoUrl]
testing_constants.ENDPOINT_STAGING = testing_constants.ENDPOINT_PRODUCTION = os.environ["HF_ENDPOINT"]


@pytest.fixture(scope="session")
def api() -> HfApi:
    return HfApi(endpoint=testing_constants.ENDPOINT_STAGING, token=testing_constants.TOKEN)


@pytest.fixture
def repo_factory(api: HfApi, request: pytest.FixtureRequest) -> RepoFactory:
    """Makes repositories of the test user with names of their own; they are deleted after the test."""

    def make(repo_type: str = "model", *, repo_id: str = "", token: str | None = None, **how: Any) -> RepoUrl:
        kind = {"repo_type": repo_type, "token": token}
        url = api.create_repo(repo_id or testing_utils.repo_name(), **kind, **how)
        request.addfinalizer(lambda: api.delete_repo(url.repo_id, missing_ok=True, **kind))
        return url

    return make
