"""French morphology: conjugation, agreement, elision and contraction.

Forms are rules plus a table of irregular verbs. Persons are indices into five-form tuples:
0 je, 1 il/elle, 2 nous, 3 vous, 4 ils/elles ("tu" does not occur: "you" is always "vous").
"""

import re
from dataclasses import dataclass
from functools import lru_cache

REFLEXIVE = ("me", "se", "nous", "vous", "se")

# Words that look as if they began with a vowel sound but block elision.
ASPIRATED = frozenset(["onze", "onzième", "huit", "haricot", "haricots", "hors"])

# English: French before m., f., plural nouns; "ma" is "mon" before a vowel.
POSSESSIVES = {
    "my": ("mon", "ma", "mes"),
    "his": ("son", "sa", "ses"),
    "her": ("son", "sa", "ses"),
    "our": ("notre", "notre", "nos"),
    "your": ("votre", "votre", "vos"),
    "their": ("leur", "leur", "leurs"),
}
# infinitive: present (je il nous vous ils); past participle; future stem
_IRREGULAR = """
être: suis est sommes êtes sont; été; ser
avoir: ai a avons avez ont; eu; aur
aller: vais va allons allez vont; allé; ir
faire: fais fait faisons faites font; fait; fer
dire: dis dit disons dites disent; dit; dir
prendre: prends prend prenons prenez prennent; pris; prendr
mettre: mets met mettons mettez mettent; mis; mettr
venir: viens vient venons venez viennent; venu; viendr
tenir: tiens tient tenons tenez tiennent; tenu; tiendr
voir: vois voit voyons voyez voient; vu; verr
boire: bois boit buvons buvez boivent; bu; boir
croire: crois croit croyons croyez croient; cru; croir
lire: lis lit lisons lisez lisent; lu; lir
rire: ris rit rions riez rient; ri; rir
écrire: écris écrit écrivons écrivez écrivent; écrit; écrir
savoir: sais sait savons savez savent; su; saur
connaître: connais connaît connaissons connaissez connaissent; connu; connaîtr
pouvoir: peux peut pouvons pouvez peuvent; pu; pourr
vouloir: veux veut voulons voulez veulent; voulu; voudr
devoir: dois doit devons devez doivent; dû; devr
recevoir: reçois reçoit recevons recevez reçoivent; reçu; recevr
dormir: dors dort dormons dormez dorment; dormi; dormir
partir: pars part partons partez partent; parti; partir
sortir: sors sort sortons sortez sortent; sorti; sortir
ouvrir: ouvre ouvre ouvrons ouvrez ouvrent; ouvert; ouvrir
offrir: offre offre offrons offrez offrent; offert; offrir
conduire: conduis conduit conduisons conduisez conduisent; conduit; conduir
suivre: suis suit suivons suivez suivent; suivi; suivr
courir: cours court courons courez courent; couru; courr
peindre: peins peint peignons peignez peignent; peint; peindr
éteindre: éteins éteint éteignons éteignez éteignent; éteint; éteindr
envoyer: envoie envoie envoyons envoyez envoient; envoyé; enverr
"""
_NUMBERS = (
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze "
    "quinze seize dix-sept dix-huit dix-neuf"
).split()
_TENS = ("_ _ vingt trente quarante cinquante soixante soixante quatre-vingt quatre-vingt").split()
_PREFIXES = {
    "apprendre": "prendre",
    "comprendre": "prendre",
    "revenir": "venir",
    "devenir": "venir",
    "sourire": "rire",
    "traduire": "conduire",
    "construire": "conduire",
}
_REPLACED = {
    "sourire": ("ri", "souri"),
    "traduire": ("condui", "tradui"),
    "construire": ("condui", "construi"),
}
_ETRE_VERBS = frozenset(
    [
        "aller",
        "venir",
        "arriver",
        "partir",
        "entrer",
        "rester",
        "tomber",
        "rentrer",
        "retourner",
        "revenir",
        "devenir",
        "sortir",
    ]
)
_IMPERATIVE = {"être": ("soyons", "soyez"), "avoir": ("ayons", "ayez")}
_IMPERFECT_ENDINGS = ("ais", "ait", "ions", "iez", "aient")
_FUTURE_ENDINGS = ("ai", "a", "ons", "ez", "ont")


@dataclass(frozen=True)
class Verb:
    """A conjugated verb; every tuple has one form per person."""

    infinitive: str
    present: tuple[str, ...]
    imperfect: tuple[str, ...]
    future: tuple[str, ...]
    conditional: tuple[str, ...]
    participle: str
    auxiliary: str

    def imperative(self, person: int) -> str:
        """The imperative for "nous" (2) or "vous" (3)."""
        return _IMPERATIVE.get(self.infinitive, self.present[2:4])[person - 2]


@lru_cache(maxsize=1)
def _irregular_table() -> dict[str, tuple[tuple[str, ...], str, str]]:
    table = {}
    for line in _IRREGULAR.strip().splitlines():
        infinitive, forms = line.split(": ")
        present, participle, future = forms.split("; ")
        table[infinitive] = (tuple(present.split()), participle, future)
    for verb, base in _PREFIXES.items():
        old, new = _REPLACED.get(verb, ("", verb[: -len(base)]))
        present, participle, future = table[base]
        table[verb] = (
            tuple(new + form[len(old) :] for form in present),
            new + participle[len(old) :],
            new + future[len(old) :],
        )
    return table


def _first_group(infinitive: str) -> tuple[tuple[str, ...], str, str]:
    """Verbs in -er with their spelling changes: (present, participle, future stem)."""
    stem, strong, future = infinitive[:-2], infinitive[:-2], infinitive
    if infinitive.endswith("eler") or infinitive.endswith("eter") and infinitive != "acheter":
        strong = stem + stem[-1]
        future = strong + "er"
    elif infinitive.endswith("yer"):
        strong = stem[:-1] + "i"
        future = strong + "er"
    elif re.search("e[lmnprtv]er$", infinitive):
        strong = stem[:-2] + "è" + stem[-1]
        future = strong + "er"
    elif match := re.search("é([^aeiouyéê]+)er$", infinitive):
        strong = stem[: match.start()] + "è" + match[1]
    nous = stem + "e" if stem.endswith("g") else stem[:-1] + "ç" if stem.endswith("c") else stem
    present = (strong + "e", strong + "e", nous + "ons", stem + "ez", strong + "ent")
    return present, stem + "é", future


def _forms(infinitive: str) -> tuple[tuple[str, ...], str, str]:
    irregular = _irregular_table().get(infinitive)
    if irregular:
        return irregular
    stem = infinitive[:-2]
    if infinitive.endswith("er"):
        return _first_group(infinitive)
    if infinitive.endswith("ir"):
        endings = ("is", "it", "issons", "issez", "issent")
        return tuple(stem + ending for ending in endings), stem + "i", infinitive
    if infinitive.endswith("re"):
        endings = ("s", "", "ons", "ez", "ent")
        return tuple(stem + ending for ending in endings), stem + "u", infinitive[:-1]
    raise ValueError(f"no conjugation for {infinitive!r}: add it to the table of irregular verbs")


@lru_cache(maxsize=1024)
def conjugate(infinitive: str) -> Verb:
    """Every form of a verb, from its infinitive (without reflexive pronoun)."""
    present, participle, future = _forms(infinitive)
    base = "ét" if infinitive == "être" else present[2].removesuffix("ons")
    short = re.sub("ç$", "c", base[:-1] if base.endswith("ge") else base)  # before "i"
    imperfect = tuple(
        (short if ending[0] == "i" else base) + ending for ending in _IMPERFECT_ENDINGS
    )
    return Verb(
        infinitive=infinitive,
        present=present,
        imperfect=imperfect,
        future=tuple(future + ending for ending in _FUTURE_ENDINGS),
        conditional=tuple(future + ending for ending in _IMPERFECT_ENDINGS),
        participle=participle,
        auxiliary="être" if infinitive in _ETRE_VERBS else "avoir",
    )


def feminine(adjective: str) -> str:
    """The regular feminine of a masculine singular adjective."""
    return adjective if adjective.endswith("e") else adjective + "e"


def plural(word: str) -> str:
    """The regular plural of a noun or adjective."""
    if word[-1] in "sxz":
        return word
    if word.endswith(("eau", "eu")) and word != "bleu":
        return word + "x"
    if word.endswith("al"):
        return word[:-2] + "aux"
    return word + "s"


def agree(participle: str, gender: str, is_plural: bool) -> str:
    """A past participle with the endings of its subject or preceding object."""
    word = participle.replace("dû", "du") if gender == "f" or is_plural else participle
    word += "e" if gender == "f" else ""
    return word + "s" if is_plural and word[-1] != "s" else word


def starts_with_vowel(text: str) -> bool:
    """True when the first word of a text takes l', d', mon, cet ... before it."""
    first = re.split(r"[ ,.?!']", text.lower(), maxsplit=1)[0]
    return first == "y" or first not in ASPIRATED and first[:1] in set("aeiouhâàéèêëîïôûùœ")


def possessive(owner: str, gender: str, many: bool, following: str) -> str:
    """French possessive adjective before `following`."""
    masculine, fem, plural = POSSESSIVES[owner]
    if many:
        return plural
    return masculine if gender == "m" or starts_with_vowel(following) else fem


def definite(gender: str, many: bool) -> str:
    """le, la, les (elision comes later)."""
    return "les" if many else "la" if gender == "f" else "le"


def demonstrative(gender: str, many: bool, following: str) -> str:
    """ce, cet, cette, ces."""
    if many:
        return "ces"
    if gender == "f":
        return "cette"
    return "cet" if starts_with_vowel(following) else "ce"


def partitive(fr: str, gender: str) -> str:
    """du, de la, de l' before a noun."""
    if starts_with_vowel(fr):
        return f"de l'{fr}"
    return f"de la {fr}" if gender == "f" else f"du {fr}"


def with_de(text: str) -> str:
    """ "de" before a noun phrase: du, des, de la, de l'."""
    return _contract(text, "de", "du ", "des ")


def with_a(text: str) -> str:
    """ "à" before a noun phrase: au, aux, à la, à l'."""
    return _contract(text, "à", "au ", "aux ")


def _contract(text: str, preposition: str, masculine: str, many: str) -> str:
    if text.startswith("le ") and not starts_with_vowel(text[3:]):
        return masculine + text[3:]
    if text.startswith("les "):
        return many + text[4:]
    return f"{preposition} {text}"


def elide(text: str) -> str:
    """Applies elision (j', l', d', qu', n', s', m') to a text written without it."""
    text = re.sub(r"(?<![\w'-])si (?=ils?\b)", "s'", text)

    def shorten(match: re.Match) -> str:
        return match[1][:-1] + "'" if starts_with_vowel(text[match.end() :]) else match[0]

    return re.sub(r"(?<![\w'-])(je|ne|me|se|le|la|de|que) ", shorten, text)


def number(n: int, gender: str = "m") -> str:
    """The number (0 to 999) in words, agreeing with its noun ("vingt et une pommes")."""
    if n < 20:
        return "une" if n == 1 and gender == "f" else _NUMBERS[n]
    if n < 100:
        return _below_100(n, gender)
    hundreds, rest = divmod(n, 100)
    head = "cent" if hundreds == 1 else _NUMBERS[hundreds] + " cent"
    if rest == 0:
        return head + ("s" if hundreds > 1 else "")
    return f"{head} {number(rest, gender)}"


def _below_100(n: int, gender: str) -> str:
    tens = n // 10
    unit = n % 10 + (10 if tens in (7, 9) else 0)
    if unit == 0:
        return _TENS[tens] + ("s" if tens == 8 else "")
    linked = unit in (1, 11) and tens < 8
    word = number(unit, gender)
    return f"{_TENS[tens]} et {word}" if linked else f"{_TENS[tens]}-{word}"
