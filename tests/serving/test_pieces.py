"""Tests how the server splits a document and joins its answers; no model is needed."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

from mlx_t5.checkpoints.generation_config import Preset
from mlx_t5.disk import BUNDLED
from mlx_t5.engine.document_batch import DocumentInFlight
from mlx_t5.engine.rows import Chunk, Result, Stats
from mlx_t5.serving import pieces
from mlx_t5.serving.answers import ChatBuilder, CompletionBuilder
from mlx_t5.serving.api import ChatRequest, CompletionRequest
from mlx_t5.serving.api_error import ApiError
from mlx_t5.serving.jobs import GenerationJob, JobQueue, Place
from mlx_t5.serving.pieces import HANDED_IN, DocumentStream
from mlx_t5.serving.service import Service
from mlx_t5.serving.tokenizing import RequestLimits, TokenizerThread
from mlx_t5.settings import Settings
from mlx_t5.text.tokenizer import load_tokenizer

TEXT = " She have a cat.\n\n- He has a dog.  It barks. \n"
WORDS = ["She have a cat.", "He has a dog.", "It barks."]


@pytest.fixture(scope="module")
def tokenizer():
    return TokenizerThread(load_tokenizer(BUNDLED / "target"), 3072, RequestLimits(64, 64, 8))


def served(thread, prefix="", limit=64):
    task = lambda name, prompts: Preset("a task", prefix)  # noqa: E731
    own = {"max_source_tokens": limit, "prefixes": ("fix grammar: ",)}
    return SimpleNamespace(documents=thread, task=task, **own)


def cut(thread, prompt=TEXT, prefix="", limit=64, **fields):
    """Returns the pieces of a prompt, of which none has been read."""
    body = CompletionRequest(prompt=prompt, **{"split": "sentences", **fields})
    return asyncio.run(Service.cut(served(thread, prefix, limit), body))


def chat(thread, *contents, prefix=""):
    roles = ["system", "user"][-len(contents) :]
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    body = ChatRequest(messages=messages, split="sentences")
    return asyncio.run(Service.cut(served(thread, prefix), body))


def drawn(some):
    some.draw(10**6)
    assert some.answers.whole
    return some.answers.document


def sources(some):
    document = drawn(some)
    return [document.text[piece.start : piece.end] for piece in document.pieces]


def prompts(some):
    document = drawn(some)
    return [document.prompt(piece) for piece in document.pieces]


def test_each_piece_has_the_prefix(tokenizer):
    """The prefix comes from the prompt, from a task or from a chat's system message."""
    for how in (
        lambda: cut(tokenizer, "fix grammar: " + TEXT.lstrip()),
        lambda: cut(tokenizer, prefix="fix grammar: "),
        lambda: chat(tokenizer, "fix grammar: " + TEXT.lstrip()),
        lambda: chat(tokenizer, " fix grammar:\n", TEXT),
        lambda: chat(tokenizer, "grammar:", TEXT, prefix="fix "),
    ):
        assert sources(how()) == WORDS
        assert prompts(how()) == ["fix grammar: " + words for words in WORDS]
    assert prompts(cut(tokenizer)) == prompts(chat(tokenizer, " ", TEXT)) == WORDS
    assert sources(cut(tokenizer, split="lines")) == [
        "She have a cat.",
        "- He has a dog.  It barks.",
    ]


def test_a_possible_prefix_is_decoded_and_logged_without_its_words(tokenizer, caplog):
    caplog.set_level("INFO")
    assert prompts(cut(tokenizer, "fix spelling: She have a cat.")) == [
        "fix spelling: She have a cat."
    ]
    (line,) = caplog.messages
    assert "may begin with a prefix" in line and "spelling" not in line


def test_the_language_of_the_source_says_where_a_sentence_ends(tokenizer):
    text = "Er kommt am 3. Oktober. Es regnet."
    assert len(sources(cut(tokenizer, text, source_language="de"))) == 2
    assert len(sources(cut(tokenizer, text))) > 2


def test_pieces_are_tokenized_when_needed_and_within_the_limit(tokenizer, monkeypatch):
    monkeypatch.setattr(pieces, "PIECES_AT_ONCE", 1)
    texts, encode = [], tokenizer.tokenizer.encode
    monkeypatch.setattr(
        tokenizer.tokenizer, "encode", lambda text: (texts.append(text), encode(text))[1]
    )
    text = "She has a cat, a dog, a horse and many more of them. 1. 2. 3. 4. 5. 6. 7."
    parts = cut(tokenizer, text, limit=12)
    assert texts == ["a"] and parts.count == 8, "the prefix, to know if there is room behind it"
    ids = parts.draw(2)
    assert len(ids) == 2 and len(parts.answers.document.pieces) == 3, "and one to know the last"
    ids += parts.draw(99)
    assert len(texts) == len(set(texts)), "nothing is tokenized twice"
    assert ids == [encode(prompt) for prompt in prompts(parts)]
    assert max(map(len, ids)) <= 12 and parts.answers.whole
    assert [piece.cut for piece in parts.answers.document.pieces] == [True] * 2 + [False] * 7


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
def test_settings_that_contradict_a_split_are_refused(tokenizer, fields, param):
    with pytest.raises(ApiError) as error:
        cut(tokenizer, **fields)
    assert (error.value.status, error.value.body.error.param) == (400, param)


def test_limits_count_pieces_times_prompt_tokens(tokenizer, monkeypatch):
    prefix, encode = "fix this, as well as you can: ", tokenizer.tokenizer.encode
    texts, sizes = [], [len(encode(prefix + words)) for words in WORDS]
    count = lambda text: (texts.append(text), encode(text))[1]  # noqa: E731
    monkeypatch.setattr(pieces, "LEAST_TOKENS", 4)
    monkeypatch.setattr(tokenizer.tokenizer, "encode", count)
    monkeypatch.setattr(pieces, "MAX_TOKENS", 3 * len(encode(prefix + "a")) - 1)
    with pytest.raises(ApiError, match="more than .* tokens .*; send it in parts"):
        cut(tokenizer, prefix=prefix)
    assert texts == [prefix + "a"], "before any piece is read"
    monkeypatch.setattr(pieces, "MAX_TOKENS", sum(sizes) - 1)
    parts = cut(tokenizer, prefix=prefix)
    assert len(parts.draw(2)) == 2
    with pytest.raises(ApiError, match="send it in parts"):
        parts.draw(1)
    monkeypatch.setattr(pieces, "MAX_TOKENS", sum(sizes))
    assert len(cut(tokenizer, prefix=prefix).draw(9)) == 3
    monkeypatch.setattr(pieces, "MAX_TOKENS", 11)
    with pytest.raises(ApiError, match="each piece counts as 4 at least"):
        cut(tokenizer)


# ---- decoding ------------------------------------------------------------------------------------


def chunk(index, text, reason="stop", error=None):
    tokens = [] if error else [5]
    result = Result(text, tokens, ["draft"][: len(tokens)], reason, Stats(), error)
    pieces = [text][: len(tokens)]
    return Chunk(text or "", tokens, result.writers, pieces, Stats(), result, index)


def run(some, thread, answer, size=2, kind=CompletionBuilder, streamed=False):
    """Decodes a document; returns the events or the answer. `answer(i)` is the chunk of piece i.

    Pieces that wait are answered in reverse order.
    """
    builder = kind(CompletionRequest(prompt="x", stream=streamed), "a model", None)

    async def client():
        queue = JobQueue(4, 4, lambda: 0.0)
        job = GenerationJob(Settings(), document=True, place=Place(size))
        first = some.draw(HANDED_IN * size)
        stream = DocumentStream(some, first, thread, job, queue, asyncio.Event().wait)
        answered = asyncio.create_task(worker(queue, stream.job))
        if streamed:
            result = [
                builder.answer([builder.choice(one)], None).model_dump(exclude_unset=True)
                async for one in stream.chunks(await stream.next())
            ]
        else:
            (last,) = await stream.finished()
            body = builder.answer([builder.choice(last)], None).model_dump_json(exclude_unset=True)
            result = json.loads(stream.complete(body))
        await answered
        return result

    async def worker(queue, job):
        done, most = 0, HANDED_IN * size
        while not (job.place.whole and done == some.answers.drawn):
            queue.next_round(busy=True)
            assert len(job.place.pieces) <= most, "few are in hand"
            for i in reversed(range(done, done := done + len(job.place.pieces))):
                job.place.put(answer(i))
            job.place.pieces.clear()
            await asyncio.sleep(0.001)

    return asyncio.run(client())


def choice_of(answer):
    (choice,) = answer["choices"]
    return choice


ANSWERS = [("Sie",), (None, "error", "no memory"), ("Es", "length")]
JOINED = " Sie\n\n- He has a dog.  Es \n"


def test_a_piece_that_failed_keeps_its_source_and_is_marked(tokenizer):
    answer = run(cut(tokenizer), tokenizer, lambda i: chunk(i, *ANSWERS[i]))
    choice = choice_of(answer)
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
    document = cut(tokenizer, speculation=True)
    how = {"kind": ChatBuilder, "streamed": True}
    choices = [*map(choice_of, run(document, tokenizer, lambda i: chunk(i, *ANSWERS[i]), **how))]
    assert "".join(choice["delta"]["content"] for choice in choices) == JOINED
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert [[p["start"] for p in choice["pieces"]] for choice in choices] == [[1], [20], [35]]
    assert [choice["stats"]["failed"] for choice in choices] == [0, 1, 1]
    assert {choice["stats"]["pieces"] for choice in choices} == {3}
    details = [choice["pieces"][0]["speculation"]["tokens"] for choice in choices]
    assert details[:2] == [[{"text": "Sie", "writer": "draft"}], []]


def test_many_pieces_are_joined_outside_the_event_loop(tokenizer, monkeypatch):
    threads, add = set(), DocumentInFlight.add
    monkeypatch.setattr(
        DocumentInFlight,
        "add",
        lambda *how: (threads.add(threading.current_thread().name), add(*how))[1],
    )
    lines = [f'{i} "pieces":[] \\' for i in range(500)]
    document = cut(tokenizer, "\n".join(lines), split="lines")
    choice = choice_of(run(document, tokenizer, lambda i: chunk(i, f'"pieces":[] {i}')))
    assert choice["text"].split("\n") == [f'"pieces":[] {i}' for i in range(500)]
    assert [piece["text"] for piece in choice["pieces"]] == choice["text"].split("\n")
    assert choice["stats"] == {"pieces": 500, "cut": 0, "failed": 0}
    assert threads == {"tokenizer_0"}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_document_whose_pieces_all_fail_is_an_error(tokenizer, streamed):
    failed = lambda i: chunk(i, None, "error", "NaN logits")  # noqa: E731
    with pytest.raises(ApiError, match="NaN logits") as error:
        run(cut(tokenizer), tokenizer, failed, streamed=streamed)
    assert error.value.status == 500
