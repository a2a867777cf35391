"""The Hub's endpoints of models, datasets and Spaces as repositories, as huggingface_hub calls them."""

from typing import Annotated, Any

import yaml
from fastapi import APIRouter, Body, Header, Request
from fastapi.responses import JSONResponse

from .creation import PLURAL, create, full_name, url_path, visibility
from .errors import HubError
from .front_matter import faults, parse
from .store import Hub

Auth = Annotated[str | None, Header()]


def repo_routes(hub: Hub) -> APIRouter:
    """Routes that make, show, change and delete repositories; those of their files are elsewhere."""
    routes = APIRouter()
    _life_routes(routes, hub)
    _move_routes(routes, hub)
    _info_routes(routes, hub)
    _settings_routes(routes, hub)
    return routes


def _life_routes(routes: APIRouter, hub: Hub) -> None:
    @routes.post("/api/repos/create")
    async def make(wish: dict[str, Any], request: Request, authorization: Auth = None) -> dict[str, Any]:
        kind, name = PLURAL[wish.get("type") or "model"], full_name(hub, wish, authorization)
        create(hub, kind, name, wish, authorization)
        return {"url": f"{request.base_url}{url_path(kind, name)}", "name": name, "id": name}

    @routes.delete("/api/repos/delete")
    async def delete(wish: Annotated[dict[str, Any], Body()], authorization: Auth = None) -> None:
        kind, name = PLURAL[wish.get("type") or "model"], full_name(hub, wish, authorization)
        hub.repo(kind, name, authorization, write=True)
        del hub.repos[kind, name]
        hub.spaces.pop(name, None)

    @routes.post("/api/validate-yaml")
    async def validate(asked: dict[str, str]) -> JSONResponse:
        try:
            wrong = faults(parse(asked["content"]), asked["repoType"])
        except yaml.YAMLError as error:
            wrong = [f"Invalid YAML: {error}"]
        empty = (
            [] if parse(asked["content"]) else [{"message": "empty or missing yaml metadata in repo card"}]
        )
        answer = {"errors": [{"message": message} for message in wrong], "warnings": empty}
        return JSONResponse(answer, 400 if wrong else 200)


def _move_routes(routes: APIRouter, hub: Hub) -> None:
    @routes.post("/api/repos/move")
    async def move(wish: dict[str, Any], authorization: Auth = None) -> None:
        hub.move(wish.get("type") or "model", wish["fromRepo"], wish["toRepo"], authorization)

    @routes.post("/api/{kind}/{owner}/{name}/branch/{branch}")
    async def add_branch(
        kind: str, owner: str, name: str, branch: str, wish: dict[str, Any], authorization: Auth = None
    ) -> None:
        repo = hub.repo(kind, f"{owner}/{name}", authorization, write=True)
        if branch in repo.branches:
            raise HubError(409, f"Reference already exists: refs/heads/{branch}")
        repo.branches[branch] = [repo.at(wish.get("startingPoint") or "main")]


def _info_routes(routes: APIRouter, hub: Hub) -> None:
    @routes.get("/api/{kind}")
    async def browse(
        kind: str, author: str = "", search: str = "", limit: int = 1000, authorization: Auth = None
    ) -> list[dict[str, Any]]:
        seen = [repo for repo in hub.visible(kind, authorization) if search in repo.id]
        seen = [repo for repo in seen if author in ("", repo.id.split("/")[0])]
        return [{key: value for key, value in hub.info(repo).items() if key != "siblings"} for repo in seen][
            :limit
        ]

    @routes.get("/api/{kind}/{owner}/{name}")
    @routes.get("/api/{kind}/{owner}/{name}/revision/{revision}")
    async def info(
        kind: str,
        owner: str,
        name: str,
        revision: str = "main",
        blobs: bool = False,
        authorization: Auth = None,
    ) -> dict[str, Any]:
        return hub.info(hub.repo(kind, f"{owner}/{name}", authorization), revision, blobs=blobs)

    @routes.get("/api/{kind}/{owner}/{name}/auth-check")
    async def may_read(kind: str, owner: str, name: str, authorization: Auth = None) -> None:
        hub.readable(kind, f"{owner}/{name}", authorization)

    @routes.get("/api/{kind}/{owner}/{name}/auth-check/write")
    async def may_write(kind: str, owner: str, name: str, authorization: Auth = None) -> None:
        hub.repo(kind, f"{owner}/{name}", authorization, write=True)


def _settings_routes(routes: APIRouter, hub: Hub) -> None:
    @routes.put("/api/{kind}/{owner}/{name}/settings")
    async def settings(
        kind: str, owner: str, name: str, request: Request, authorization: Auth = None
    ) -> None:
        repo, wish = hub.repo(kind, f"{owner}/{name}", authorization, write=True), await request.json()
        repo.visibility = visibility(wish, repo.visibility)
        repo.gated = wish.get("gated", repo.gated)
