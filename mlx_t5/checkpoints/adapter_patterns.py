"""Matches the patterns of adapter_config.json against the names of layers, as PEFT does.

They are regular expressions from a stranger, who may choose one that takes years to match, and
Python cannot end a match. So a process of its own does the matching, and that can be ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping

from mlx_t5.errors import UserError, shown

CONFIG = "adapter_config.json"
# A flag behind a name, as in "a(?i)b", is a warning before Python 3.11 and an error from then on.
_WARNINGS = ("-W", "ignore", "-W", "error::DeprecationWarning")
MATCHING_SECONDS = 10.0  # for all patterns and layers; mostly 0.05 suffice
# As PEFT puts a pattern together with others: names that it is for, and how it is written.
WHOLE, ENDING, BLOCK = "{}", r"(.*\.)?({})$", r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
ANY_BLOCK = r".*?\.[^.]*\.(?P<idx>\d+)\."
_MATCHER = """
import json, re, sys
found, wrong = [], None
patterns, names = json.load(sys.stdin)
for pattern, whole in patterns:
    try:
        match = re.compile(pattern).fullmatch if whole else re.compile(pattern).match
        hits = [(name, match(name)) for name in names]
        found.append({name: hit.groupdict().get("idx") or "" for name, hit in hits if hit})
    except (re.error, RecursionError, OverflowError, DeprecationWarning) as error:
        wrong = [len(found), str(error)]
        break
json.dump([found, wrong], sys.stdout)
"""
Pattern = tuple[str, str]  # how it is put together, such as ENDING, and the pattern
Matches = Mapping[Pattern, Mapping[str, str]]  # by pattern and by name, see `matches`


def matches(
    patterns: Iterable[Pattern], names: Iterable[str], seconds: float = MATCHING_SECONDS
) -> dict[Pattern, dict[str, str]]:
    """Matches regular expressions against names.

    Args:
        patterns: Python's `re` reads them. Those of WHOLE match whole names, others beginnings.
        names: what they are matched against.
        seconds: the most that it may take.

    Returns:
        By pattern and by name that it matches, what the group `idx` holds ("" without one).

    Raises:
        UserError: a pattern is no regular expression, or the time is over.
    """
    unique = list(dict.fromkeys(patterns))
    if not unique:
        return {}
    written = [(how.replace("{}", pattern), how == WHOLE) for how, pattern in unique]
    command = [sys.executable, "-I", "-S", *_WARNINGS, "-c", _MATCHER]
    request = json.dumps([written, list(names)]).encode()
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=seconds)
        results, wrong = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        cause = f"its patterns take more than {seconds:g} s, or too much memory, to match"
        raise UserError(f"{CONFIG}: {cause}; write them more simply") from None
    if wrong:
        (how, pattern), reason = unique[wrong[0]], shown(wrong[1])
        behind = "" if how == WHOLE else " behind a name, where PEFT puts it"
        raise UserError(f"{CONFIG}: {shown(pattern)} is no regular expression{behind} ({reason})")
    return dict(zip(unique, results, strict=True))
