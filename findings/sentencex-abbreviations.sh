#!/usr/bin/env bash
# sentencex 1.0.32: sentences end inside or after common abbreviations.
#
# Expected: one sentence each, as for "z. B." in German and "Mr." in English. Seen: a cut inside
# "J.-C." and "a.C.", after French "Mme." and "Dr.", and after the number of a Hungarian ordinal, so
# a program that translates sentence by sentence translates fragments. And there is no cut after
# "etc." or "ecc." where a sentence ends.
#
#   fr ['Il est né en 100 av. J.', '-C. ', 'à Rome.']
#   fr ['Mme. ', 'Durand et Dr. ', 'Petit sont là.']
#   it ['Cesare nacque nel 100 a.', 'C. ', 'a Roma.']
#   hu ['A 3. ', 'osztály itt van.']
#   fr ['Il vend du pain, du lait, etc. Puis il part.']
#   it ['Compra mele, pere, ecc. Poi torna.']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check sentencex==1.0.32
venv/bin/python - <<'PY' 2>errors || { cat errors >&2; exit 1; }
import sentencex

one_sentence = [
    ("fr", "Il est né en 100 av. J.-C. à Rome."),
    ("fr", "Mme. Durand et Dr. Petit sont là."),
    ("it", "Cesare nacque nel 100 a.C. a Roma."),
    ("hu", "A 3. osztály itt van."),
]
two_sentences = [
    ("fr", "Il vend du pain, du lait, etc. Puis il part."),
    ("it", "Compra mele, pere, ecc. Poi torna."),
]
for wanted, texts in ((1, one_sentence), (2, two_sentences)):
    for language, text in texts:
        sentences = list(sentencex.segment(language, text))
        print(language, sentences)
        assert len(sentences) != wanted, f"{text} is cut as expected now"
assert len(list(sentencex.segment("de", "Das gilt z. B. hier."))) == 1
assert len(list(sentencex.segment("en", "Mr. Smith is here."))) == 1
PY
