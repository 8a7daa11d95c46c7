"""Tests `--exact` over HTTP: the same bits with any batch; and `--log-prompts`."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from devices import exact_or_refused
from mlx_t5.cli import server_command
from mlx_t5.cli.server_options import read_server_options
from mlx_t5.loading import choose_pair


@pytest.mark.slow
@exact_or_refused
def test_bits_depend_neither_on_other_requests_nor_on_the_draft(models, caplog):
    options = read_server_options([*models, "--exact", "--max-batch", "4", "--log-prompts"])
    chosen = choose_pair(options.model, options.draft_model, None)
    caplog.set_level(logging.INFO)
    app = server_command._application(options, chosen)
    with TestClient(app, base_url="http://localhost") as http:
        assert http.get("/v1/models").json()["data"][0]["exact"]

        def choice(prompt, num_draft):
            body = {"prompt": prompt, "max_tokens": 30, "num_draft": num_draft, "logprobs": 0}
            (completion,) = http.post("/v1/completions", json=body).json()["choices"]
            return completion["text"], completion["logprobs"]["token_logprobs"]

        prompts = ["abc", "a longer prompt than the others", "é", "abc"]
        alone = [choice(prompt, 0) for prompt in prompts]
        for drafts in ([3, 7, 1, 5], [0, 2, 7, 4]):
            with ThreadPoolExecutor(4) as clients:
                assert list(clients.map(choice, prompts, drafts)) == alone
        for line in ("prompts: ['abc']", f"texts: {[alone[0][0]]!r}"):
            assert line in caplog.messages
        answer = http.post("/v1/completions", json={"prompt": "abc", "delta": 0.5})
        assert answer.status_code == 400 and "exact" in answer.json()["error"]["message"]
