"""Format commands that are suggested to the user."""

import os


def suggested(command: str) -> str:
    """Return a command as the user would type it, with `uv run` if uv started this process."""
    return f"uv run {command}" if os.environ.get("UV") else command
