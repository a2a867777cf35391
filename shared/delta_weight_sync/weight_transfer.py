"""The backend `delta_weight_sync` of vLLM's own weight transfer API, on the trainer's side.

    from delta_weight_sync.weight_transfer import DeltaTrainerInitInfo

    engine = WeightTransferTrainerFactory.trainer_init(
        DeltaTrainerInitInfo("hf://buckets/me/short#first", base=MODEL, rank=rank),
        client=HTTPVLLMWeightSyncClient("http://localhost:8000"),
        source=ModuleSource(model),
    )
    engine.send_weights()  # after each step

The servers need the same backend; see `delta_weight_sync.vllm.transfer`. The import of this module registers
the backend in the trainer's process, where vLLM loads no plugins.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from delta_weight_sync.errors import ConfigError, EngineError
from delta_weight_sync.publish.publisher import Publisher
from delta_weight_sync.publish.sharding import Peers

__all__ = ["DeltaTrainerInitInfo", "DeltaTrainerWeightTransferEngine"]


@dataclass
class DeltaTrainerInitInfo(TrainerInitInfo):
    """Chooses the backend `delta_weight_sync`, and says which run to publish.

    Args:
        run: URL of the run, as for `Publisher`. Every server must be able to read it.
        base: As for `Publisher`.
        options: Further keyword arguments of `Publisher`, such as {"keep": "20GB"}.
        timeout_s: How long a server may take to bring a version into its live weights.
        rank: This process's rank. Rank 0 publishes.
    """

    backend: ClassVar[str] = "delta_weight_sync"

    run: str
    base: str | Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 240.0


class DeltaTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    """Publishes a `WeightSource` as versions of a run, and waits until the servers have them."""

    init_info_cls = DeltaTrainerInitInfo

    def __init__(self, *, init_info: DeltaTrainerInitInfo, client: Any, source: Any) -> None:
        """`client` and `source`: as for `trainer_init`, which also checks them."""
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._timeout_s = init_info.timeout_s
        self._publisher: Publisher | None = None
        if not self.is_sender:
            return
        # The source gathers sharded parameters, so only this rank publishes.
        self._publisher = Publisher(
            init_info.run, init_info.base, peers=Peers(alone=True), **init_info.options
        )
        try:
            _asked(client.init_weight_transfer_engine, {"run": init_info.run})
        except BaseException:
            self._publisher.close()
            raise

    @classmethod
    def trainer_init(cls, init_info: DeltaTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Open the run for writing, and let the servers follow it. Call this on every rank.

        Args:
            init_info: The run.
            client: Asks the servers. vLLM's `HTTPVLLMWeightSyncClient` asks one.
            source: Yields whole tensors, under the names of the model or of the checkpoint.

        Raises:
            ConfigError: There is no source, or rank 0 would not get every tensor.
            EngineError: A server refuses the run; the message is the server's.
            DeltaWeightSyncError: The run cannot be opened; see `Publisher`.
        """
        if source is None:
            raise ConfigError(
                f"the backend {init_info.backend!r} sends whole models: pass source=ModuleSource(model)"
            )
        if init_info.is_sender and (held := source.held_names()) is not None:
            names = {each.name for each in source.metadata()}
            if lacking := sorted(names - set(held)):
                raise ConfigError(
                    f"rank 0 does not hold {lacking[0]}, one of {len(lacking)} tensors that it must publish:"
                    " use a source whose rank 0 gathers every tensor"
                )
        return cls(init_info=init_info, client=client, source=source)

    def send_weights(self, step: int | None = None) -> None:
        """Publish the source's weights, and return when every server serves them. Call this on every rank.

        Servers need no pause. `step` is the number of this sync, stored in the version; by default syncs
        are counted from 1.

        Raises:
            EngineError: A server refuses the version, or does not have it in time.
            DeltaWeightSyncError: The weights cannot be published; see `Publisher.publish`.
        """
        if self._publisher is None:
            for _ in self.source:  # gathering is collective: rank 0 waits for this rank
                pass
            return
        self._publisher.publish(iter(self.source), step)
        newest = self._publisher.flush()
        wanted = {"version": newest.version, "digest": newest.digest, "timeout_s": self._timeout_s}
        _asked(self.client.start_weight_update)
        _asked(self.client.update_weights, wanted)
        _asked(self.client.finish_weight_update)

    def shutdown(self) -> None:
        """Close the run. Servers keep following it, and a later trainer may continue it."""
        publisher = self._publisher
        self._publisher = None
        if publisher:
            with publisher:
                pass  # the end of the block flushes and closes


def _asked(call: Any, *arguments: Any) -> None:
    """Call a server; raise `EngineError` with what the server says. (`requests` gives only a status code.)"""
    try:
        call(*arguments)
    except Exception as error:
        response = getattr(error, "response", None)
        if response is None:
            raise
        if response.status_code == 404:
            raise EngineError(
                f"{response.url} does not exist: start vLLM with VLLM_SERVER_DEV_MODE=1"
            ) from error
        try:
            said = response.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            said = response.text
        raise EngineError(f"vLLM refused the weight update: {said}") from error


WeightTransferTrainerFactory.register_engine(DeltaTrainerInitInfo.backend, DeltaTrainerWeightTransferEngine)
