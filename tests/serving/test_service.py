"""Tests the service between requests and the thread; no model is needed."""

import asyncio
from types import SimpleNamespace

import pytest

from mlx_t5.checkpoints.generation_config import Preset
from mlx_t5.disk import BUNDLED
from mlx_t5.engine.rows import Chunk, Result, Stats
from mlx_t5.errors import UserError
from mlx_t5.scoring.pairs import Pair
from mlx_t5.serving import api, scoring_routes
from mlx_t5.serving.answers import ChatBuilder, CompletionBuilder, joined
from mlx_t5.serving.api_error import ApiError
from mlx_t5.serving.jobs import JobQueue, ScoringJob
from mlx_t5.serving.service import Presets, RequestLimits, Service
from mlx_t5.settings import Settings
from mlx_t5.text.tokenizer import load_tokenizer


def served(vocab_size, presets=None, exact=False, delta=0.0):
    """Returns the service of a model with `vocab_size` ids, and the bundled tokenizer."""
    model = SimpleNamespace(
        config=SimpleNamespace(vocab_size=vocab_size, n_positions=None, task_prefixes=()),
        dtype="mlx.core.float32",
        pooling=None,
        can_decode=True,
    )
    tokenizer = load_tokenizer(BUNDLED / "target")
    decoder = SimpleNamespace(
        model=model,
        tokenizer=tokenizer,
        drafter=None,
        defaults=Settings(num_draft=5),
        exact=exact,
        target=lambda batch_size: SimpleNamespace(width=8),
    )
    jobs = JobQueue(4, 8, lambda: 0.0)
    worker = SimpleNamespace(start=lambda: decoder, stop=lambda: None, max_batch=4, jobs=jobs)
    limits = RequestLimits(10, 10, 10)
    return Service(worker, limits, "a model", delta, presets=presets), tokenizer


@pytest.mark.parametrize(
    "fields, reason",
    [({"num_draft": 8}, "7 at most"), ({"delta": 0.1}, "delta cannot be combined")],
)
def test_a_request_that_exact_decoding_cannot_serve_is_refused(fields, reason):
    service, _ = served(32, exact=True)
    service.drafts = True
    body = api.PredictRequest(prompt="x", max_tokens=5, **fields)
    with pytest.raises(ApiError, match=reason) as error:
        service._settings(body)
    assert error.value.status == 400
    assert service.describe().max_num_draft == 7 and service.describe().exact
    assert served(32)[0].describe().max_num_draft == api.MAX_NUM_DRAFT


def test_a_server_whose_defaults_contradict_exact_does_not_start():
    with pytest.raises(UserError, match="delta cannot be combined with exact"):
        served(32, exact=True, delta=0.5)


def test_a_text_at_which_the_tokenizer_panics_is_a_bad_request():
    service, _ = served(9)

    def panic(text):
        raise type("PanicException", (BaseException,), {})("byte index 3 is out of bounds")

    service.tokenizer = SimpleNamespace(encode=panic)
    with pytest.raises(ApiError, match="cannot read this prompt") as error:
        asyncio.run(service.token_ids(["a"]))
    assert error.value.status == 400


@pytest.mark.parametrize("batch, waiting", [(8, 128), (1, 0), (2, 4)])
def test_a_queue_in_which_nothing_waits_has_room_for_the_largest_request(batch, waiting):
    """With the defaults, 8 and 128, there is room for several requests."""
    service, _ = served(32)
    queue = JobQueue(batch, waiting, lambda: 0.0)
    service.limits = RequestLimits(10, 10, batch + waiting)
    service.worker = SimpleNamespace(max_batch=batch, jobs=queue)
    pairs = [Pair((5,), (6,))] * (2 * scoring_routes.MAX_DOCUMENTS)
    ids = [[5]] * scoring_routes.MAX_INPUTS
    largest = (
        ScoringJob(kind="embed", prompt_tokens=1, ids=ids),
        ScoringJob(kind="rerank", prompt_tokens=1, pairs=pairs),
    )
    for scoring_job in largest:
        with pytest.raises(ApiError, match="went away"):
            asyncio.run(service.score_or_embed(scoring_job, gone))
        assert queue.admitted == (16 if batch == 8 else batch + waiting)
        new, cancelled = queue.next_round(busy=True)
        assert new == cancelled == [scoring_job]
        queue.release(scoring_job, scoring_job.size)


@pytest.mark.parametrize(
    "extreme", [{"top_p": 5e-324}, {"delta": 5e-324}, {"num_draft": 16}, {"temperature": 1.2e-38}]
)
def test_extreme_values_that_the_schema_accepts_can_be_decoded_with(extreme):
    service, _ = served(32)
    service.drafts = True
    settings = service._settings(api.PredictRequest(prompt="x", max_tokens=5, **extreme))
    assert settings.max_tokens == 5


def test_a_request_overrides_its_task_and_a_task_overrides_the_model():
    fixing = Preset("task fixing", "fix grammar: ", {"max_tokens": 4, "top_k": 3})
    sampling = Preset("generation_config.json", "", {"temp": 0.5, "top_k": 9, "max_tokens": 99})
    service, tokenizer = served(3072, Presets(sampling, {"fixing": fixing}))

    def settings(**fields):
        body = api.PredictRequest(prompt="x", **fields)
        request_settings = service._settings(body, service.task(body.task, ["x"]))
        return request_settings.max_tokens, request_settings.temp, request_settings.top_k

    assert settings() == (10, 0.5, 9)  # limited by the server
    assert settings(task="fixing") == (4, 0.5, 3)
    assert settings(task="fixing", max_tokens=5, temperature=0) == (5, 0, 3)
    expected = {"prefix": "fix grammar: ", "max_tokens": 4, "top_k": 3}
    assert service.describe().tasks == {"fixing": expected}
    for task, prompt, message in (
        ("x", "a", "it has fixing"),
        ("fixing", [5], "send that as text"),
    ):
        body = api.CompletionRequest(prompt=prompt, task=task)
        with pytest.raises(ApiError, match=message) as error:
            asyncio.run(service.submit(body, None))
        assert (error.value.status, error.value.body.error.param) == (400, "task")
    body = api.PredictRequest(prompt="a", task="fixing")
    asyncio.run(service.submit(body, gone))
    (job,) = service.worker.jobs.unfinished()
    assert job.prompts == [tokenizer.encode("fix grammar: a")]


def test_a_prediction_needs_no_draft_and_is_tokenized_without_the_tasks_prefix():
    fixing = Preset("task fixing", "fix grammar: ", {})
    service, tokenizer = served(3072, Presets(tasks={"fixing": fixing}))
    prediction = {"type": "content", "content": "a b"}
    body = api.PredictRequest(prompt="a", task="fixing", num_draft=7, prediction=prediction)
    asyncio.run(service.submit(body, gone))
    (job,) = service.worker.jobs.unfinished()
    assert job.spec.predictions == [tokenizer.encode("a b")]
    assert job.spec.settings.num_draft == 7
    for fields in ({"num_draft": 7}, {"draft": True}):
        with pytest.raises(ApiError, match="no draft"):
            service._settings(api.PredictRequest(prompt="a", **fields))
    for fields in ({"num_draft": 0}, {"draft": False}):
        assert service._settings(api.PredictRequest(prompt="a", **fields)).num_draft == 0


async def gone():
    return {"type": "http.disconnect"}


# ---- documents -----------------------------------------------------------------------------------

TEXT = " She have a cat.\n\n- He has a dog.  It barks. \n"
WORDS = ["She have a cat.", "He has a dog.", "It barks."]


def cut(prompt=TEXT, prefix="", most=64, **fields):
    """Returns the document of a request for a completion, or for a chat if `prompt` is a list."""
    service, _ = served(3072, Presets(tasks={"a task": Preset("a task", prefix)}))
    service.max_source_tokens, service.prefixes = most, ("fix grammar: ",)
    fields = {"split": "sentences", "task": "a task" if prefix else None, **fields}
    if isinstance(prompt, tuple):
        roles = ("system", "user")
        messages = [{"role": r, "content": c} for r, c in zip(roles, prompt, strict=True)]
        body = api.ChatRequest(messages=messages, **fields)
    else:
        body = api.CompletionRequest(prompt=prompt, **fields)
    return asyncio.run(service._cut(body))


def test_each_piece_has_the_prefix_of_the_text_the_task_and_the_system_message():
    for document in (
        cut("fix grammar: " + TEXT.lstrip()),
        cut(prefix="fix grammar: "),
        cut((" fix grammar:\n", TEXT)),
        cut(("grammar:", TEXT), "fix "),
    ):
        assert document.prompts == ["fix grammar: " + words for words in WORDS]
    assert cut().prompts == cut((" ", TEXT)).prompts == WORDS
    assert cut(split="lines").prompts == ["She have a cat.", "- He has a dog.  It barks."]


def test_a_possible_prefix_is_decoded_and_logged_without_its_words(caplog):
    caplog.set_level("INFO")
    assert cut("fix spelling: She have a cat.").prompts == ["fix spelling: She have a cat."]
    (line,) = caplog.messages
    assert "may begin with a prefix" in line and "spelling" not in line


def test_pieces_follow_the_language_and_the_limit():
    text = "Er kommt am 3. Oktober. Es regnet."
    assert len(cut(text, source_language="de").prompts) == 2 < len(cut(text).prompts)
    document = cut("She has a cat, a dog, a horse and many more of them. One. Two.", most=12)
    assert [piece.cut for piece in document.document.pieces] == [True] * 2 + [False] * 2


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"n": 2, "temperature": 1.0}, "n"),
        ({"logprobs": 0}, "logprobs"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [5]}, "prompt"),
        ({"source_language": "german"}, "source_language"),
        ({"prompt": "a\n" * 5001, "split": "lines"}, "prompt"),
        ({"most": 1}, "prompt"),
    ],
)
def test_a_text_that_cannot_be_split_is_refused(fields, param):
    with pytest.raises(ApiError) as error:
        cut(**fields)
    assert (error.value.status, error.value.body.error.param) == (400, param)


ANSWERS = [("Sie",), (None, "error", "no memory"), ("Es", "length")]
JOINED = " Sie\n\n- He has a dog.  Es \n"


def chunk(index, text, reason="stop", error=None):
    tokens = [] if error else [5]
    result = Result(text, tokens, ["draft"][: len(tokens)], reason, Stats(), error)
    pieces = [text][: len(tokens)]
    return Chunk(text or "", tokens, result.writers, pieces, Stats(), result, index)


def join(document, answer, kind=CompletionBuilder, streamed=False):
    """Returns the choices of a document's answer; the pieces are answered in reverse order."""
    builder = kind(api.CompletionRequest(prompt="x", stream=streamed), "a model", None)

    async def answers():
        for i in reversed(range(len(document.prompts))):
            yield answer(i)

    async def client():
        chunks = joined(answers(), document, streamed, streamed)
        whole = [builder.answer([builder.choice(one)], None) async for one in chunks]
        return [answer.model_dump(exclude_unset=True)["choices"][0] for answer in whole]

    return asyncio.run(client())


def test_a_piece_that_failed_keeps_its_source_and_is_marked():
    (choice,) = join(cut(), lambda i: chunk(i, *ANSWERS[i]))
    assert (choice["text"], choice["finish_reason"]) == (JOINED, "length")
    failed = {"text": WORDS[1], "finish_reason": "error", "error": "no memory"}
    assert choice["pieces"] == [
        {"start": 1, "end": 16, "text": "Sie", "finish_reason": "stop"},
        {"start": 20, "end": 33, **failed},
        {"start": 35, "end": 44, "text": "Es", "finish_reason": "length"},
    ]
    assert choice["stats"] == {"pieces": 3, "cut": 0, "failed": 1, "kept": 0}


def test_chunks_come_in_order_and_add_up_to_the_text():
    choices = join(cut(), lambda i: chunk(i, *ANSWERS[i]), ChatBuilder, streamed=True)
    assert "".join(choice["delta"]["content"] for choice in choices) == JOINED
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert [[p["start"] for p in choice["pieces"]] for choice in choices] == [[1], [20], [35]]
    assert [choice["stats"]["failed"] for choice in choices] == [0, 1, 1]
    assert {choice["stats"]["pieces"] for choice in choices} == {3}
    details = [choice["pieces"][0]["speculation"]["tokens"] for choice in choices]
    assert details[:2] == [[{"text": "Sie", "writer": "draft"}], []]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_document_whose_pieces_all_fail_is_an_error(streamed):
    with pytest.raises(ApiError, match="NaN logits") as error:
        join(cut(), lambda i: chunk(i, None, "error", "NaN logits"), streamed=streamed)
    assert error.value.status == 500
