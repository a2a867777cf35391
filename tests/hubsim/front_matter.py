"""The YAML block that opens a README.md, and the rules of the Hub that it is checked against on upload."""

import re
from typing import Any

import yaml

from .hardware import known

COLORS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")
SDKS = ("gradio", "docker", "static", "streamlit")


def parse(text: str) -> dict[str, Any]:
    """The block as a dict; empty where there is none. Raises yaml.YAMLError."""
    match = re.match(r"\s*---\r?\n(.*?)\r?\n---\r?(\n|$)", text, re.DOTALL)
    parsed = yaml.safe_load(match[1]) if match else None
    return parsed if isinstance(parsed, dict) else {}


def faults(card: dict[str, Any], kind: str) -> list[str]:
    """What the Hub refuses, for as many of its rules as can bring a deployment down."""
    if kind == "space":
        return _space_faults(card) if card else []
    return [] if isinstance(card.get("model-index", []), list) else ['"model-index" must be an array']


def _space_faults(card: dict[str, Any]) -> list[str]:
    colors = [name for name in ("colorFrom", "colorTo") if card.get(name, "red") not in COLORS]
    found = [f'"{name}" must be one of [{", ".join(COLORS)}]' for name in colors]
    if card.get("sdk") not in SDKS:
        found.append(f'"sdk" must be one of [{", ".join(SDKS)}]')
    if len(card.get("short_description", "")) > 60:
        found.append('"short_description" length must be less than or equal to 60 characters long')
    if not known(card.get("suggested_hardware", "cpu-basic")):
        found.append('"suggested_hardware" must be a known flavor')
    return found
