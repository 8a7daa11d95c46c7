"""Knows the codes of languages, and the English names that the prefixes of tasks have."""

from __future__ import annotations

import re

from mlx_t5.settings import refusal

_SOURCE = re.compile(r"translate (?:from )?(\w+) (?:in)?to ", re.IGNORECASE)
_NAMES = (
    "arabic=ar bengali=bn bulgarian=bg chinese=zh czech=cs danish=da dutch=nl english=en "
    "finnish=fi french=fr german=de greek=el hebrew=he hindi=hi hungarian=hu italian=it "
    "japanese=ja korean=ko norwegian=no persian=fa polish=pl portuguese=pt romanian=ro "
    "russian=ru spanish=es swedish=sv thai=th turkish=tr ukrainian=uk vietnamese=vi"
)
_LANGUAGES = dict(name.split("=") for name in _NAMES.split())
# ISO 639-1 with its former codes, and the codes of three letters that translation models have.
_CODES = frozenset(
    "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy "
    "da de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu "
    "hy hz ia id ie ig ii ik in io is it iu iw ja ji jv jw ka kg ki kj kk kl km kn ko kr ks ku kv "
    "kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mo mr ms mt my na nb nd ne ng nl nn no nr "
    "nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq "
    "sr ss st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi "
    "yo za zh zu "
    "ast bho ceb ckb doi fil fur gsw haw hmn ilo kok kri lus mai mni nds nso sah scn tet war "
    "yue".split()
)


def checked_code(value: str, name: str = "source_language") -> str:
    """The language of a code such as "de" or "pt-BR", without its region."""
    code = value.replace("_", "-").split("-")[0].lower() if isinstance(value, str) else ""
    if code not in _CODES:
        raise refusal(name, value, "a language's code, such as de or pt-BR")
    return code


def source_of(prefix: str) -> str:
    """The code of the language that "translate English to German: " names; English otherwise."""
    named = _SOURCE.search(prefix)
    return _LANGUAGES.get(named[1].lower(), "en") if named else "en"
