"""Removes from standard error the lines that depend on the machine."""

import re


def without_metal(text: str) -> str:
    """Returns a text without the lines of Metal about its validation."""
    return re.sub(r"(?m)^.* Metal \w+ Validation Enabled\n", "", text)


def messages(text: str) -> list[str]:
    """Returns the lines of a text without Metal's lines and without hints."""
    return [line for line in without_metal(text).splitlines() if not line.startswith("hint: ")]
