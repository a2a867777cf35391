"""A cost model: bytes, seconds and money of a run, from measured rates. `python -m shared.plan --help`."""

from shared.plan.model import Plan, Question, predict

__all__ = ["Plan", "Question", "predict"]
