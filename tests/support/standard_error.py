"""What a process has told on standard error, without what depends on the machine."""

import re

_OF_THE_MACHINE = re.compile(r"hint: |.* Metal \w+ Validation Enabled$")  # the latter is Metal's


def messages(text: str) -> list[str]:
    """The lines, without hints about the machine and without Metal's about its own checks."""
    return [line for line in text.splitlines() if not _OF_THE_MACHINE.match(line)]
