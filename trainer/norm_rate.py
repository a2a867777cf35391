"""A learning rate of their own for the scales of the norms, as training scripts with several groups have it.

They are a thousandth of the weights, and decide how sure a policy is. So it can grow surer of what it knows
already, the first thing that reinforcement learns, at a rate at which few of its other weights change.
"""

from __future__ import annotations

from typing import Any

import torch

from delta_weight_sync.publish.trl_trainer import BucketGRPOTrainer


class NormRateTrainer(BucketGRPOTrainer):
    """Trains vectors, norms and biases, at `norm_rate`, and all other weights at `learning_rate`."""

    def __init__(self, *, norm_rate: float, **kwargs: Any) -> None:
        """`norm_rate`: 0 for the rate of the other weights."""
        super().__init__(**kwargs)
        self._norm_rate = norm_rate

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """TRL's own; it has a group for those which do not decay."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        for group in optimizer.param_groups:
            if self._norm_rate and all(weight.ndim == 1 for weight in group["params"]):
                group["lr"] = self._norm_rate
        return optimizer
