"""Format commands that are suggested to the user."""

import os


def suggested(command: str) -> str:
    """Return a command as the user should type it: after "uv run" if uv started this process, else unchanged."""
    return f"uv run {command}" if os.environ.get("UV") else command
