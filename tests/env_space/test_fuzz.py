"""schemathesis against the service's own OpenAPI: whatever is sent, no 5xx, and answers as the API says."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from env_space.app import create_app
from env_space.settings import Settings

pytestmark = pytest.mark.full

app = create_app(Settings(max_sessions=100_000))
schema = schemathesis.openapi.from_asgi("/openapi.json", app)


@schema.parametrize()
@settings(max_examples=40, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_service_fail(case):
    response = case.call_and_validate()
    if response.status_code >= 400:
        assert response.json()["detail"].endswith(".")
