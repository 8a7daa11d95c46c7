"""Languages by their codes (BCP 47), and the prefix with which a model translates to a language.

Names and former codes are those of Unicode's CLDR, by Babel (https://babel.pocoo.org), which is
imported when a language is first named.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from string import Formatter

from mlx_t5.errors import UserError
from mlx_t5.settings import refusal

FIELDS = ("source", "target", "source_code", "target_code")  # of a template

_SOURCE = re.compile(r"translate (?:from )?(\w+) (?:in)?to ", re.IGNORECASE)
_TASK = re.compile(r"translation_([a-z]{2,3})_to_([a-z]{2,3})")
_TAG = re.compile(r"<2([A-Za-z]{2,3}(?:[-_]\w+)*)>")  # MADLAD-400


def checked_code(value: str) -> str:
    """The language of a code such as "de" or "pt-BR", without its region."""
    return checked_codes(value, "source_language")[-1]


def checked_codes(value: str, name: str) -> list[str]:
    """A code in today's form, then the same without region and script: pt-BR, pt."""
    codes = canonical(value) if isinstance(value, str) else []
    if not codes or codes[-1] not in _names():
        raise refusal(name, value, "a language's code, such as de or pt-BR")
    return codes


def canonical(code: str) -> list[str]:
    from babel.core import get_global

    language, *rest = re.split("[-_]", code)
    language = get_global("language_aliases").get(language.lower(), language.lower())
    parts = [language.split("_")[0], *rest]
    return ["-".join(parts[:end]).lower() for end in range(len(parts), 0, -1)]


def source_language_of(prefix: str) -> str:
    """The code of the language that "translate English to German: " names; English otherwise."""
    named = _SOURCE.search(prefix)
    codes = {name.lower(): code for code, name in _names().items()} if named else {}
    return codes.get(named[1].lower(), "en") if named else "en"


@cache
def _names() -> dict[str, str]:
    from babel import Locale

    return {code: name for code, name in Locale("en").languages.items() if "_" not in code}


def checked_template(template: str) -> str:
    """A template such as "translate {source} to {target}: "; refused if it cannot be filled in."""
    try:
        parts = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except (ValueError, TypeError):  # unpaired braces, or no text
        parts = []
    # A field has neither a width nor a conversion: a width of 10**9 would fill the memory.
    if not {("target", "", None), ("target_code", "", None)} & set(parts) or any(
        name not in FIELDS or spec or conversion for name, spec, conversion in parts
    ):
        expected = ", ".join(f"{{{name}}}" for name in FIELDS)
        raise refusal("translation_prefix", template, f"a text with {{target}}, of {expected}")
    return template


@dataclass(frozen=True)
class Translations:
    """The pairs of languages that a model translates, with the prefix of each.

    Attributes:
        tags: the prefix by target, of models that translate from any language (MADLAD-400).
        tasks: the prefix by source and target, of the model's tasks `translation_xx_to_yy`.
        template: the prefix of other pairs, with the fields `FIELDS`; "" if there is none.
    """

    tags: dict[str, str]
    tasks: dict[tuple[str, str], str]
    template: str = ""

    @classmethod
    def of(
        cls, tasks: Iterable[tuple[str, str]], vocabulary: Collection[str], template: str = ""
    ) -> Translations:
        """Reads them from the tasks' names and prefixes, and from the tokens of a vocabulary."""
        named = [(_TASK.fullmatch(name), prefix) for name, prefix in tasks]
        tagged = filter(None, map(_TAG.fullmatch, vocabulary)) if "<2de>" in vocabulary else ()
        return cls(
            {canonical(tag[1])[0]: tag[0] + " " for tag in tagged},
            {(canonical(n[1])[-1], canonical(n[2])[-1]): prefix for n, prefix in named if n},
            checked_template(template) if template else "",
        )

    def prefix(self, target: str, source: str = "") -> tuple[str, str]:
        """The prefix of every text, and the code of the source language; "" if it is unknown.

        Raises:
            UserError: a code is unknown, or the model does not translate this pair.
        """
        targets = checked_codes(target, "target_language")
        sources = checked_codes(source, "source_language") if source else []
        code = sources[-1] if sources else ""
        if tag := next((self.tags[one] for one in targets if one in self.tags), None):
            return tag, code
        fits = [(prefix, pair[0]) for pair, prefix in self.tasks.items() if pair[1] in targets]
        fits = [fit for fit in fits if not sources or fit[1] in sources]
        if len(fits) == 1:
            return fits[0]
        needs_source = any(field in self.template for field in ("{source}", "{source_code}"))
        if self.template and (sources or not needs_source):
            names = _names()[code] if sources else "", _names()[targets[-1]], code, targets[0]
            return self.template.format(**dict(zip(FIELDS, names, strict=True))), code
        if not source and (fits or self.template):
            needs = f"target_language {target} requires source_language"
            raise UserError(f"{needs}: the model knows {self}")
        pair = f"from {source} to {target}" if source else f"to {target}"
        raise UserError(f"this model does not translate {pair}; it knows {self}")

    def pairs(self) -> list[tuple[str, str, list[str]]]:
        """The code and the name of each source, and the codes of its targets."""
        anything = [code for code in _names() if len(code) == 2] if self.template else []
        sources = {*anything, *self.tags, *(source for source, _ in self.tasks)}
        rows = []
        for source in sorted(sources):
            own = (target for start, target in self.tasks if start == source)
            name = _names()[canonical(source)[-1]]
            rows.append((source, name, sorted({*own, *self.tags, *anything})))
        return rows

    def __str__(self) -> str:
        """The pairs in one line, as an error lists them."""
        pairs = [f"{source} to {target}" for source, target in self.tasks]
        if self.template:
            pairs.append(f'any pair by "{self.template}"')
        if self.tags:
            pairs.append("any language to " + " ".join(sorted(self.tags)))
        return ", ".join(pairs) or "no languages; give a template, --translation-prefix"
