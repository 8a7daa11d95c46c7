"""When, where and in what weather, English and French side by side."""

from demo.recipe import french
from demo.recipe.english import COUNTED, TIME, mark, number, parse_verb
from demo.recipe.phrases import SPACE, Bilingual, Words, concat, noun_phrase

_PLACE_MODES = ("the", "the", "the", "this")
_DAY_PARTS = (("morning", "matin"), ("evening", "soir"), ("afternoon", "après-midi"))
_WEATHER = ("present", "past", "was", "future", "if", "going")
_NEARBY = (
    ("near", "près de"),
    ("behind", "derrière"),
    ("in front of", "devant"),
    ("next to", "à côté de"),
)


def time(g: Words, tense: str) -> Bilingual:
    """A time that goes with "past", "future", "habit" or "present"."""
    draw = g.rng.random()
    if tense in ("past", "future") and draw < 0.55:
        return _made_time(g, tense)
    if tense == "habit" and draw < 0.1:
        day = g.phrase("day")
        return f"every {day[0]}", f"tous les {day[1]}s"
    section = "any" if tense != "present" and draw > 0.9 else tense
    en, fr = g.phrase(f"time {section}")
    return (mark(en, TIME) if en.startswith(("on ", "at ", "in ")) else en), fr


def _made_time(g: Words, tense: str) -> Bilingual:
    kind = g.rng.choice(("day", "month", "clock", "clock", "distance", "day part"))
    if kind == "day":
        en, fr = g.phrase("day")
        return mark(f"on {en}", TIME), fr
    if kind == "day part":
        en, fr = g.phrase("day")
        part = g.rng.choice(_DAY_PARTS)
        return mark(f"on {en} {part[0]}", TIME), f"{fr} {part[1]}"
    if kind == "month":
        en, fr = g.phrase("month")
        return mark(f"in {en}", TIME), f"en {fr}"
    if kind == "clock":
        return clock(g)
    en, fr = duration(g)
    if tense == "past":
        return f"{en} ago", f"il y a {fr}"
    return f"in {en}", f"dans {fr}"


def clock(g: Words) -> Bilingual:
    """ "at eight o'clock", "at half past seven", "at a quarter to nine"."""
    hour = g.rng.randint(1, 11)
    shape = g.rng.choice(("o'clock", "o'clock", "half", "quarter past", "quarter to"))
    hours = "une heure" if hour == 1 else f"{french.number(hour)} heures"
    en = number(hour)
    if shape == "half":
        return mark(f"at half past {en}", TIME), f"à {hours} et demie"
    if shape == "quarter past":
        return mark(f"at a quarter past {en}", TIME), f"à {hours} et quart"
    if shape == "quarter to":
        return mark(f"at a quarter to {en}", TIME), f"à {hours} moins le quart"
    return mark(f"at {en} o'clock", TIME), f"à {hours}"


def duration(g: Words) -> Bilingual:
    """A length of time: "three weeks"."""
    unit = g.noun("unit")
    n = g.rng.randint(2, 20)
    en = f"{number(n)} {mark(unit.en_plural, COUNTED)}"
    return en, f"{french.number(n, unit.gender)} {unit.fr_plural}"


def place(g: Words) -> Bilingual:
    """Where something happens: "at the market", "in the kitchen", "in Paris"."""
    draw = g.rng.random()
    if draw < 0.35:
        where = noun_phrase(g, g.noun("place"), g.rng.choice(_PLACE_MODES), modify=0.1)
        return f"at {where.en}", french.with_a(where.fr)
    if draw < 0.6:
        noun = g.noun("room", "room", "region")
        where = noun_phrase(g, noun, g.rng.choice(("the", "the", "my", "this")), modify=0.1)
        return f"in {where.en}", f"dans {where.fr}"
    if draw < 0.7:
        en, fr = g.phrase("city")
        return f"in {en}", f"à {fr}"
    if draw < 0.78:
        en, fr = g.phrase("country")
        return f"in {en}", fr
    if draw < 0.88:
        where = noun_phrase(g, g.noun("building", "place"), "the", modify=0)
        en, fr = g.rng.choice(_NEARBY)
        return f"{en} {where.en}", where.after(fr)
    return g.phrase("place fixed")


def destination(g: Words) -> Bilingual:
    """Where somebody goes: "to the market", "to Paris", "to Canada"."""
    draw = g.rng.random()
    if draw < 0.6:
        where = noun_phrase(g, g.noun("place"), g.rng.choice(_PLACE_MODES), modify=0.1)
        return f"to {where.en}", french.with_a(where.fr)
    if draw < 0.8:
        en, fr = g.phrase("city")
        return f"to {en}", f"à {fr}"
    en, fr = g.phrase("country")
    return f"to {en}", fr


def weather(g: Words, period: str) -> Bilingual:
    """It is raining; it will be cold; it was sunny."""
    index = _WEATHER.index(period)
    if g.chance(0.5):
        verb, forms = g.phrase("weather verb")
        present, past, imperfect, future, base = forms.split(", ")
        it = parse_verb(verb)
        en = {
            "present": f"is {it.gerund}",
            "past": it.past,
            "was": f"was {it.gerund}",
            "future": f"will {verb}",
            "if": it.third,
            "going": f"is going to {verb}",
        }[period]
        return f"it {en}", f"il {(present, past, imperfect, future, present, f'va {base}')[index]}"
    state, fr = g.phrase("weather state")
    en = ("is", "was", "was", "will be", "is", "is going to be")[index]
    there = fr.startswith("du ")  # "il y a du vent", but "il fait froid"
    verb = french.conjugate("avoir" if there else "faire")
    if period == "going":
        return f"it {en} {state}", f"il va {'y avoir' if there else 'faire'} {fr}"
    forms = verb.present, verb.imperfect, verb.imperfect, verb.future, verb.present
    return f"it {en} {state}", f"{'il y' if there else 'il'} {forms[index][1]} {fr}"


def weather_report(g: Words) -> Bilingual:
    """It will be cold tomorrow in Paris."""
    period = g.rng.choice(("present", "past", "future", "was", "going"))
    report = weather(g, period)
    when = time(g, {"was": "past", "going": "future"}.get(period, period))
    if g.chance(0.5):
        report = concat(report, (" in ", " à "), g.phrase("city"))
    return concat(report, SPACE, when)
