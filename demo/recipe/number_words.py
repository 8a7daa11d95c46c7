"""Numbers written as words, 0 to 999, in both languages."""

_ENGLISH = ("zero one two three four five six seven eight nine ten eleven twelve thirteen "
            "fourteen fifteen sixteen seventeen eighteen nineteen").split()
_ENGLISH_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
_FRENCH = ("zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze "
           "quinze seize dix-sept dix-huit dix-neuf").split()
_FRENCH_TENS = ("_ _ vingt trente quarante cinquante soixante soixante quatre-vingt "
                "quatre-vingt").split()


def english(n: int) -> str:
    """Cardinal number in English words."""
    if n < 20:
        return _ENGLISH[n]
    if n < 100:
        return _ENGLISH_TENS[n // 10] + ("-" + _ENGLISH[n % 10] if n % 10 else "")
    rest = n % 100
    return _ENGLISH[n // 100] + " hundred" + (" " + english(rest) if rest else "")


def french(n: int, gender: str = "m") -> str:
    """Cardinal number in French words, agreeing with its noun ("vingt et une pommes")."""
    if n < 20:
        return "une" if n == 1 and gender == "f" else _FRENCH[n]
    if n < 100:
        return _french_tens(n, gender)
    hundreds, rest = divmod(n, 100)
    head = "cent" if hundreds == 1 else _FRENCH[hundreds] + " cent"
    if rest == 0:
        return head + ("s" if hundreds > 1 else "")
    return f"{head} {french(rest, gender)}"


def _french_tens(n: int, gender: str) -> str:
    tens = n // 10
    unit = n % 10 + (10 if tens in (7, 9) else 0)
    if unit == 0:
        return _FRENCH_TENS[tens] + ("s" if tens == 8 else "")
    linked = unit in (1, 11) and tens < 8
    word = french(unit, gender)
    return f"{_FRENCH_TENS[tens]} et {word}" if linked else f"{_FRENCH_TENS[tens]}-{word}"
