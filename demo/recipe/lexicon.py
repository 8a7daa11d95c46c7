"""Loads the word lists in lexicon/*.txt into typed entries."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from demo.recipe import english, french

FOLDER = Path(__file__).parent / "lexicon"
PERSONS = ("kin", "role")


@dataclass(frozen=True)
class Noun:
    """One noun; the plural of a mass noun equals its singular."""

    en: str
    en_plural: str
    fr: str
    fr_plural: str
    gender: str
    kind: str
    members: tuple[str, ...] = ()

    @property
    def mass(self) -> bool:
        """True for bread and water: nouns without a plural, which take "some"."""
        return self.kind in ("mass", "drink")

    @property
    def en_counted(self) -> str:
        """The plural after a number, marked where it is the singular with an "s"."""
        regular = " " not in self.en and self.en_plural == self.en + "s"
        return english.mark(self.en_plural, english.COUNTED) if regular else self.en_plural

    @property
    def classes(self) -> set[str]:
        """What adjectives and containers may call it: "food", "food:egg", "person"."""
        own = {self.kind, f"{self.kind}:{self.en}"}
        return own | {"person"} if self.kind in PERSONS else own


@dataclass(frozen=True)
class Adjective:
    """French forms: masculine, feminine, their plurals, masculine before a vowel."""

    en: str
    comparative: str | None
    fr: tuple[str, str, str, str, str]
    before: bool
    classes: frozenset[str]

    def form(self, gender: str, is_plural: bool, following: str = "") -> str:
        """The form that agrees; `following` is the French text it stands before."""
        if gender == "m" and not is_plural and following and french.starts_with_vowel(following):
            return self.fr[4]
        return self.fr[(gender == "f") + 2 * is_plural]


@dataclass(frozen=True)
class Action:
    """A verb pair: English verb, French verb with what always follows it, classes of objects."""

    en: english.Verb
    fr: french.Verb
    fr_rest: str
    reflexive: bool
    state: bool
    clitic: bool
    objects: tuple[str, ...]


@dataclass(frozen=True)
class Lexicon:
    """Everything the grammar draws from, by section."""

    nouns: dict[str, tuple[Noun, ...]]
    adjectives: dict[str, tuple[Adjective, ...]]
    actions: dict[str, tuple[Action, ...]]
    phrases: dict[str, tuple[tuple[str, str], ...]]

    @cached_property
    def verbs(self) -> list[english.Verb]:
        """The English verb of every action."""
        return [action.en for entries in self.actions.values() for action in entries]

    @cached_property
    def plain_transitives(self) -> list[Action]:
        """Those with nothing between verb and object in French, and a past unlike the present."""
        verbs = self.actions["transitive"]
        return [verb for verb in verbs if not verb.fr_rest and not verb.en.same_past]

    def of_class(self, name: str) -> tuple[Noun, ...]:
        """The nouns of a class such as "food", "food:egg" or "person"."""
        kind, _, word = name.partition(":")
        kinds = PERSONS if kind == "person" else (kind,)
        return tuple(n for k in kinds for n in self.nouns[k] if not word or n.en == word)


def _sections(name: str) -> Iterator[tuple[str, str]]:
    section = ""
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            yield section, line


def _group(pairs: Iterator[tuple[str, object]]) -> dict[str, tuple]:
    grouped: dict[str, list] = {}
    for section, entry in pairs:
        grouped.setdefault(section, []).append(entry)
    return {section: tuple(entries) for section, entries in grouped.items()}


def _noun(section: str, line: str) -> Noun:
    left, right = line.split(" = ")
    en, _, en_plural = left.partition("/")
    match = re.fullmatch(r"(.+?) ([mf])(?: (\S.*))?", right)
    fr, _, fr_plural = match[1].partition("/")
    if section in ("mass", "drink"):
        en_plural, fr_plural = en, fr
    return Noun(
        en,
        en_plural or english.s_form(en),
        fr,
        fr_plural or french.plural(fr),
        match[2],
        section,
        tuple((match[3] or "").split(",")) if match[3] else (),
    )


def _adjective(line: str) -> Adjective:
    head, _, classes = line.partition(" : ")
    left, right = head.split(" = ")
    before = left.startswith("^ ")
    en, _, comparative = left.removeprefix("^ ").partition("/")
    forms = right.split("/")
    masculine = forms[0]
    fem = forms[1] if len(forms) > 1 else french.feminine(masculine)
    masculine_plural = forms[2] if len(forms) > 2 else french.plural(masculine)
    fem_plural = forms[3] if len(forms) > 3 else french.plural(fem)
    vowel = forms[4] if len(forms) > 4 else masculine
    if comparative == "-":
        comparative = None
    elif not comparative:
        comparative = "more " + en
    return Adjective(
        en,
        comparative,
        (masculine, fem, masculine_plural, fem_plural, vowel),
        before,
        frozenset(classes.split()),
    )


def _action(line: str) -> Action:
    head, _, classes = line.partition(" : ")
    left, right = head.split(" = ")
    state, clitic = left.startswith("*"), left.startswith("+ ")
    reflexive = right.startswith(("se ", "s'"))
    infinitive, _, rest = re.sub("^(se |s')", "", right).partition(" ")
    return Action(
        english.parse_verb(left.lstrip("*+ "), particle=bool(classes)),
        french.conjugate(infinitive),
        rest,
        reflexive,
        state,
        clitic,
        tuple(classes.split()),
    )


def _phrase(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" = ")
    return left, right or left


@lru_cache(maxsize=1)
def load() -> Lexicon:
    """Reads the word lists (once)."""
    return Lexicon(
        nouns=_group((s, _noun(s, line)) for s, line in _sections("nouns.txt")),
        adjectives=_group((s, _adjective(line)) for s, line in _sections("adjectives.txt")),
        actions=_group((s, _action(line)) for s, line in _sections("verbs.txt")),
        phrases=_group((s, _phrase(line)) for s, line in _sections("phrases.txt")),
    )
