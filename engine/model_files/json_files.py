"""Reads the JSON files of a model folder."""

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelFileError

CURE = "download the model folder again"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelFileError if it is missing or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError("Model file is missing", path, CURE) from error
    except ValueError as error:
        raise ModelFileError("Model file is damaged", path, CURE) from error
    if not isinstance(value, dict):
        raise ModelFileError("Model file is damaged", path, CURE)
    return value
