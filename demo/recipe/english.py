"""English morphology, and the marks by which the error generator finds its words.

While a sentence is being built, words that errors can apply to carry one private-use character
(`mark`); `plain` takes them off. The marks never reach a file or a model.
"""

import re
from dataclasses import dataclass

# Marks: what a word is in its sentence.
THIRD, PLURAL_FORM, INFINITIVE, PAST, PARTICIPLE, GERUND = map(chr, range(0xE000, 0xE006))
ADJECTIVE, ADVERB, TO, SUBJECT, COUNTED, PARTICLE = map(chr, range(0xE006, 0xE00C))
ARTICLE, AUXILIARY, TIME, MANY = map(chr, range(0xE00C, 0xE010))
MARKS = "".join(map(chr, range(0xE000, 0xE010)))

_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen "
    "fourteen fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
_DOUBLING = frozenset(
    ["put", "cut", "get", "run", "swim", "shop", "sit", "stop", "begin", "forget", "plan", "prefer"]
)


def mark(word: str, kind: str) -> str:
    """The word with its mark; a phrase is marked on its first word."""
    head, space, rest = word.partition(" ")
    return head + kind + space + rest


def plain(text: str) -> str:
    """The text without marks."""
    return re.sub(f"[{MARKS}]", "", text)


def s_form(word: str) -> str:
    """The plural of a noun, or the third person singular of a verb."""
    if word in ("have", "do", "go", "be"):
        return {"have": "has", "do": "does", "go": "goes", "be": "is"}[word]
    if re.search("(s|x|z|ch|sh)$", word):
        return word + "es"
    if re.search("[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + "s"


def past_form(word: str) -> str:
    """The regular past of a verb."""
    if word.endswith("e"):
        return word + "d"
    if re.search("[^aeiou]y$", word):
        return word[:-1] + "ied"
    return word + word[-1] + "ed" if word in _DOUBLING else word + "ed"


def ing_form(word: str) -> str:
    """The "-ing" form of a verb."""
    if word.endswith("ie"):
        return word[:-2] + "ying"
    if word.endswith("e") and not word.endswith("ee") and word != "be":
        return word[:-1] + "ing"
    return word + word[-1] + "ing" if word in _DOUBLING else word + "ing"


def article(text: str) -> str:
    """ "a" or "an" before a text, by the sound it begins with."""
    word = plain(text)
    vowel = word[0] in "aeio" or word.startswith("u") and not re.match("uni|use|usu", word)
    return mark("an" if vowel or word.startswith("hour") else "a", ARTICLE) + " " + text


@dataclass(frozen=True)
class Verb:
    """An English verb with the words that always follow it ("wait" + "for")."""

    base: str
    past: str
    participle: str
    rest: str = ""

    @property
    def same_past(self) -> bool:
        """True for "read" and "put", whose past is spelled like the present."""
        return self.base == self.past

    @property
    def third(self) -> str:
        """The third person singular."""
        return s_form(self.base)

    @property
    def gerund(self) -> str:
        """The "-ing" form."""
        return ing_form(self.base)


def parse_verb(text: str, particle: bool = False) -> Verb:
    """Reads "write/wrote/written to"; `particle`: what follows is a lone preposition."""
    head, _, rest = text.partition(" ")
    forms = head.split("/")
    base = forms[0]
    past = forms[1] if len(forms) > 1 else past_form(base)
    participle = forms[2] if len(forms) > 2 else past
    if particle and rest:
        rest = mark(rest, PARTICLE)
    return Verb(base, past, participle, rest)


def join_list(parts: list[str], conjunction: str = "and") -> str:
    """ "a, b, and c": with the serial comma."""
    if len(parts) < 3:
        return f" {conjunction} ".join(parts)
    return ", ".join(parts[:-1]) + f", {conjunction} {parts[-1]}"


def number(n: int) -> str:
    """The number (0 to 999) in words."""
    if n < 20:
        return _NUMBERS[n]
    if n < 100:
        return _TENS[n // 10] + ("-" + _NUMBERS[n % 10] if n % 10 else "")
    rest = n % 100
    return _NUMBERS[n // 100] + " hundred" + (" " + number(rest) if rest else "")
