"""Doctor's checks of what is on the Hub: token, plan, licence, clock, Spaces and bucket."""

from __future__ import annotations

import os
import time
from email.utils import parsedate_to_datetime
from uuid import uuid4

import httpx
from huggingface_hub import get_session
from huggingface_hub.errors import GatedRepoError

from delta_weight_sync import signing
from delta_weight_sync.protocol import FORMAT
from delta_weight_sync.store import open_bucket
from trainer import cold_spaces
from trainer.deploy import account, keys
from trainer.deploy.checks_scene import Problem, Scene
from trainer.deploy.errors import explained
from trainer.deploy.hub import ASLEEP, Found, bucket_privacy

_SKEW_S = 30.0  # every lag in the run's log compares two machines' clocks


def token(scene: Scene) -> str:
    """HF_TOKEN is known, and may write what belongs to the owner."""
    account.must_write(scene.who, scene.whose)
    return f"{scene.who['name']}, {account.role(scene.who)}, may write for {scene.whose}"


def space_token(scene: Scene) -> str:
    """SPACE_HF_TOKEN can only read. Once the Spaces have it, only who asks private ones needs it here."""
    if not scene.space_token and scene.spaces and not any(space.private for space in scene.spaces):
        return "the Spaces have theirs, and open to everybody"
    account.checked_space_token(scene.api, scene.space_token)
    return "SPACE_HF_TOKEN is read-only"


def plan(scene: Scene) -> str:
    """The owner may have Docker Spaces, and can pay for GPUs."""
    if not account.has_plan(scene.who, scene.whose):
        raise Problem(
            f"{scene.whose} has no paid plan, and a Docker Space on free hardware needs PRO, Team or"
            " Enterprise; subscribe at https://huggingface.co/pricing"
        )
    if account.can_pay(scene.who, scene.whose) is False:
        raise Problem(
            f"{scene.whose} cannot pay for a GPU; add a payment method and credits at"
            " https://huggingface.co/settings/billing"
        )
    return f"{scene.whose} may run Docker Spaces"


def licence(scene: Scene) -> str:
    """The model is not gated, or its licence was accepted."""
    info = scene.model_info
    if info is None or not info.gated:
        return f"{scene.model} is not gated"
    with explained(f"asking for access to {scene.model}"):
        try:
            scene.api.auth_check(scene.model)
        except GatedRepoError:
            raise Problem(
                f"{scene.model} is gated; accept its licence at {scene.api.endpoint}/{scene.model} as"
                f" {scene.who['name']}"
            ) from None
    return f"the licence of {scene.model} was accepted"


def clock(scene: Scene) -> str:
    """This machine's clock is the Hub's, to half a minute."""
    with explained("asking the Hub for the time"):
        date = get_session().head(scene.api.endpoint).headers["date"]
    skew = time.time() - parsedate_to_datetime(date).timestamp()
    if abs(skew) > _SKEW_S:
        raise Problem(
            f"this machine's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the Hub's, so"
            " signed links and every lag in the run's log are wrong; set it, for example with"
            " `timedatectl set-ntp true`"
        )
    return f"within {_SKEW_S:.0f} s of the Hub's"


def awake(scene: Scene) -> str:
    """All Spaces of the deployment run."""
    idle = [f"{s.repo_id} is {s.runtime.stage}" for s in scene.spaces if s.runtime.stage != "RUNNING"]
    if not idle:
        return f"{len(scene.spaces)} run" if scene.spaces else "there are none yet; `up` makes them"
    asleep = all(space.runtime.stage in (*ASLEEP, "RUNNING") for space in scene.spaces)
    fix = "`resume` them (a trainer also wakes those that sleep)" if asleep else "see `logs`, then run `up`"
    raise Problem(f"{', '.join(idle)}; {fix}")


def protocol(scene: Scene) -> str:
    """Every running replica speaks the trainer's protocol."""
    replicas = [s for s in scene.spaces if "-replica-" in s.repo_id and s.runtime.stage == "RUNNING"]
    other = [f"{s.repo_id} speaks {said}" for s in replicas if (said := _format(s)) != FORMAT]
    if other:
        raise Problem(f"{', '.join(other)}, this trainer {FORMAT}; run `up` to bring both to one version")
    return f"{len(replicas)} replicas speak {FORMAT}" if replicas else "no replica runs"


def _format(space: Found) -> str:
    try:
        report = cold_spaces.request(space.url, "GET", "/status").raise_for_status().json()
        return str(report["format"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        return f"nothing ({type(error).__name__})"
    except cold_spaces.SpacesUnavailableError as error:
        raise Problem(str(error)) from error


def signatures(scene: Scene) -> str:
    """Every replica believes the key with which a trainer that is started here signs."""
    signs, file = _signs(scene), keys.signing_file(scene.whose, scene.name)
    replicas = [space for space in scene.spaces if "-replica-" in space.repo_id]
    if not any(signing.PUBLIC_KEY in space.variables for space in replicas):
        return "replicas check none; `up` without --unsigned changes that" if replicas else "`up` makes keys"
    if not signs:
        raise Problem(
            f"the key that signs versions is not here: copy {file} from the machine where `up` made it"
        )
    for space in replicas:
        believed = space.variables.get(signing.PUBLIC_KEY, "")
        if signs not in believed.split(","):
            raise Problem(
                f"{space.repo_id} believes {believed or 'whatever is in the bucket'}, and a trainer that is"
                f" started here signs with {signs}; run `up`, and start the trainer with {file}"
            )
    return f"replicas believe {signing.fingerprint(signs)}, which signs here"


def _signs(scene: Scene) -> str | None:
    """The public half of the key of a trainer that is started here."""
    try:
        signs, _ = signing.keys_of(os.environ)
    except signing.KeyTextError as error:
        raise Problem(str(error)) from None
    here = keys.signing_keys(scene.whose, scene.name)
    return signs.public if signs else here.signs if here else None


def bucket(scene: Scene) -> str:
    """The bucket is there, and takes, gives and deletes an object."""
    name = f"{scene.whose}/{scene.name}"
    if (private := bucket_privacy(scene.api, name)) is None:
        return f"{name} does not exist yet; `up` makes it"
    _probe(f"hf://buckets/{name}")
    seen = "" if private else "; it is public, and so are the weights"
    return f"{name} can be written and read{seen}"


def _probe(url: str) -> None:
    """Write, read and delete an object of its own; raises `Problem` or `BucketError`."""
    opened, key, content = open_bucket(url), f"doctor/{uuid4().hex}", uuid4().bytes
    opened.put(key, content)
    try:
        if opened.get(key) != content:
            raise Problem(f"{url} gives other bytes than were written; try again, then report it to the Hub")
    finally:
        opened.delete([key])
