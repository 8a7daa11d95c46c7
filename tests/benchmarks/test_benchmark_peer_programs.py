"""The compared programs write the same tokens with the bundled weights."""

import json
import sys
from pathlib import Path

import pytest

import convert
from benchmarks.peer_programs import CTranslate2, MlxT5, Transformers, hugging_face_folder
from mlx_t5.disk import BUNDLED
from mlx_t5.errors import UserError

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


def test_a_draft_with_fewer_tokens_is_widened_and_writes_the_same(ids):
    program = Transformers(PAIR[1], PAIR[1], "float32", "cpu", 1)
    model = program.target
    before = program.decode(ids, 0, 20, 1)
    program.widen(model, 9)
    assert model.config.vocab_size == 3072
    program.widen(model, 4000)
    assert model.config.vocab_size == 4000
    assert model.get_output_embeddings().weight.shape[0] == 4000
    weight = model.get_input_embeddings().weight
    assert (weight[3072:] == weight[0]).all()
    assert program.decode(ids, 0, 20, 1) == before


def test_an_mlx_folder_becomes_one_that_transformers_reads(tmp_path, ids):
    folder = tmp_path / "mlx"
    convert.convert(PAIR[1], folder)
    written = hugging_face_folder(folder, tmp_path / "scratch")
    assert written == tmp_path / "scratch"
    programs = (
        Transformers(str(folder), PAIR[1], "float32", "cpu", 1) for folder in (written, PAIR[1])
    )
    one, other = (program.decode(ids, 0, 100, 1) for program in programs)
    assert one == other and all(one)
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization": {"bits": 4}}))
    with pytest.raises(UserError, match="is quantized for MLX"):
        hugging_face_folder(folder, tmp_path / "other")
