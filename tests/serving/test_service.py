"""Tests the service between requests and the thread; no model is needed."""

import asyncio
from types import SimpleNamespace

import pytest

from mlx_t5.checkpoints.generation_config import Preset
from mlx_t5.disk import BUNDLED
from mlx_t5.errors import UserError
from mlx_t5.scoring.pairs import Pair
from mlx_t5.serving import api, scoring_routes
from mlx_t5.serving.api_error import ApiError
from mlx_t5.serving.jobs import JobQueue, ScoringJob
from mlx_t5.serving.service import Presets, Service
from mlx_t5.serving.tokenizing import RequestLimits
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
    "fields, reason", [({"num_draft": 8}, "room for 7"), ({"delta": 0.1}, "0.1")]
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
    with pytest.raises(UserError, match="delta is 0.5"):
        served(32, exact=True, delta=0.5)


def test_a_text_at_which_the_tokenizer_panics_is_a_bad_request():
    service, _ = served(9)

    def panic(text):
        raise type("PanicException", (BaseException,), {})("byte index 3 is out of bounds")

    service.tokenizer.tokenizer = SimpleNamespace(encode=panic)
    with pytest.raises(ApiError, match="cannot read this prompt") as error:
        asyncio.run(service.tokenizer.token_ids(["a"]))
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
    largest = ScoringJob("embed", 1, ids=ids), ScoringJob("rerank", 1, pairs)
    for scoring_job in largest:
        with pytest.raises(ApiError, match="went away"):
            asyncio.run(service.score_or_embed(scoring_job, gone))
        assert queue.admitted == (16 if batch == 8 else batch + waiting)
        (job,) = queue.next_round(busy=True)
        assert job.place.cancelled
        queue.release(job, job.place.size)


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
    assert job.predictions == [tokenizer.encode("a b")]
    assert job.settings.num_draft == 7
    for fields in ({"num_draft": 7}, {"draft": True}):
        with pytest.raises(ApiError, match="no draft"):
            service._settings(api.PredictRequest(prompt="a", **fields))
    for fields in ({"num_draft": 0}, {"draft": False}):
        assert service._settings(api.PredictRequest(prompt="a", **fields)).num_draft == 0


async def gone():
    return {"type": "http.disconnect"}
