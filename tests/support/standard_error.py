"""What a process has told on standard error, without what depends on the machine."""

import re


def without_metal(text: str) -> str:
    """A text without the lines in which Metal says that it checks calls."""
    return re.sub(r"(?m)^.* Metal \w+ Validation Enabled\n", "", text)


def messages(text: str) -> list[str]:
    """The lines of a text, without Metal's and without hints about the machine."""
    return [line for line in without_metal(text).splitlines() if not line.startswith("hint: ")]
