"""Languages by their codes (BCP 47), and the prefix with which a model translates to a language.

Names, former codes, and the scripts and regions that a code implies are those of Unicode's CLDR, by
Babel (https://babel.pocoo.org), which is imported when a language is first named.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from string import Formatter

from mlx_t5.errors import UserError
from mlx_t5.settings import refusal

FIELDS = ("source", "target", "source_code", "target_code")  # of a template

_SOURCE = re.compile(r"translate (?:from )?(\w+) (?:in)?to ", re.IGNORECASE)
_TASK = re.compile(r"translation_([a-z]{2,3})_to_([a-z]{2,3})")
_SUBTAGS = r"(?:[-_]([A-Za-z]{4}))?(?:[-_]([A-Za-z]{2}|[0-9]{3}))?"  # script and region
_CODE = re.compile(rf"([A-Za-z]{{2,3}}){_SUBTAGS}((?:[-_][A-Za-z0-9]{{1,8}}){{0,4}})")
# MADLAD-400 also has tags of regions (<2NL>), scripts (<2Latn>) and tasks (<2translate>).
_TAG = re.compile(rf"<2([a-z]{{2,3}}{_SUBTAGS})>")


def checked_code(value: str) -> str:
    """The language of a code such as "de" or "pt-BR": today's code, without script and region."""
    return _current(_checked(value, "source_language")).split("-")[0]


def _checked(value: str, name: str) -> str:
    if isinstance(value, str) and (code := _bcp47(value)):
        return code
    raise refusal(name, value, "a language's code, such as de or pt-BR")


def _bcp47(value: str) -> str:
    """A code as BCP 47 writes it, such as zh-Hant-TW; "" if it is not a language's."""
    if not (subtags := _subtags(value)):
        return ""
    language, script, region, rest = subtags
    parts = [language.lower(), script.title(), region.upper(), rest[1:].lower().replace("_", "-")]
    code = "-".join(filter(None, parts))
    language = _current(code).split("-")[0]
    # CLDR does not list every language whose code has three letters.
    return code if len(language) == 3 or language in _names() else ""


def _subtags(code: str) -> tuple[str, ...]:
    match = _CODE.fullmatch(code)
    return match.groups("") if match else ()


@lru_cache(1_000)
def _current(code: str) -> str:
    """Replaces a former code, or another name of a language: iw-IL is he-IL, sh is sr-Latn."""
    from babel.core import get_global

    language, *rest = code.split("-")
    language, *implied = get_global("language_aliases").get(language, language).split("_")
    return "-".join([language, *(rest or implied)])


def _suitable(code: str, available: Collection[str]) -> list[str]:
    """The codes among `available` that a request for `code` may mean, the best first."""
    from babel.core import get_global

    likely = get_global("likely_subtags")
    by_code = {_current(one): one for one in available} | {one: one for one in available}
    forms = [code, _current(code)]
    parent = get_global("parent_exceptions").get(forms[1].split("-")[0], "")
    if parent and "_" not in parent:  # nb and nn have no; some CLDRs have fr_HT for ht
        forms.append(parent)
    wanted = []
    for form in forms:
        language, script, region, _ = _subtags(form)
        keys = f"{language}_{script}", f"{language}_{region}", language
        implied = next((likely[key] for key in keys if key in likely), "__").split("_")
        script, region = script or implied[1], region or implied[2]
        subtags = f"-{script}-{region}", f"-{script}", f"-{region}", ""
        wanted += [form, *(language + one for one in subtags)]
    return list(dict.fromkeys(by_code[one] for one in wanted if one in by_code))


def name_of(code: str) -> str:
    """The English name, such as "Brazilian Portuguese" or "Serbian (Latin)"; else the code."""
    from babel import Locale

    english = Locale("en")
    scripts, regions = english.scripts, english.territories
    for form in (code, _current(code)):
        parts = form.split("-")
        for end in range(len(parts), 0, -1):
            if name := english.languages.get("_".join(parts[:end])):
                rest = [scripts.get(one) or regions.get(one, one) for one in parts[end:]]
                return f"{name} ({', '.join(rest)})" if rest else name
    return code


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
        tokens = sorted(token for token in vocabulary if token.startswith("<2"))
        tagged = [(_bcp47(tag[1]), tag[0]) for tag in map(_TAG.fullmatch, tokens) if tag]
        return cls(
            {code: tag + " " for code, tag in tagged if code},
            {(name[1], name[2]): prefix for name, prefix in named if name},
            checked_template(template) if template else "",
        )

    def prefix(self, target: str, source: str = "") -> tuple[str, str]:
        """The prefix of every text, and the code of the source language; "" if it is unknown.

        Raises:
            UserError: a code is unknown, or the model does not translate this pair.
        """
        to = _checked(target, "target_language")
        start = _checked(source, "source_language") if source else ""
        language = _current(start).split("-")[0]
        if tags := _suitable(to, self.tags):
            return self.tags[tags[0]], language
        sources = sorted({pair[0] for pair in self.tasks})
        sources = _suitable(start, sources) if source else sources
        targets = _suitable(to, [pair[1] for pair in self.tasks])
        fits = [(one, other) for other in targets for one in sources if (one, other) in self.tasks]
        if fits and (source or len(fits) == 1):
            return self.tasks[fits[0]], fits[0][0]
        needs_source = any(field in self.template for field in ("{source}", "{source_code}"))
        if self.template and (source or not needs_source):
            codes = _current(start), _current(to)
            values = *(name_of(code) for code in codes), *codes
            return self.template.format(**dict(zip(FIELDS, values, strict=True))), language
        if not source and (fits or self.template):
            raise UserError(f"target_language {target} requires source_language; known: {self}")
        pair = f"from {source} to {target}" if source else f"to {target}"
        raise UserError(f"this model does not translate {pair}; it knows {self}")

    def pairs(self) -> list[tuple[str, str, list[str]]]:
        """The code and the name of each language, and the codes of its targets, if any."""
        anything = [code for code in _names() if len(code) == 2] if self.template else []
        targets = {*anything, *self.tags}
        rows = []
        for code in sorted(targets.union(*self.tasks)):
            own = {target for source, target in self.tasks if source == code}
            rows.append((code, name_of(code), sorted(targets | own)))
        return rows

    def __str__(self) -> str:
        """The pairs in one line, as an error lists them."""
        pairs = [f"{source} to {target}" for source, target in self.tasks]
        if self.template:
            pairs.append(f'any pair by "{self.template}"')
        if self.tags:
            pairs.append("any language to " + " ".join(sorted(self.tags)))
        return ", ".join(pairs) or "no languages; give a template, --translation-prefix"
