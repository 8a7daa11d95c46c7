"""The compared programs write the same tokens with the bundled weights."""

import sys

import pytest

from mlx_t5.benchmarks.peer_programs import CTranslate2, MlxT5, Transformers
from mlx_t5.disk import BUNDLED

TEXTS = ["fix grammar: They has a red dog.", "fix grammar: She have an dog."]
PAIR = [str(BUNDLED / name) for name in ("target", "draft")]
# The last transformers for Python 3.10 stumbles over its own cache in assisted generation.
needs_assistance = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.20 fails")


@pytest.mark.slow
@needs_assistance
def test_all_programs_write_the_same_tokens(tmp_path):
    project = MlxT5(*PAIR, "float32")
    transformers = Transformers(*PAIR, "float32", "cpu", 1)
    ctranslate2 = CTranslate2(PAIR[0], "float32", "cpu", 1, str(tmp_path / "x"))
    ids = project.encode(TEXTS)
    for longest in (20, 4):
        expected = [project.decode([prompt], 0, longest, 1)[0] for prompt in ids]
        assert all(expected) and project.decode(TEXTS, 0, longest, 2) == expected, "a document"
        for num_draft in (3, "auto"):
            assert project.decode(ids, num_draft, longest, 2) == expected
            assert [transformers.decode([i], num_draft, longest, 1)[0] for i in ids] == expected
        for program in (transformers, ctranslate2):
            assert program.decode(ids[::-1], 0, longest, 2) == expected[::-1]
        for program in (project, transformers):  # only one token can be sampled
            assert program.decode(ids, 0, longest, 2, temp=2.0, top_k=1) == expected
    answer = project.timed(9, True, num_draft=0, prompts=ids[:1], batch_size=1)
    assert answer.tokens == project.decode(ids[:1], 0, 9, 1)
    assert answer.seconds > answer.first_seconds > 0
