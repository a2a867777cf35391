"""New repositories and Spaces: who may have them, and what is in them at the start."""

from typing import Any

from . import hardware
from .accounts import Account
from .errors import HubError
from .repos import KINDS, RepoState, blob
from .spaces import README, Builds, SpaceState
from .store import Hub, Who

PLURAL = {kind: plural for plural, kind in KINDS.items()}
NO_PLAN = (
    "Static Spaces are free for everyone, but hosting Gradio and Docker Spaces on free cpu-basic"
    " requires a PRO subscription."
)
NO_CARD = (
    "You must add a payment method to your account to upgrade your space's hardware. Visit your billing"
    " settings to add one: https://huggingface.co/settings/billing"
)


def full_name(hub: Hub, wish: dict[str, Any], who: Who) -> str:
    """Owner and name of the repository that a request names; without an owner it is the caller's own."""
    owner = wish.get("organization") or hub.accounts.whoami(who)["name"]
    return f"{owner}/{wish['name']}"


def visibility(wish: dict[str, Any], default: str) -> str:
    """As huggingface_hub 2 sends it, or as 1 does."""
    if wish.get("private") is not None:
        return "private" if wish["private"] else "public"
    return wish.get("visibility") or default


def is_private(wish: dict[str, Any], owner: Account) -> bool:
    """The same, where there are only two."""
    return visibility(wish, owner.visibility) == "private"


def create(hub: Hub, kind: str, name: str, wish: dict[str, Any], who: Who) -> RepoState:
    """Make what a request asks for; refuse callers without the right or the plan, and taken names."""
    hub.accounts.caller(who).must_write(KINDS[kind], name.split("/")[0])
    owner = hub.accounts.accounts[name.split("/")[0]]
    if kind == "spaces":
        check_plan(owner, wish.get("sdk", "docker"), wish)
    if (kind, name) in hub.repos:
        raise HubError(409, f"You already created this {KINDS[kind]} repo", url=url_path(kind, name))
    repo = RepoState(kind, name, visibility(wish, owner.visibility))
    if kind == "spaces":
        hub.spaces[name] = _new_space(hub, repo, wish)
    hub.repos[kind, name] = repo
    return repo


def check_plan(owner: Account, sdk: str, wish: dict[str, Any]) -> None:
    """Free accounts may not host an app on free machines; and without a card nobody gets any other."""
    flavor = wish.get("hardware") or hardware.CPU_BASIC
    if not hardware.known(flavor):
        raise HubError(400, f'"hardware" {flavor} is not a known flavor')
    if flavor != hardware.CPU_BASIC and not owner.can_pay:
        raise HubError(403, NO_CARD)
    if flavor == hardware.CPU_BASIC and sdk != "static" and not owner.is_pro:
        raise HubError(402, NO_PLAN)


def url_path(kind: str, name: str) -> str:
    """Where the web page of a repository is, below the Hub's address."""
    return name if kind == "models" else f"{kind}/{name}"


def _new_space(hub: Hub, repo: RepoState, wish: dict[str, Any]) -> SpaceState:
    readme = README.format(repo.id.split("/")[1], wish["sdk"])
    repo.commits[0].files["README.md"] = blob(readme.encode())
    space = SpaceState(
        repo,
        wish["sdk"],
        hub.new_door(),
        builds=hub.builds.get(repo.id, Builds()),
        host=hub.hosts.get(repo.id, ""),
    )
    configure(space, wish)
    return space


def configure(space: SpaceState, wish: dict[str, Any]) -> None:
    """Apply the settings that creation and duplication can bring along."""
    space.requested = wish.get("hardware") or hardware.CPU_BASIC
    space.sleep_time = wish.get("sleepTimeSeconds")
    space.volumes = wish.get("volumes") or []
    for kind in ("variables", "secrets"):
        for setting in wish.get(kind) or []:
            space.set(kind, setting["key"], setting["value"], setting.get("description"))
