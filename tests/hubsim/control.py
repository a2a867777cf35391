"""The simulator's own switches under /_sim: what a test may see and set that no client of the Hub could."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from .accounts import Account, Token
from .bucket_events import Feed
from .clock import CLOCK
from .faults import Fault, Plan
from .limits import Limit
from .repos import RepoState, blob
from .spaces import Builds
from .store import Hub

SPACE = "/spaces/{owner}/{name}"


class SpaceChange(BaseModel, extra="forbid"):
    """What to change on a Space; what is None stays."""

    stage: str | None = None  # enter it at once
    ahead: tuple[str, ...] = ()  # the stages after it, one for each look
    builds: tuple[str, ...] | None = None  # the stages of each later build
    error: str = ""  # message of the stages that end in ERROR, now or in those builds
    upstream: str | None = None  # URL of the process that answers for the app while it is RUNNING
    host: str | None = None  # URL that the Hub names as the app's, instead of the simulator's own port for it
    live_logs: bool | None = None  # keep log streams open


class NewModel(BaseModel, extra="forbid"):
    """A model repository to be there."""

    id: str
    gated: str | bool = False
    granted: list[str] = []
    files: dict[str, str] = {}


def control_routes(hub: Hub, plan: Plan) -> APIRouter:
    """Routes under /_sim. Faults do not apply to them."""
    routes = APIRouter(prefix="/_sim")
    _fault_routes(routes, plan)
    _account_routes(routes, hub)
    _space_routes(routes, hub)
    _feed_routes(routes, hub)
    return routes


def _feed_routes(routes: APIRouter, hub: Hub) -> None:
    @routes.put("/feed")
    async def set_feed(rules: Feed) -> None:
        vars(hub.feed).update(rules)

    @routes.delete("/feed/{owner}/{name}")
    async def end_feeds(owner: str, name: str, politely: bool) -> None:
        hub.buckets[f"{owner}/{name}"].end_feeds(politely=politely)


def _fault_routes(routes: APIRouter, plan: Plan) -> None:
    @routes.post("/faults")
    async def add(fault: Fault) -> None:
        plan.faults.append(fault)

    @routes.delete("/faults")
    async def clear() -> None:
        plan.faults.clear()
        CLOCK.skew = 0.0

    @routes.put("/limit")
    async def set_limit(limit: Limit) -> None:
        plan.limits.set(limit)

    @routes.get("/requests")
    async def requests() -> list[str]:
        return plan.requests

    @routes.put("/clock/{skew}")
    async def set_clock(skew: float) -> None:
        CLOCK.skew = skew


def _account_routes(routes: APIRouter, hub: Hub) -> None:
    @routes.put("/accounts/{name}")
    async def add_account(name: str, how: dict[str, Any]) -> None:
        hub.accounts.add(Account(name, **how))

    @routes.put("/tokens/{token}")
    async def add_token(token: str, how: dict[str, Any]) -> None:
        hub.accounts.tokens[token] = Token(**how)

    @routes.post("/models")
    async def add_model(model: NewModel) -> None:
        repo = RepoState("models", model.id, gated=model.gated, granted=set(model.granted))
        added = {path: blob(text.encode()) for path, text in model.files.items()}
        repo.commit("add files", {**repo.files, **added})
        hub.repos["models", model.id] = repo


def _space_routes(routes: APIRouter, hub: Hub) -> None:
    @routes.get(SPACE)
    async def see(owner: str, name: str) -> dict[str, Any]:
        space = hub.spaces[f"{owner}/{name}"]
        settings = {
            kind: {key: one.value for key, one in getattr(space, kind).items()}
            for kind in ("variables", "secrets")
        }
        commits = [commit.title for commit in space.repo.commits]
        files = {path: file.content.decode(errors="replace") for path, file in space.repo.files.items()}
        plain = {
            key: value for key, value in vars(space).items() if key not in ("repo", "variables", "secrets")
        }
        return {**plain, **settings, "commits": commits, "files": files, "visibility": space.repo.visibility}

    @routes.patch(SPACE)
    async def change(owner: str, name: str, wish: SpaceChange) -> None:
        _change(hub, f"{owner}/{name}", wish)

    @routes.post(SPACE + "/logs/{kind}")
    async def log(owner: str, name: str, kind: str, line: str) -> None:
        hub.spaces[f"{owner}/{name}"].log(kind, line)


def _change(hub: Hub, name: str, wish: SpaceChange) -> None:
    if wish.builds is not None:
        hub.builds[name] = Builds(wish.builds, wish.error)
    if wish.host is not None:
        hub.hosts[name] = wish.host
    if (space := hub.spaces.get(name)) is None:
        return
    space.builds = hub.builds.get(name, Builds())
    for key in ("upstream", "host", "live_logs"):
        if (value := getattr(wish, key)) is not None:
            setattr(space, key, value)
    if wish.stage is not None:
        space.enter(wish.stage, ahead=wish.ahead, error=wish.error)
