"""Tests who may use the server from where: origins, host names, and a proxy's path."""

import asyncio
import json
import re

import pytest
from starlette.testclient import TestClient

from fake_serving import idle_service
from mlx_t5.cli.web_server import LOOPBACK_HOSTS
from mlx_t5.serving.app import Middleware, create_app
from mlx_t5.serving.metrics import Metrics

APP = "https://app.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST"}
PREFLIGHT |= {"Access-Control-Request-Headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def client():
    """Returns `client(**options)`: a client of an application that decodes nothing."""
    service = idle_service()

    def start(base="http://localhost:8080", **options):
        app = create_app(service, Metrics(), **options)
        return TestClient(app, base_url=base, follow_redirects=False)

    return start


@pytest.mark.parametrize(
    "origin, allowed, status",
    [
        (None, [], 200),
        ("http://localhost:8080", [], 200),
        ("https://localhost:8080", [], 200),  # a proxy with TLS
        ("http://localhost:8080.evil.example", [], 403),
        ("https://evil.example", [], 403),
        ("null", [], 403),
        (APP, [APP], 200),
        ("http://app.example", [APP], 403),
        ("null", ["null"], 200),
        ("chrome-extension://abc", ["chrome-extension://abc"], 200),
        ("https://any.example", ["*"], 200),
    ],
)
def test_web_pages_of_other_origins_are_refused(client, origin, allowed, status):
    headers = {} if origin is None else {"Origin": origin}
    answer = client(allowed_origins=allowed).get("/v1/models", headers=headers)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "unknown_origin"
        assert "--allow-origin" in answer.json()["error"]["message"]
    readable = answer.headers.get("access-control-allow-origin")
    assert readable == (("*" if "*" in allowed else origin) if status == 200 and allowed else None)


@pytest.mark.parametrize("key", [None, "a key"])
def test_an_allowed_page_may_ask_before_it_sends_its_key(client, key):
    allowed = client(allowed_origins=[APP], api_key=key)
    answer = allowed.options("/v1/models", headers={"Origin": APP, **PREFLIGHT})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == APP
    assert "authorization" in answer.headers["access-control-allow-headers"]
    refused = allowed.get("/v1/models", headers={"Origin": APP, "Authorization": "Bearer x"})
    assert refused.status_code == (401 if key else 200)
    assert refused.headers["access-control-allow-origin"] == APP, "so that the page sees why"
    for origins in ([], [APP]):
        other = {"Origin": "https://evil.example", **PREFLIGHT}
        assert (
            client(allowed_origins=origins).options("/v1/models", headers=other).status_code == 403
        )


def test_without_a_key_only_local_host_names_are_accepted(client):
    local = client(hosts=LOOPBACK_HOSTS)
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:8080"):
        assert local.get("/v1/models", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "evil.example:8080", "localhost.evil.example", "[::2]:1", "@", ""):
        for evil in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
            answer = local.get("/v1/models", headers=evil)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_host")
            answer = local.get("/languages", headers=evil)
            assert answer.status_code == 400 and "host name" in answer.json()["error"]
    assert client().get("/v1/models", headers={"Host": "behind.a.proxy"}).status_code == 200


@pytest.mark.parametrize("stripped", [True, False])
def test_the_server_works_under_a_proxys_path(client, stripped):
    proxied = client(root_path="/t5")
    prefix = "" if stripped else "/t5"  # of the path that the proxy passes on

    def get(address):
        assert address.startswith("/t5/"), address
        answer = proxied.get(prefix + address.removeprefix("/t5"))
        assert answer.status_code == 200, address
        return answer.text

    page = get("/t5/")
    addresses = re.findall(r'(?:href|src)="([^#"][^"]*)"', page)
    assert len(addresses) > 8 and not any(a.startswith(("/", "http")) for a in addresses)
    for address in addresses:
        get(f"/t5/{address}")
    docs = get("/t5/docs")
    assert "'/t5/openapi.json'" in docs
    for address in re.findall(r'(?:href|src)="([^"]+)"', docs):
        get(address)
    assert proxied.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/t5"}]
    moved = proxied.get(f"{prefix}/docs/").headers["location"]
    assert moved == "http://localhost:8080/t5/docs"
    assert get("/t5/v1/models")
    assert proxied.get("/t5").headers["location"] == "http://localhost:8080/t5/"
    assert proxied.get("/t5evil").status_code == 404


# ---- requests that fail --------------------------------------------------------------------------

SCOPE = {"type": "http", "method": "POST", "path": "/confidential\nERROR forged", "headers": []}


def ask(app, metrics=None, **scope):
    """Handles one request without a network; returns the messages that were sent."""
    sent = []

    async def send(message):
        sent.append(message)

    middleware = Middleware(app, metrics or Metrics(), ["*"], [], "")
    asyncio.run(middleware(SCOPE | scope, None, send))
    return sent


@pytest.mark.parametrize("target", ["http://[", "http://[::1/v1/models", "http://a]b/"])
def test_a_target_that_is_no_url_is_refused_logged_and_counted(caplog, target):
    metrics = Metrics()
    start, body = ask(None, metrics, path=target)
    error = json.loads(body["body"])["error"]
    assert start["status"] == 400 and "not a valid URL" in error["message"]
    (record,) = caplog.records
    assert "a request was refused" in record.getMessage() and target not in record.getMessage()
    assert metrics.requests.labels("other", "400")._value.get() == 1


def test_an_error_is_logged_without_what_the_client_said(caplog):
    async def app(scope, receive, send):
        raise ValueError("confidential")

    assert ask(app)[0]["status"] == 500
    (record,) = caplog.records
    assert record.getMessage().startswith("POST other failed: ValueError at ")
    assert not {"confidential", "forged"} & set(record.getMessage().split())


def test_a_request_cut_off_by_the_shutdown_is_told_so():
    async def app(scope, receive, send):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    start, body = ask(app)
    assert start["status"] == 503 and b"the server is shutting down" in body["body"]
