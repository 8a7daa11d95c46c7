"""Where the sentences of a paragraph end.

sentencex (https://github.com/wikimedia/sentencex) finds the ends. It also ends sentences behind
abbreviations that it does not know, and behind ordinals, which many languages write with a dot: the
tables below tell where a sentence goes on.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from mlx_t5.errors import UserError
from mlx_t5.installation import cure
from mlx_t5.text.masking import REST

# In characters. No T5 was trained on longer sentences. This also bounds the cost of a hostile text.
LONGEST_SENTENCE = 5_000

# sentencex fails on white space of several UTF-8 bytes, and on unpaired surrogates.
_NO_TEXT = re.compile(r"[\s\ud800-\udfff]")

# Abbreviations behind which sentencex 1.0.32 ends a sentence: those that never end one, and behind
# the slash, those that end none before a small letter or a digit. A small first letter stands for a
# capital, too. Chosen from CLDR's suppressions (https://github.com/unicode-org/cldr, in
# common/segments) for de, en, es, fr, it, pt, ru; from Moses' non-breaking prefixes
# (https://github.com/moses-smt/mosesdecoder) for cs, hu, nl, pl, ro; from the dictionary of the
# Türk Dil Kurumu for tr; and from titles and references that these lack, such as "Mme." and "čl.".
ABBREVIATIONS = {
    "cs": "čl kpt mj odst plk pí popř srov /",
    "de": "abb abs amtl Bd Dipl.-Ing Dipl.-Kfm ehem eigtl einschl entspr exkl Fa Fam Frl frz geb"
    " Gebr Hrn inkl kap max österr Reg.-Bez röm schweiz z.Hd zzgl /",
    "en": "approx figs Lt.Cdr Mgr Mmes vol vols / est",
    "es": "Cnel Dña Dres Drs Excma Exma Exmo figs Fr Hna Hno Ilma Ilmo Lcda Lda Mons Mr Mrs nº"
    " ntra Profa Rdo Rev Rvdo Sras Srtas Vda / aprox cfr d.C ed ene feb Ltda",
    "fr": "bd c.-à-d Dr Drs Me Mgr Mlle Mlles Mme Mmes Mr Pr Prof réf St Ste / avr coll déc doc"
    " févr ill J.-C janv juil no nov oct sept",
    "hu": "ifj özv Szt ua ún vö / ápr br évf febr i.sz júl jún kb ker márc máj okt old stb sz tel",
    "it": "Gent n nn pag pagg sez / a.C d.C div S.p.A tab ver",
    "nl": "d.w.z ds jhr jkvr kol mej mevr mw o.a / dec feb incl jan tel",
    "pl": "al dr gen hab inż kpt ks m.in mgr nr o p pl płk por red s św tj tzw / art godz mld mln"
    " ok p.n.e pkt poz r rys str tel tys ust w zł",
    "pt": "Alm Arq av Cap Cel cf Exma Fr Ilma Ilmo n núm nº obs pág Pe pp profa séc Sta Srta Ten"
    " vol / a.C a.m abr ago aprox cap d.C dez ed etc fev jan jul jun Ltda mar p.m set tel",
    "ro": "alin bd com conf cpt d-l d-na dl dna dvs jud lect lit pag sf str vol / av cap cca î.Hr",
    "ru": "гл напр пл св ст т.е / авг апр дек др млн млрд н.э нояб окт рис сент февр э янв",
    "tr": "Alb Arş Av bkz Cad Doç Ecz Gör Hz M.Ö Mah Müh Öğr Org örn Sn Sok Tğm Yrd Yzb / Şti vb",
}
# What makes a number an ordinal, with a dot behind it, before a capital. Before a small letter or a
# digit, every number with a dot is one in these languages.
ORDINALS = {
    **dict.fromkeys("bs da et eu fi fo hr hsb is lb lv nb nn no pl sk sl sr".split(), "(?!)"),
    "cs": r"(?:[VvZz]e?|[Nn]a|[Dd]o|[Oo]d|[Pp]o|[Uu]|[Dd]ne)\s+\d{1,3}",
    "de": r"(?:[Aa]m|[Ii]m|[Vv]om|[Zz]u[mr]|[Bb]eim|[Dd](?:e[rmns]|ie|as))\s+\d{1,3}"
    r"|\d{1,2}(?=\.\s+(?:J[aä]n|Feb|Mär|Apr|Mai|Ju[nl]|Aug|Sep|Okt|Nov|Dez|Jh|Jahrh))",
    "hu": r"[Aa]z?\s+\d{1,3}|[IVXLC]+",
    "tr": r"\d{1,2}|[IVXLC]+",
}

_INITIAL = re.compile(r"\W*[^\W\d_]\.\W*")  # a sentence of one letter, as in "M. Dupont"
_INNER = re.compile(r"\.-?[^\W\d_]\.")  # the first dot of "J.-C." and "a.C."


def sentence_spans(text: str, start: int, end: int, language: str) -> Iterator[tuple[int, int]]:
    while start < end:
        window = _NO_TEXT.sub(" ", text[start : min(end, start + 2 * LONGEST_SENTENCE)])
        if start + len(window) < end:
            window = window[: window.rfind(" ") + 1] or window
        ends = _ends(window, language)
        if start + len(window) < end and len(ends) > 1:
            ends = ends[:-1]  # the window may end within a sentence: the next begins with it
        yield from pairwise(start + at for at in (0, *ends))
        start += ends[-1]


def _ends(text: str, language: str) -> list[int]:
    try:
        from sentencex import get_sentence_boundaries

        starts = [*(i for i, char in enumerate(text) if char != REST), len(text)]
        plain = text.replace(REST, "")
        ends = [one["end_index"] for one in get_sentence_boundaries(language, plain)]
        return [starts[end] for end in _joined(plain, ends, language)] or [len(text)]
    except ImportError:
        remedy = f"{cure('sentencex')} (on a Mac with Python 3.11 or later)"
        raise UserError(f'split="sentences" needs sentencex; {remedy}') from None
    except KeyboardInterrupt:
        raise
    except BaseException:  # a panic of Rust is not an Exception
        print("warning: sentencex failed; a paragraph is taken as one sentence", file=sys.stderr)
        return [len(text)]


def _joined(text: str, ends: list[int], language: str) -> Iterator[int]:
    """The ends of sentences, without those behind which the sentence goes on."""
    start = 0
    for end in ends:
        if end == ends[-1] or not _goes_on(text, start, end, language):
            yield end
            start = end


def _goes_on(text: str, start: int, end: int, language: str) -> bool:
    if _INITIAL.fullmatch(text, start, end) or _INNER.match(text, end - 1):
        return True
    following = text[end : end + 1]
    pattern = _unfinished(language, following.islower() or following.isdigit())
    around = pattern.finditer(text, max(start, end - 40), end + 20)
    return any(match.end() == end for match in around)


@cache
def _unfinished(language: str, before_small: bool) -> re.Pattern[str]:
    always, more = ABBREVIATIONS.get(language, "/").split("/")
    words = (always + more if before_small else always).split()
    found = [f"[{word[0]}{word[0].upper()}]{re.escape(word[1:])}" for word in words]
    if language in ORDINALS:
        found.append(r"\d{1,4}|[IVXLC]+" if before_small else ORDINALS[language])
    return re.compile(rf"(?<!\w)(?:{'|'.join(found) or '(?!)'})\.\s*")
