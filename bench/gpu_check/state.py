"""Trains with autocast and fp32 master weights, publishes, and saves and restores a state, bit for bit."""

import tempfile
import time
from pathlib import Path

import torch

from bench.gpu_check.report import Row, Rows, gb_s, ms
from delta_weight_sync import Publisher
from delta_weight_sync.publish.sharding import Peers

# 67 million weights
_WIDTH = 4096
_LAYERS = 4
_STEPS = 2
_SMALL = 64


def rows(device: torch.device) -> Rows:
    """One row for each promise, and one for the cost of a snapshot."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _rows(device, Path(folder))


def _rows(device: torch.device, folder: Path) -> Rows:
    (folder / "config.json").write_text("{}")
    url = f"{(folder / 'bucket').as_uri()}#run"
    width = _WIDTH if device.type == "cuda" else _SMALL
    torch.manual_seed(0)
    model, optimizer = _made(width, device)
    with Publisher(url, folder, peers=Peers(alone=True), mirror="device") as publisher:
        for number in range(_STEPS + 1):
            publisher.publish(model.named_parameters(), number)
            manifest = publisher.flush()
            right = manifest.digest == _digest_of_casts(publisher, model)
            yield Row(
                f"version {manifest.version} equals torch's cast of the fp32 master weights", right=right
            )
            if number < _STEPS:
                _step(model, optimizer, width, device)
        _synchronize(device)
        started = time.perf_counter()
        publisher.save_state(model.named_parameters(), optimizer)
        seconds = time.perf_counter() - started
        size = 12 * sum(parameter.numel() for parameter in model.parameters())
        yield Row(
            "state: training waits for its copy (and for the upload of the first state)",
            f"{ms(seconds)}, {gb_s(size / seconds)}",
        )
    resumed, its_optimizer = _made(width, device)
    with Publisher(url, folder, peers=Peers(alone=True), mirror="device") as publisher:
        started = time.perf_counter()
        publisher.restore(resumed.named_parameters(), its_optimizer)
        _synchronize(device)
        yield Row("state: restoring it takes", ms(time.perf_counter() - started))
        yield Row("the restored weights equal those that were saved", right=_same(model, resumed))
        for each, its in ((model, optimizer), (resumed, its_optimizer)):
            torch.manual_seed(1)
            _step(each, its, width, device)
        yield Row("the next step gives equal weights in both trainers", right=_same(model, resumed))


def _made(width: int, device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    layers = (torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS))
    model = torch.nn.Sequential(*layers).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, width: int, device: torch.device) -> None:
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(torch.randn(64, width, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _digest_of_casts(publisher: Publisher, model: torch.nn.Module) -> str:
    return publisher.digest((name, parameter.detach().cpu()) for name, parameter in model.named_parameters())


def _same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
