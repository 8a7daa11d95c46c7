"""Tests LibreTranslate's API over HTTP, with the bundled pair, which translates en to fr."""

import errno
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from fake_serving import PATIENCE, LocalServer
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine.document_results import fitted_document
from mlx_t5.errors import UserError
from mlx_t5.model import load
from mlx_t5.serving import libretranslate
from mlx_t5.serving import service as serving
from mlx_t5.serving.api_error import error_of_validation
from mlx_t5.serving.libretranslate import MAX_FIELDS
from mlx_t5.serving.saved_prompts import SavedPrompts
from mlx_t5.serving.service import MAX_PIECES

CATS, CHATS = "I have two cats.", "J'ai deux chats."
ENGLISH = "translate English to French: "
JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def asked(server, **fields):
    answer = server.http.post("/translate", json={"target": "fr", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text_is_translated_sentence_by_sentence(server):
    assert asked(server, q=CATS, source="en") == {"translatedText": CHATS}
    several = asked(server, q=[f"{CATS} {CATS}", " ", "12:30"], source="en-GB", format="text")
    assert several == {"translatedText": [f"{CHATS} {CHATS}", " ", "12:30"]}
    broken = asked(server, q=f"{CATS}<br />{CATS}<BR>{CATS}")["translatedText"]
    assert broken == f"{CHATS}<br />{CHATS}<BR>{CHATS}", "a line break in any spelling stays"


def test_auto_is_the_models_only_source(server):
    detected = {"confidence": 0, "language": "en"}
    assert asked(server, q=CATS, source="auto")["detectedLanguage"] == detected
    assert asked(server, q=[CATS, CATS])["detectedLanguage"] == [detected, detected]


def test_alternatives_are_the_further_beams_of_each_sentence(server, decoder):
    beams = {"num_beams": 3, "num_return_sequences": 3}
    dogs = "We have two dogs."
    searches = [[r.text for r in decoder.generate([ENGLISH + q], **beams)] for q in (CATS, dogs)]
    best, *others = map("\n".join, zip(*searches, strict=True))
    expected = {"translatedText": best, "alternatives": others}
    assert asked(server, q=f"{CATS}\n{dogs}", source="en", alternatives=2) == expected
    listed = asked(server, q=[CATS], source="en", alternatives=2)
    assert listed == {"translatedText": [CHATS], "alternatives": [searches[0][1:]]}


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("I have two cats.\nWe have two dogs.\n\nShe has a dog.", [3]),
        ("12:30", [0]),
        ("See https://example.org/a now.", [0]),  # this pair writes no address
        (f"{CATS} " * 30, [3]),
        ([" ", f"{CATS}<br>12:30", "She has a dog. We eat."], [0, 3, 3]),
    ],
)
def test_alternatives_do_not_change_the_translation(server, text, counts):
    plain = asked(server, q=text)["translatedText"]
    more = asked(server, q=text, alternatives=3)
    assert more["translatedText"] == plain
    whole = isinstance(text, str)
    bests, lists = ([plain], [more["alternatives"]]) if whole else (plain, more["alternatives"])
    for best, others, count in zip(bests, lists, counts, strict=True):
        assert len({best, *others}) == 1 + count == 1 + len(others)
        for other in others:
            for mark in ("\n", ".", "<br>", "12:30"):
                assert other.count(mark) == best.count(mark)


def test_exact_decoding_has_no_beams_and_so_no_alternatives(server, monkeypatch):
    monkeypatch.setattr(server.http.app.state.service, "exact", True)
    monkeypatch.setattr(server.http.app.state.service, "max_num_draft", 7)
    answer = asked(server, q=CATS, source="en", alternatives=3)
    assert answer == {"translatedText": CHATS, "alternatives": []}


@pytest.mark.parametrize("headers", [FORM, {}])
def test_forms_and_query_parameters_are_read_too(server, headers):
    fields = f"q={CATS}&source=en&target=fr&format=text&api_key=".replace(" ", "+")
    sent = {"content": fields, "headers": FORM} if headers else {}
    path = "/translate" if headers else f"/translate?{fields}"
    assert server.http.post(path, **sent).json() == {"translatedText": CHATS}
    more = fields + "&q=We+eat.&alternatives=1"
    sent = {"content": more, "headers": FORM} if headers else {}
    path = "/translate" if headers else f"/translate?{more}"
    answer = server.http.post(path, **sent).json()
    assert len(answer["translatedText"]) == 2 and len(answer["alternatives"][0]) == 1


def multipart(*parts):
    """A form as a browser sends it, of pairs of a part's description and its value."""
    body = "".join(f"--X\r\nContent-Disposition: form-data; {d}\r\n\r\n{v}\r\n" for d, v in parts)
    headers = {"Content-Type": 'multipart/form-data; boundary="X"'}
    return {"content": body + "--X--\r\n", "headers": headers}


def test_multipart_forms_are_read_as_libretranslate_reads_them(server):
    fields = {"source": (None, "en"), "target": (None, "fr"), "alternatives": (None, "0")}
    more = {"q": (None, CATS), "format": (None, ""), "file": ("a.txt", "target")}
    assert server.http.post("/translate", files=fields | more).json() == {"translatedText": CHATS}
    # .NET quotes no names. Browsers send a line break as CR LF, and LibreTranslate returns LF.
    parts = multipart(("name=q", f"{CATS}\r\n{CATS}"), ('name="q"', "12:30"), ("name=target", "fr"))
    several = server.http.post("/translate", **parts).json()["translatedText"]
    assert several == [f"{CHATS}\n{CHATS}", "12:30"]
    broken = multipart(("name=q", "\xff"))
    broken["content"] = broken["content"].encode("latin-1")
    answer = server.http.post("/translate", **broken)
    assert answer.json() == {"error": "the form is not valid UTF-8"}


@pytest.mark.parametrize("fields", [{"format": None}, {"format": ""}, {"alternatives": "0"}])
def test_empty_values_ask_for_nothing(server, fields):
    assert asked(server, q=CATS, source="en", **fields) == {"translatedText": CHATS}
    assert asked(server, q=CATS, source="en", alternatives=None) == {"translatedText": CHATS}


def test_libretranslates_own_codes_are_those_of_bcp_47(server, monkeypatch):
    pairs = []

    def prefix(target, source=""):
        pairs.append((source, target))
        return ENGLISH, "en"

    service = server.http.app.state.service
    monkeypatch.setattr(service, "translations", SimpleNamespace(prefix=prefix))
    for source, target in (("zt", "pb"), ("PB", "ZT"), ("zh-Hant", "pt-BR")):
        assert asked(server, q=CATS, source=source, target=target) == {"translatedText": CHATS}
    assert pairs == [("zh-Hant", "pt-BR"), ("pt-BR", "zh-Hant"), ("zh-Hant", "pt-BR")]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"target": "de"}, "this model does not translate to de; it knows en to fr"),
        ({"source": "fr"}, "this model does not translate from fr to fr; it knows en to fr"),
        ({"target": "xx"}, "target is 'xx'; it must be a language's code, such as de or pt-BR"),
        ({"target": None}, "target: it must be a valid string"),
        ({"q": ""}, "q is empty; give a text to translate"),
        ({"q": []}, "q is empty; give a text to translate"),
        ({"q": 5}, "q: it must be a valid string or a valid list"),
        ({"q": [CATS, 5]}, "q[1]: it must be a valid string"),
        ({"q": ["A cat eats. " * 600] * 10}, "there are more than 5000 pieces to decode"),
        ({"format": "html"}, "format: it must be 'text'"),
        ({"alternatives": -1}, "alternatives: it must be greater than or equal to 0"),
        ({"alternatives": 10**9}, "alternatives: it must be less than"),
    ],
)
def test_bad_requests_get_one_sentence(server, fields, error):
    answer = server.http.post("/translate", json={"q": CATS, "target": "fr", **fields})
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"] and answer.json()["error"].startswith(error)


def test_every_error_has_the_same_shape(server):
    big = json.dumps({"q": "a" * (1 << 20), "target": "fr"})
    for content, headers, status in (
        ("{bad", JSON, 400),
        ("[]", JSON, 400),
        (b"q=\xff", FORM, 400),
        (big, JSON, 413),
        (b"{}", JSON | {"Content-Encoding": "gzip"}, 415),
        (b"{}", JSON | {"Origin": "http://example.org"}, 403),
    ):
        answer = server.http.post("/translate", content=content, headers=headers)
        assert (answer.status_code, list(answer.json())) == (status, ["error"]), answer.text
        assert isinstance(answer.json()["error"], str)
    assert server.http.put("/languages").json() == {
        "error": "this address does not take this method; see /docs"
    }


TOO_MANY = MAX_PIECES + 1
SEVERAL = f"at most {MAX_PIECES} items"


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        ({"json": {"target": "fr", "q": [1] * TOO_MANY}}, "q[0]: it must be a valid string"),
        ({"json": {"target": "fr", "q": ["1"] * TOO_MANY}}, SEVERAL),
        ({"json": {"target": "fr", "q": ["a"] * TOO_MANY, "alternatives": 1}}, SEVERAL),
        ({"json": {"target": "-" * 17, "q": CATS}}, "target: it must have at most 16 characters"),
        ({"json": {"target": "fr", "source": "a" * 17, "q": CATS}}, "source: it must have at most"),
        ({"content": "q=&" * (MAX_FIELDS + 1), "headers": FORM}, "the form has over"),
        (multipart(*[("name=q", "1")] * (MAX_FIELDS + 1)), "the form has over"),
        ({"content": f"alternatives={'9' * 5000}&target=fr&q=a", "headers": FORM}, "alternatives"),
    ],
)
def test_a_request_is_bounded_before_anything_is_done_with_it(server, monkeypatch, sent, error):
    """One request of 1 MiB must not stop all others: here only its items are too many."""
    service, counts = server.http.app.state.service, []

    def validated(errors, body):
        counts.append(len(errors))
        return error_of_validation(errors, body)

    monkeypatch.setattr(libretranslate, "error_of_validation", validated)
    monkeypatch.setattr(service, "translations", None)  # neither languages nor
    monkeypatch.setattr(service, "documents", None)  # texts are looked at
    answer = server.http.post("/translate", **sent)
    assert answer.status_code == 400 and error in answer.json()["error"], answer.text
    assert all(count <= 2 for count in counts)


def test_others_are_served_while_long_lists_are_cut_one_by_one(server, monkeypatch):
    started, gate = threading.Semaphore(0), threading.Event()

    def slow(text, *arguments):
        if text == "1" and not gate.is_set():
            started.release()
            assert gate.wait(PATIENCE)
        return fitted_document(text, *arguments)

    monkeypatch.setattr(serving, "fitted_document", slow)
    numbers = ["1"] * 250
    with ThreadPoolExecutor(4) as threads:
        long = [threads.submit(asked, server, q=numbers) for _ in range(3)]
        try:
            assert started.acquire(timeout=PATIENCE)
            assert server.http.get("/health").json()["status"] == "ok"
            short = threads.submit(asked, server, q=CATS)
            assert short.result(PATIENCE)["translatedText"] == CHATS
            assert not started.acquire(blocking=False), "only one list holds a thread"
        finally:
            gate.set()
        assert [future.result()["translatedText"] for future in long] == [numbers] * 3


def test_errors_of_the_queue_have_this_shape_too(decoder):
    with LocalServer(decoder, "demo") as server:
        jobs = server.http.app.state.service.worker.jobs
        jobs.max_batch, jobs._max_queue = 1, -1  # no place at all
        full = server.http.post("/translate", json={"q": CATS, "target": "fr"})
        jobs.close("the server is shutting down")
        closed = server.http.post("/translate", json={"q": CATS, "target": "fr"})
    assert (full.status_code, closed.status_code) == (429, 503)
    for answer in (full, closed):
        assert list(answer.json()) == ["error"] and int(answer.headers["retry-after"]) > 0


def test_languages_have_their_targets(server):
    english = {"code": "en", "name": "English", "targets": ["fr"]}
    both = [english, {"code": "fr", "name": "French", "targets": []}]
    assert server.http.get("/languages").json() == both
    assert server.http.request("GET", "/languages", json={"api_key": "x"}).json() == both


def test_a_key_may_be_in_the_body(decoder):
    with LocalServer(decoder, "demo", api_key="secret") as server:
        assert server.http.get("/languages").status_code == 200, "without a key"
        body = {"q": CATS, "target": "fr"}
        for wrong in ({}, {"api_key": "other"}, {"api_key": None}, {"api_key": 5}):
            answer = server.http.post("/translate", json=body | wrong)
            assert (answer.status_code, list(answer.json())) == (403, ["error"])
        bearer = {"Authorization": "Bearer secret"}
        assert server.http.post("/translate", json=body | {"api_key": "secret"}).is_success
        assert server.http.post("/translate", json=body, headers=bearer).is_success


def test_requests_for_texts_name_languages_too(server, decoder):
    def text(**fields):
        body = {"prompt": f"{CATS} {CATS}", "target_language": "fr", **fields}
        answer = server.http.post("/v1/completions", json=body)
        return answer.json()["choices"][0]["text"] if answer.is_success else answer.json()["error"]

    assert text() == text(source_language="en") == f"{CHATS} {CHATS}"
    prediction = {"prediction": {"type": "content", "content": CHATS}}
    whole = decoder.generate(f"translate English to French: {CATS} {CATS}").text
    assert text(logprobs=0) == text(**prediction) == whole, "not cut"
    assert text(target_language="de")["param"] == "target_language"
    assert text(task="grammar")["message"] == "target_language cannot be combined with task"
    assert text(prompt=[5, 6])["param"] in ("prompt", "target_language")
    messages = [{"role": "user", "content": CATS}]
    body = {"messages": messages, "target_language": "fr", "stream": True}
    events = server.http.post("/v1/chat/completions", json=body).text
    assert '"content":"J\'ai deux chats."' in events


# ---- saved prompts -------------------------------------------------------------------------------


def lines(path):
    return [json.loads(line)["prompt"] for line in path.read_text("utf-8").splitlines()]


def test_decoded_prompts_are_saved_once_with_their_prefix(decoder, tmp_path, monkeypatch):
    path = tmp_path / "prompts.jsonl"
    with LocalServer(decoder, "demo", saved=SavedPrompts(str(path), 5)) as server:
        asked(server, q=f"{CATS} We eat. {CATS}")
        for prompt in ("fix grammar: She have two cat.", "fix grammar: She have two cat.", [5, 6]):
            assert server.http.post("/v1/completions", json={"prompt": prompt}).is_success
        assert server.http.post("/v1/completions", json={"prompt": "x", "n": 9}).is_error
        assert server.http.post("/predict", json={"prompt": "fix grammar: He go."}).is_success
        jobs = server.http.app.state.service.worker.jobs
        with monkeypatch.context() as full:
            full.setattr(jobs, "_max_queue", -jobs.max_batch)
            refused = server.http.post("/predict", json={"prompt": "a"})
            piece = server.http.post("/translate", json={"q": "a", "target": "fr"})
            assert refused.status_code == piece.status_code == 429
        expected = [ENGLISH + CATS, ENGLISH + "We eat.", "fix grammar: She have two cat."]
        assert lines(path) == [*expected, "fix grammar: He go."]
        asked(server, q=["A é.", "B.", "C."])
        assert lines(path)[4:] == [ENGLISH + "A é."], "five lines at most"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_file_of_prompts_is_continued(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    SavedPrompts(str(path), 9).add(["b", "c", "c"])
    assert lines(path) == ["a", "b", "c"]
    SavedPrompts(str(path), 1).add(["d", "e", "f", "g"])
    assert lines(path) == ["a", "b", "c"], "a lower limit adds nothing"
    path.write_text('{"text": "a"}\n')
    for wrong in (path, tmp_path, tmp_path / "none" / "file"):
        with pytest.raises(UserError, match="--save-prompts: "):
            SavedPrompts(str(wrong), 9)


def test_a_half_line_at_the_end_is_removed_and_a_foreign_one_is_not(tmp_path, caplog):
    path, whole = tmp_path / "prompts.jsonl", b'{"prompt": "a"}\n'
    line = '{"prompt": "b \\"}é"}\n'.encode()
    for cut in range(1, len(line) - 1):
        path.write_bytes(whole + line[:cut])
        caplog.clear()
        SavedPrompts(str(path), 9).add(["a", "c"])
        assert lines(path) == ["a", "c"]
        (record,) = caplog.records
        assert "the half line at the end of" in record.getMessage()
    for foreign in (b"my notes", b"{'a'"):
        path.write_bytes(foreign)
        with pytest.raises(UserError, match="has other lines"):
            SavedPrompts(str(path), 9)
        assert path.read_bytes() == foreign


def test_a_full_disk_leaves_no_half_line(tmp_path, caplog):
    path = tmp_path / "prompts.jsonl"
    saved = SavedPrompts(str(path), 9)
    saved.add(["a"])
    write = saved.file.write

    class Small:
        """A disk with room for 20 more bytes."""

        room = 20

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.room -= (written := write(data[: self.room]))
            return written

        def __getattr__(self, name):
            return getattr(file, name)

    file, saved.file = saved.file, Small()
    saved.add(["b", "c"])
    saved.add(["d"])
    assert lines(path) == ["a"]
    (record,) = caplog.records
    assert "No space left on device; no more prompts are saved" in record.getMessage()


@pytest.fixture(scope="module")
def decoder():
    model, tokenizer = load("demo/target", "float32")
    return SpeculativeDecoder(model, load("demo/draft", "float32")[0], tokenizer, 5)


@pytest.fixture(scope="module")
def server(decoder):
    with LocalServer(decoder, "demo") as server:
        yield server
