"""Sends valid and broken requests that schemathesis makes from the OpenAPI description."""

import re
import subprocess
import sys

import pytest

from serving_process import Server

pytestmark = pytest.mark.slow
KEY = "the-key"


@pytest.fixture(scope="module")
def short():
    """Starts a server whose answers are short."""
    running = Server("--host", "localhost", "--max-tokens", "4", "--api-key", KEY, key=KEY)
    yield running
    running.close()


def test_a_host_name_is_reported_as_the_address_that_it_got(short):
    """On a Mac localhost is ::1 first, and a client of 127.0.0.1 would not reach that."""
    assert re.fullmatch(r"http://(127\.0\.0\.1|\[::1\]):\d+", short.url)


def test_the_openapi_description_has_our_errors(short):
    schema = short.http.get("/openapi.json").json()
    assert "422" not in str(schema), "what FastAPI would say, and never does here"
    for path in ("/v1/completions", "/v1/chat/completions", "/predict", "/v1/score"):
        responses = schema["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "413", "429", "500", "503"} <= set(responses)


def test_no_request_that_was_made_up_breaks_it(short, tmp_path):
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
    command += ["run", f"{short.url}/openapi.json", "--max-examples", "4", "--seed", "1"]
    # The model and the limits also decide whether a valid request can be served.
    command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
    command += ["--phases", "coverage,fuzzing", "--continue-on-failure", "--no-color"]
    # The same endpoint as /v1/rerank.
    command += ["--exclude-path", "/v2/rerank", "--exclude-path", "/rerank"]
    command += ["--suppress-health-check", "all", "-H", f"Authorization: Bearer {KEY}"]
    fuzz = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    print(fuzz.stdout)
    assert fuzz.returncode == 0, fuzz.stdout[-5000:]
    assert int(re.search(r"(\d+) generated", fuzz.stdout).group(1)) > 500
    assert short.http.get("/health").json()["status"] == "ok"
    assert "Traceback" not in short.log and "ERROR" not in short.log
