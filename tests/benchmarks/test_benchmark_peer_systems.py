"""Other programs on the bundled weights: the same tokens as ours."""

import json
from pathlib import Path

import pytest

import convert
from benchmarks import peer_systems, peers
from benchmarks.peer_systems import CTranslate2, Transformers, hugging_face_folder
from benchmarks.subject import Subject
from mlx_t5.cli.models import BUNDLED
from mlx_t5.errors import UserError

TEXTS = ["translate English to French: I have two cats.", "fix grammar: She have an dog."]


@pytest.fixture(scope="module")
def subject():
    return Subject.load(str(BUNDLED / "target"), str(BUNDLED / "draft"), "float32")


@pytest.fixture(scope="module")
def ids(subject):
    return [subject.tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def torch_pair():
    return [Transformers(BUNDLED / name, "float32", "cpu", 1) for name in ("target", "draft")]


@pytest.mark.parametrize("longest", [20, 4])
def test_transformers_writes_the_same(subject, ids, torch_pair, longest):
    target, draft = torch_pair
    expected = [peers.own(subject.regular(), longest)(each) for each in ids]
    assert [len(each) for each in expected] != [0, 0]
    assert list(map(target.greedy(longest), ids)) == expected
    usual, fixed = target.assisted(draft, longest, None), target.assisted(draft, longest, 3)
    # In turns, as they share the draft's settings.
    assert [run(each) for each in ids for run in (usual, fixed)] == [
        tokens for tokens in expected for _ in range(2)
    ]


def test_assisted_generation_takes_the_number_of_proposals(ids, torch_pair):
    target, draft = torch_pair
    settings = draft.model.generation_config
    target.assisted(draft, 9, 3)(ids[0])
    assert (settings.num_assistant_tokens, settings.assistant_confidence_threshold) == (3, 0.0)


def test_a_draft_with_fewer_tokens_is_widened_and_writes_the_same(ids):
    draft = Transformers(BUNDLED / "draft", "float32", "cpu", 1)
    before = list(map(draft.greedy(20), ids))
    draft.widen(9)
    assert draft.model.config.vocab_size == 3072
    draft.widen(4000)
    assert draft.model.config.vocab_size == 4000
    assert draft.model.get_output_embeddings().weight.shape[0] == 4000
    weight = draft.model.get_input_embeddings().weight
    assert (weight[3072:] == weight[0]).all()
    assert list(map(draft.greedy(20), ids)) == before


@pytest.mark.parametrize("longest", [20, 4])
def test_ctranslate2_writes_the_same(subject, ids, tmp_path, longest):
    other = CTranslate2(BUNDLED / "target", "float32", "cpu", 1, tmp_path / "x").greedy(longest)
    assert list(map(other, ids)) == [peers.own(subject.regular(), longest)(i) for i in ids]


def test_an_mlx_folder_becomes_one_that_transformers_reads(tmp_path, ids):
    folder = tmp_path / "mlx"
    convert.convert(str(BUNDLED / "draft"), folder)
    written = hugging_face_folder(folder, tmp_path / "scratch")
    assert written == tmp_path / "scratch"
    models = (Transformers(each, "float32", "cpu", 1) for each in (written, BUNDLED / "draft"))
    ours, theirs = (list(map(model.greedy(100), ids)) for model in models)
    assert ours == theirs and all(ours)


def test_a_hugging_face_folder_is_taken_as_it_is(tmp_path):
    assert hugging_face_folder(BUNDLED / "draft", tmp_path / "x") == BUNDLED / "draft"
    assert list(tmp_path.iterdir()) == []


def test_quantised_weights_are_refused(tmp_path):
    folder = tmp_path / "mlx"
    convert.convert(str(BUNDLED / "draft"), folder)
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization": {"bits": 4}}))
    with pytest.raises(UserError, match="is quantised for MLX"):
        hugging_face_folder(folder, tmp_path / "scratch")


def test_what_is_not_installed_is_said(monkeypatch, tmp_path):
    def needed(package):
        raise UserError(f"{package} cannot be imported")

    monkeypatch.setattr(peer_systems, "needed", needed)
    with pytest.raises(UserError, match="torch cannot"):
        Transformers(tmp_path, "float32", "cpu", 1)
    with pytest.raises(UserError, match="ctranslate2 cannot"):
        CTranslate2(tmp_path, "float32", "cpu", 1, tmp_path)
