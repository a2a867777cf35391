"""What the command line asks for, before anything is contacted."""

import pytest

from trainer.deploy import DeployError
from trainer.deploy.plan import Deployment, make_plan


def plan(**changed) -> Deployment:
    wish = {"run": "first", "hardware": "l4x1", "replicas": 1, "public": False} | changed
    owner, name = wish.pop("owner", "me"), wish.pop("name", "wordle")
    return make_plan(owner, name, **wish)


def test_a_deployment_is_private_and_its_replicas_sleep():
    deployment = plan(replicas=2)
    assert [space.repo_id for space in deployment.spaces] == [
        "me/wordle-env",
        "me/wordle-replica-1",
        "me/wordle-replica-2",
    ]
    assert all(space.private for space in deployment.spaces)
    assert not any(space.private for space in plan(public=True).spaces)
    assert deployment.env.hardware == "cpu-basic"
    assert all(0 < space.sleep_s <= 3600 for space in deployment.replicas)
    assert deployment.bucket_url == "hf://buckets/me/wordle"


def test_replicas_follow_one_run_and_have_different_names():
    first, second = plan(replicas=2, run="next").replicas
    for name in ("REPLICA_BUCKET", "REPLICA_RUN"):
        assert first.variables[name] == second.variables[name]
    assert first.variables["REPLICA_BUCKET"] == "hf://buckets/me/wordle"
    assert first.variables["REPLICA_RUN"] == "next"
    assert first.variables["REPLICA_NAME"] != second.variables["REPLICA_NAME"]


def test_several_gpus_serve_one_copy_of_the_model():
    for hardware, gpus in (("l4x1", 1), ("l4x4", 4)):
        variables = plan(hardware=hardware).replicas[0].variables
        assert variables["REPLICA_VLLM_ARGS"] == f"--tensor-parallel-size {gpus}"


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"replicas": 0}, ["--replicas"]),
        ({"owner": "me/you"}, ["--owner", "me/you"]),
        ({"name": "a b"}, ["--name"]),
        ({"run": "../other"}, ["--run", "letters"]),
    ],
)
def test_an_impossible_plan_is_refused_with_the_name_of_the_option(wish, words):
    with pytest.raises(DeployError) as refusal:
        plan(**wish)
    assert all(word in str(refusal.value) for word in words), refusal.value
