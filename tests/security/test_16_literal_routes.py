"""Finding 16: a Host such as `x/server_info?` changed the path that was passed on."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from inference_space import gate as gates
from tests.security.asking import RIGHT, client, gate, running

SPACE = Path(gates.__file__).parent
HOSTS = ["x/server_info?", "x/collective_rpc#", "evil.example", "[::1", "a b", "x/v1/completions?"]


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_leads_to_no_other_route(host):
    async def scenario():
        async with client(gate()) as http:
            looked = await http.get("/v1/models", headers={"Host": host})
            asked = await http.post("/v1/completions", json={}, headers={"Host": host} | RIGHT)
            keyless = await http.post("/v1/completions", json={}, headers={"Host": host})
            hidden = await http.get("/server_info", headers={"Host": host} | RIGHT)
        return looked.json(), asked.json(), keyless.status_code, hidden.status_code

    looked, asked, keyless, hidden = running(scenario)
    assert (looked["path"], asked["path"]) == ("/v1/models", "/v1/completions")
    assert looked["headers"]["host"] == asked["headers"]["host"] == "replica", "no app gets to see another"
    assert (keyless, hidden) == (401, 404)


def test_no_app_decides_by_an_address_that_is_made_of_headers():
    """Before 1.0.1 Starlette's `request.url` put the Host before the path, whatever stood in it."""
    for file in SPACE.glob("*.py"):
        assert not re.search(r"request\.url|\.base_url|url_for", file.read_text()), file.name


def test_the_framework_is_one_that_refuses_such_hosts():
    lines = (SPACE / "requirements.txt").read_text().splitlines()
    (needed,) = (Requirement(line) for line in lines if re.match(r"starlette\b", line))
    assert not needed.specifier.contains(Version("1.0.0"))
    assert needed.specifier.contains(Version("1.10.0"))
