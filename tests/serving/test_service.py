"""Tests the service between requests and the thread; no model is needed."""

import asyncio
from types import SimpleNamespace

import pytest

from fake_serving import idle_service
from mlx_t5.checkpoints.generation_config import Preset
from mlx_t5.errors import UserError
from mlx_t5.serving import requests
from mlx_t5.serving.api_error import ApiError
from mlx_t5.serving.service import Presets
from mlx_t5.text.prompts import Prompt


@pytest.mark.parametrize(
    "fields, reason",
    [({"num_draft": 8}, "7 at most"), ({"delta": 0.1}, "delta cannot be combined")],
)
def test_a_request_that_exact_decoding_cannot_serve_is_refused(fields, reason):
    service = idle_service(exact=True)
    service.drafts = True
    body = requests.PredictRequest(prompt="x", max_tokens=5, **fields)
    with pytest.raises(ApiError, match=reason) as error:
        service._settings(body)
    assert error.value.status == 400
    assert service.describe().max_num_draft == 7 and service.describe().exact
    assert idle_service().describe().max_num_draft == requests.MAX_NUM_DRAFT


def test_a_server_whose_defaults_contradict_exact_does_not_start():
    with pytest.raises(UserError, match="delta cannot be combined with exact"):
        idle_service(exact=True, delta=0.5)


def test_a_text_at_which_the_tokenizer_panics_is_a_bad_request():
    service = idle_service()

    def panic(text):
        raise type("PanicException", (BaseException,), {})("byte index 3 is out of bounds")

    service.tokenizer = SimpleNamespace(encode=panic)
    with pytest.raises(ApiError, match="cannot read this prompt") as error:
        asyncio.run(service.token_ids(["a"]))
    assert error.value.status == 400


def test_a_request_overrides_its_task_and_a_task_overrides_the_model():
    fixing = Preset("task fixing", "fix grammar: ", {"max_tokens": 4, "top_k": 3})
    sampling = Preset("generation_config.json", "", {"temp": 0.5, "top_k": 9, "max_tokens": 99})
    service = idle_service(Presets(sampling, {"fixing": fixing}))

    def settings(**fields):
        body = requests.PredictRequest(prompt="x", **fields)
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
        body = requests.CompletionRequest(prompt=prompt, task=task)
        with pytest.raises(ApiError, match=message) as error:
            asyncio.run(service.generation_job(body))
        assert (error.value.status, error.value.body.error.param) == (400, "task")
    body = requests.PredictRequest(prompt="a", task="fixing")
    job = asyncio.run(service.generation_job(body))
    assert job.prompts == [Prompt(service.tokenizer.encode("fix grammar: a"))]


def test_a_prediction_needs_no_draft_and_is_tokenized_without_the_tasks_prefix():
    fixing = Preset("task fixing", "fix grammar: ", {})
    service = idle_service(Presets(tasks={"fixing": fixing}))
    prediction = {"type": "content", "content": "a b"}
    body = requests.PredictRequest(prompt="a", task="fixing", num_draft=7, prediction=prediction)
    job = asyncio.run(service.generation_job(body))
    (prompt,) = job.prompts
    assert prompt.prediction == service.tokenizer.encode("a b")
    assert job.request.settings.num_draft == 7
    for fields in ({"num_draft": 7}, {"draft": True}):
        with pytest.raises(ApiError, match="no draft"):
            service._settings(requests.PredictRequest(prompt="a", **fields))
    for fields in ({"num_draft": 0}, {"draft": False}):
        assert service._settings(requests.PredictRequest(prompt="a", **fields)).num_draft == 0
    assert service._settings(requests.PredictRequest(prompt="a", num_draft="auto"))
