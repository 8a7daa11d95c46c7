"""The compared programs write the same tokens with the bundled weights."""

import sys

import pytest

from benchmarks.peer_programs import CTranslate2, MlxT5, Transformers
from mlx_t5.disk import BUNDLED

TEXTS = ["translate English to French: I have two cats.", "fix grammar: She have an dog."]
PAIR = [str(BUNDLED / name) for name in ("target", "draft")]


@pytest.fixture(scope="module")
def project():
    return MlxT5(*PAIR, "float32")


@pytest.fixture(scope="module")
def ids(project):
    return project.encode(TEXTS)


@pytest.fixture(scope="module")
def transformers():
    return Transformers(*PAIR, "float32", "cpu", 1)


@pytest.fixture(scope="module")
def ctranslate2(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("ctranslate2") / "x"
    return CTranslate2(PAIR[0], "float32", "cpu", 1, str(scratch))


# The last transformers for Python 3.10 stumbles over its own cache in assisted generation.
needs_assistance = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.20 fails")


@pytest.mark.slow
@pytest.mark.parametrize("longest", [pytest.param(20, marks=needs_assistance), 4])
def test_all_programs_write_the_same_tokens(project, transformers, ctranslate2, ids, longest):
    expected = [project.decode([prompt], 0, longest, 1)[0] for prompt in ids]
    assert all(expected) and project.decode(ids, 0, longest, 2) == expected
    for num_draft in (3, "auto"):
        assert project.decode(ids, num_draft, longest, 2) == expected
        assert [transformers.decode([i], num_draft, longest, 1)[0] for i in ids] == expected
    for batch_size in (1, 2):
        for program in (transformers, ctranslate2):
            assert program.decode(ids[::-1], 0, longest, batch_size) == expected[::-1]
            assert program.decode(ids, 0, longest, batch_size) == expected
    for program in (project, transformers):  # only one token can be sampled
        assert program.decode(ids, 0, longest, 2, temp=2.0, top_k=1) == expected
        assert program.decode(ids, 0, longest, 2, temp=2.0, top_p=1e-6) == expected


def test_a_program_times_itself(project, transformers, ctranslate2, ids):
    one, both = {"prompts": ids[:1], "batch_size": 1}, {"prompts": ids, "batch_size": 2}
    answer = project.timed(9, True, num_draft=0, **one)
    (text,) = answer.tokens
    assert [text] == project.decode(ids[:1], 0, 9, 1)
    assert answer.seconds > 0 and answer.first_seconds > 0
    # The end token counts, unless the text already has the largest number of tokens.
    assert project.timed(len(text) + 5, False, num_draft=0, **one).decided == len(text) + 1
    assert project.timed(2, False, num_draft=0, **one).decided == 2
    assert project.timed(9, False, num_draft=0, **both).first_seconds is None
    assert transformers.describe()["threads"] == ctranslate2.describe()["threads"] == 1
