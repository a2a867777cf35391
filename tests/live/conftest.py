"""One replica with a key, for all tests of what its public port lets through."""

from collections.abc import Iterator

import psutil
import pytest

from tests.live.replica import Replica
from tests.live.test_replica import Trainer
from trainer.policies import tiny

KEY, TOKEN = "planted-key-of-this-replica", "hf_plantedToken"


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A replica of the run "live" with a key and secrets, which serves version 0."""
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("replica")
    tiny.build(base, tie=True, seed=0)
    trainer = Trainer(tmp_path_factory.mktemp("bucket").as_uri(), base)
    trainer.publish()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("REPLICA_KEY", KEY)
        environment.setenv("HF_TOKEN", TOKEN)
        environment.setenv("AWS_SECRET_ACCESS_KEY", TOKEN)
        replica = Replica(trainer.bucket.url, "live", folder)
        replica.start()
    replica.wait_for(0)
    yield replica
    replica.stop()
    trainer.close()


@pytest.fixture(scope="package")
def its_vllm(guarded: Replica) -> psutil.Process:
    """The vLLM of that replica, found as anybody with a shell would find it."""
    family = psutil.Process(guarded.pid).children(recursive=True)
    return next(process for process in family if "--served-model-name" in process.cmdline())
