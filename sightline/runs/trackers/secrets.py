"""Keep passwords and keys out of what a tracker is told, and out of what is said about it."""

from __future__ import annotations

import os
import re
from typing import Any

# Of environment variables that hold a secret, e.g. WANDB_API_KEY, MLFLOW_TRACKING_TOKEN, AWS_SECRET_ACCESS_KEY.
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)(API_?)?KEY(_|$)", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]*(?=@)")  # user:password
_IN_QUERY = re.compile(r"(?i)(?<=[?&])([a-z_]*(?:token|key|secret|password)[a-z_]*=)[^&\s]+")
SHORTEST = 8  # letters of a secret; what is shorter is in many texts
HIDDEN = "***"


def without_secrets(text: str) -> str:
    """Return a text without passwords in addresses and without the values of secret environment variables."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and value in text and _SECRET.search(name):
            text = text.replace(value, HIDDEN)
    return _IN_QUERY.sub(rf"\1{HIDDEN}", _IN_ADDRESS.sub(HIDDEN, text))


def plain(value: Any) -> Any:
    """Return a field as a tracker can show it, without secrets."""
    if value is None or isinstance(value, bool | int | float):
        return value
    return without_secrets(value if isinstance(value, str) else str(value))
