"""Tests `--exact` over HTTP: the same bits with any batch; and `--log-prompts`."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from devices import exact_or_refused
from serving_process import Server


@pytest.mark.slow
@exact_or_refused
def test_bits_depend_neither_on_other_requests_nor_on_the_draft(models):
    server = Server(*models, "--exact", "--max-batch", "4", "--log-prompts")
    try:
        assert server.http.get("/v1/models").json()["data"][0]["exact"]

        def choice(prompt, num_draft):
            body = {"prompt": prompt, "max_tokens": 30, "num_draft": num_draft, "logprobs": 0}
            (completion,) = server.http.post("/v1/completions", json=body).json()["choices"]
            return completion["text"], completion["logprobs"]["token_logprobs"]

        prompts = ["abc", "a longer prompt than the others", "é", "abc"]
        alone = [choice(prompt, 0) for prompt in prompts]
        for drafts in ([3, 7, 1, 5], [0, 2, 7, 4]):
            with ThreadPoolExecutor(4) as clients:
                assert list(clients.map(choice, prompts, drafts)) == alone
        for line in ("prompts: ['abc']", f"texts: {[alone[0][0]]!r}"):
            assert line in server.log
        answer = server.http.post("/v1/completions", json={"prompt": "abc", "delta": 0.5})
        assert answer.status_code == 400 and "exact" in answer.json()["error"]["message"]
    finally:
        server.close()
