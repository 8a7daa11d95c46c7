"""Requests: how much is said about one that is wrong everywhere."""

import pytest
from pydantic import ValidationError

from mlx_t5.serving.api import ChatRequest, CompletionRequest, PredictRequest
from mlx_t5.serving.errors import error_of_validation

MANY = 90_000
TURN = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "kind, body",
    [
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": [[-1] * MANY] * 3}),
        (CompletionRequest, {"prompt": [["x"] * MANY] * 3}),
        (CompletionRequest, {"prompt": [[[]] * MANY] * 3}),
        (CompletionRequest, {"prompt": [5] + [""] * MANY}),
        (CompletionRequest, {"prompt": [""] * 64}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(MANY)))}),
        (PredictRequest, {"prompt": "x", **dict.fromkeys(map(str, range(MANY)))}),
        (ChatRequest, {"messages": [TURN], "stream_options": {str(i): i for i in range(MANY)}}),
        (ChatRequest, {"messages": [1] * MANY}),
        (ChatRequest, {"messages": [{**TURN, "content": [{}] * MANY}]}),
        (ChatRequest, {"messages": [{**TURN, **dict.fromkeys(map(str, range(MANY)))}]}),
    ],
)
def test_a_body_that_is_wrong_everywhere_makes_few_complaints(kind, body):
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate(body)
    assert wrong.value.error_count() <= 2 * 64 + 2
    error = error_of_validation(wrong.value.errors())
    assert error.status == 400 and len(error.content["error"]["message"]) < 500


def test_the_first_unknown_field_is_the_one_that_is_named():
    with pytest.raises(ValidationError) as wrong:
        PredictRequest.model_validate({"first": 1, "prompt": "x", "second": 2})
    assert [error["loc"] for error in wrong.value.errors()] == [("first",)]
