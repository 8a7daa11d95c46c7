"""A text cut into pieces, and the one choice of their answers, where no model is needed."""

import asyncio
from types import SimpleNamespace

import pytest

from mlx_t5.checkpoints.generation_config import Preset
from mlx_t5.cli.models import BUNDLED
from mlx_t5.engine.rows import Chunk, Result, Stats
from mlx_t5.serving import tokenizing
from mlx_t5.serving.answers import ChatBuilder, CompletionBuilder, DocumentBuilder
from mlx_t5.serving.api import ChatRequest, CompletionRequest
from mlx_t5.serving.errors import ApiError
from mlx_t5.serving.jobs import Update
from mlx_t5.serving.service import Service
from mlx_t5.serving.tokenizing import RequestLimits, TokenizerThread
from mlx_t5.text.tokenizer import load_tokenizer

TEXT = " She have a cat.\n\n- He has a dog.  It barks. \n"
WORDS = ["She have a cat.", "He has a dog.", "It barks."]


@pytest.fixture(scope="module")
def tokenizer():
    return TokenizerThread(load_tokenizer(BUNDLED / "target"), 3072, RequestLimits(64, 64, 8))


def served(tokenizer, prefix="", limit=64):
    task = lambda name, prompts: Preset("a task", prefix)  # noqa: E731
    own = {"max_source_tokens": limit, "prefixes": ("fix grammar: ",)}
    return SimpleNamespace(tokenizer=tokenizer, task=task, **own)


def cut(tokenizer, prompt=TEXT, prefix="", limit=64, **fields):
    body = CompletionRequest(prompt=prompt, **{"split": "sentences", **fields})
    return asyncio.run(Service.cut(served(tokenizer, prefix, limit), body))[0]


def chat(tokenizer, *contents, prefix=""):
    roles = ["system", "user"][-len(contents) :]
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    body = ChatRequest(messages=messages, split="sentences")
    return asyncio.run(Service.cut(served(tokenizer, prefix), body))[0]


def sources(document):
    return [document.text[piece.start : piece.end] for piece in document.pieces]


def prompts(document):
    return [document.prompt(piece) for piece in document.pieces]


def test_each_piece_has_the_prefix(tokenizer):
    """Of the prompt itself, of a task, or a chat's system message."""
    for document in (
        cut(tokenizer, "fix grammar: " + TEXT.lstrip()),
        cut(tokenizer, prefix="fix grammar: "),
        chat(tokenizer, "fix grammar: " + TEXT.lstrip()),
        chat(tokenizer, " fix grammar:\n", TEXT),
        chat(tokenizer, "grammar:", TEXT, prefix="fix "),
    ):
        assert sources(document) == WORDS
        assert prompts(document) == ["fix grammar: " + words for words in WORDS]
    assert prompts(cut(tokenizer)) == prompts(chat(tokenizer, " ", TEXT)) == WORDS
    assert sources(cut(tokenizer, split="lines")) == [
        "She have a cat.",
        "- He has a dog.  It barks.",
    ]


def test_what_looks_like_a_prefix_is_decoded_and_logged_without_its_words(tokenizer, caplog):
    caplog.set_level("INFO")
    assert prompts(cut(tokenizer, "fix spelling: She have a cat.")) == [
        "fix spelling: She have a cat."
    ]
    (line,) = caplog.messages
    assert "may be a prefix" in line and "spelling" not in line


def test_the_language_of_the_source_says_where_a_sentence_ends(tokenizer):
    text = "Er kommt am 3. Oktober. Es regnet."
    assert len(sources(cut(tokenizer, text, source_language="de"))) == 2
    assert len(sources(cut(tokenizer, text))) > 2


def test_pieces_are_no_longer_than_the_limit_and_cut_a_few_at_a_time(tokenizer, monkeypatch):
    runs, run = [], tokenizer.run
    monkeypatch.setattr(tokenizing, "PIECES_AT_ONCE", 2)
    monkeypatch.setattr(tokenizer, "run", lambda work: (runs.append(work), run(work))[1])
    text = "She has a cat, a dog, a horse and many more of them. 1"
    body = CompletionRequest(prompt=text, split="sentences")
    read, encode = [], tokenizer.tokenizer.encode
    monkeypatch.setattr(
        tokenizer.tokenizer, "encode", lambda text: (read.append(text), encode(text))[1]
    )
    document, ids = asyncio.run(Service.cut(served(tokenizer, limit=12), body))
    assert len(read) == len(set(read)), "nothing is tokenized twice"
    assert ids == [tokenizer.tokenizer.encode(prompt) for prompt in prompts(document)]
    assert max(len(tokenizer.tokenizer.encode(prompt)) for prompt in prompts(document)) <= 12
    assert [piece.cut for piece in document.pieces] == [True, True, False]
    assert len(runs) == 1 + 3, "the document; two, one and no piece"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"n": 2, "temperature": 1.0}, "n"),
        ({"logprobs": 0}, "logprobs"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [5]}, "prompt"),
        ({"prompt": " \n"}, "prompt"),
        ({"prompt": "… —"}, "prompt"),
        ({"limit": 1}, "prompt"),
    ],
)
def test_what_cannot_be_split(tokenizer, fields, param):
    with pytest.raises(ApiError) as error:
        cut(tokenizer, **fields)
    assert (error.value.status, error.value.body.error.param) == (400, param)


def test_a_text_may_not_have_any_number_of_pieces(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizing, "MAX_PIECES", 2)
    with pytest.raises(ApiError, match="more than 2 pieces; send it in parts"):
        cut(tokenizer)


def update(index, text, reason="stop", error=None):
    tokens = [] if error else [5]
    result = Result(text, tokens, ["draft"][: len(tokens)], reason, Stats(), error)
    chunk = Chunk(text or "", tokens, result.writers, [text][: len(tokens)], Stats(), result)
    return Update(index, chunk, [])


def built(kind, document, stream=False, detailed=False):
    return DocumentBuilder(kind("a model", None, stream, False, detailed), document)


def shown(builder, updates):
    """The one choice of an answer, as a client gets it."""
    answer = builder.answer(builder.choices(updates), None)
    return answer.model_dump(exclude_unset=True)["choices"][0]


UPDATES = [update(0, "Sie"), update(1, None, "error", "no memory"), update(2, "Es", "length")]
JOINED = " Sie\n\n- He has a dog.  Es \n"


def test_a_piece_that_failed_keeps_its_source_and_is_marked(tokenizer):
    document = cut(tokenizer)
    choice = shown(built(CompletionBuilder, document), UPDATES)
    assert (choice["text"], choice["finish_reason"]) == (JOINED, "length")
    assert choice["pieces"] == [
        {"start": 1, "end": 16, "text": "Sie", "finish_reason": "stop"},
        {
            "start": 20,
            "end": 33,
            "text": "He has a dog.",
            "finish_reason": "error",
            "error": "no memory",
        },
        {"start": 35, "end": 44, "text": "Es", "finish_reason": "length"},
    ]
    assert choice["stats"] == {"pieces": 3, "cut": 0, "failed": 1}


def test_chunks_come_in_order_and_add_up_to_the_text(tokenizer):
    document = cut(tokenizer)
    builder = built(ChatBuilder, document, stream=True, detailed=True)

    async def events():
        for i in (2, 0, 1):
            yield UPDATES[i]

    async def chunks():
        return [shown(builder, [update]) async for update in builder.ordered(events())]

    found = asyncio.run(chunks())
    assert "".join(choice["delta"]["content"] for choice in found) == JOINED
    assert [choice["finish_reason"] for choice in found] == [None, None, "length"]
    assert [[p["start"] for p in choice["pieces"]] for choice in found] == [[1], [20], [35]]
    assert [choice["stats"]["failed"] for choice in found] == [0, 1, 1]
    assert {choice["stats"]["pieces"] for choice in found} == {3}
    details = [choice["pieces"][0]["speculation"]["tokens"] for choice in found]
    assert details[:2] == [[{"text": "Sie", "writer": "draft"}], []]


def test_a_document_of_which_nothing_could_be_decoded_is_an_error(tokenizer):
    document = cut(tokenizer)
    failed = [update(i, None, "error", "NaN logits") for i in range(3)]
    with pytest.raises(ApiError, match="NaN logits") as error:
        built(CompletionBuilder, document).choices(failed)
    assert error.value.status == 500
