"""A cost model: bytes, seconds and money of a run, from measured rates. `delta-weight-sync plan --help`."""

from delta_weight_sync.plan.model import Plan, Question, predict

__all__ = ["Plan", "Question", "predict"]
