"""Tests the page's view of documents in headless Chromium: input, results and download."""

import json
from pathlib import Path

import pytest

from fake_serving import PHONE
from mlx_t5.serving.responses import TextStats
from mlx_t5.settings import UNREADABLE

pytestmark = pytest.mark.slow  # starts a browser
TEXT = "I open a lot of bags.  It is going to rain.\n\nAlice can buy pencils. 🐧 No.\n"
PREFIX = "translate English to French:"
SUBTITLES = (
    "\ufeff1\r\n00:00:01,000 --> 00:00:02,500\r\nI can park\r\nthe old car.\r\n\r\n"
    "2\r\n00:00:03,000 --> 00:00:04,000\r\n<i>I have two cats.</i>\r\n"
)
NARROW = PHONE | {"viewport": {"width": 390, "height": 844}}


@pytest.fixture
def view(visit, server):
    """Returns `view(**options)`, which opens the page and shows its view of documents."""

    def start(**options):
        page = visit(server, **options)
        page.get_by_role("link", name="Document").click()
        page.locator("#document-form").wait_for()
        return page

    return start


def drop(page, name, content, times=1):
    """Drops a file on the page."""
    page.evaluate(
        """([name, bytes, times]) => {
          const data = new DataTransfer();
          data.items.add(new File(Array(times).fill(new Uint8Array(bytes)), name));
          const options = { dataTransfer: data, bubbles: true, cancelable: true };
          const event = (kind) => new DragEvent(kind, options);
          const over = event("dragover");
          document.body.dispatchEvent(over);
          window.taken = over.defaultPrevented;
          document.body.dispatchEvent(event("drop"));
        }""",
        [name, list(content), times],
    )
    assert page.evaluate("window.taken"), "or the browser leaves the page"


def done(page, count):
    page.locator("#status", has_text=f"Done: {count} of {count}").wait_for(state="attached")


def downloaded(page):
    """Downloads the answer; returns its file name and bytes."""
    with page.expect_download() as download:
        page.click("#download")
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def pieces(page):
    """Returns the source and the answer of each row."""
    rows = page.locator("#pieces li").all()
    return [tuple(row.locator("p").all_text_contents()) for row in rows]


def test_a_document_is_answered_piece_by_piece(view, decoder):
    page = view(accept_downloads=True, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="fix grammar:").click()
    page.get_by_role("button", name=PREFIX).click()
    assert page.input_value("#prefix") == PREFIX
    page.fill("#document-text", TEXT)
    page.keyboard.press("Control+Enter")
    done(page, 4)
    expected = decoder.generate(TEXT, split="sentences", prefix=PREFIX + " ")
    sources = [TEXT[piece.start : piece.end] for piece in expected.pieces]
    answers = [piece.text for piece in expected.pieces]
    assert pieces(page) == list(zip(sources, answers, strict=True))
    for origin in ("draft", "copy", "target"):
        count = expected.origins.count(origin)
        assert page.inner_text(f"#document-output [data-origin={origin}]") == str(count or "")
    bar = page.locator("#document-progress")
    assert bar.evaluate("b => [b.value, b.max]") == [4, 4]
    assert page.inner_text("#document-count") == "4 of 4 sentences"
    assert downloaded(page) == ("document-answer.txt", expected.text.encode())
    page.click("#copy")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.text_content("#joined") == expected.text


def test_a_sentence_that_loops_is_decoded_in_smaller_parts(view):
    page = view()
    page.fill("#document-text", "Their mother's goat is never next to his chair. I have two cats.")
    page.click("#document-form button[type=submit]")
    done(page, 2)
    assert page.inner_text("#document-count") == "2 of 2 sentences, 1 looped"
    assert len(page.inner_text("#joined")) < 120


def test_the_answer_is_scrolled_into_sight_and_stays_there(view):
    page = view(viewport={"width": 1280, "height": 850})
    page.fill("#document-text", TEXT * 30)
    page.click("#document-form button[type=submit]")
    done(page, 120)
    box = page.locator("#joined").bounding_box()
    assert box["y"] >= 0 and box["y"] + box["height"] <= 850


def test_a_dropped_file_comes_back_to_the_byte_where_the_model_changes_nothing(view):
    page = view(accept_downloads=True)
    drop(page, "My talk.SRT", SUBTITLES.encode())
    page.locator("#document-note", has_text="My talk.SRT").wait_for()
    assert page.input_value("#file-type") == ".srt"
    page.fill("#prefix", "fix grammar:")
    page.click("#document-form button[type=submit]")
    done(page, 2)
    assert [answer for _, answer in pieces(page)] == ["I can park the old car.", "I have two cats."]
    assert downloaded(page) == ("My talk-answer.SRT", SUBTITLES.encode())
    page.locator("#document-text").press("End")
    page.keyboard.type(" ")
    assert "My talk.SRT" in page.inner_text("#document-note"), "an edited one"
    page.fill("#document-text", "Another text.")
    assert "My talk.SRT" not in page.inner_text("#document-note")


def test_a_text_file_is_opened_and_other_files_are_refused(view):
    page = view()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Open a file").click()
    text = {"name": "a.vtt", "mimeType": "text/vtt", "buffer": b"WEBVTT\n\n"}
    chooser.value.set_files(text)
    page.locator("#document-note", has_text="a.vtt, 8 characters").wait_for()
    assert page.input_value("#file-type") == ".vtt"
    for encoding in "utf-16-le", "utf-16-be":
        drop(page, f"{encoding}.log", "\ufeffI has a größer cat. 🐧\n".encode(encoding))
        page.locator("#document-note", has_text=f"{encoding}.log, 24 characters").wait_for()
        assert page.input_value("#document-text") == "\ufeffI has a größer cat. 🐧\n"
        assert page.input_value("#file-type") == ".txt"
    for name, content, times, message in (
        *((f"A{suffix.upper()}", b"a", 1, f"A{suffix.upper()} cannot") for suffix in UNREADABLE),
        ("b.txt", b"caf\xe9", 1, "b.txt is no text in UTF-8"),
        ("c.txt", b'"' * 1024, 600, "c.txt has more than 1 MiB"),  # as JSON
    ):
        drop(page, name, content, times)
        page.locator("#document-error", has_text=message).wait_for()
    assert "größer" in page.input_value("#document-text"), "the last one stays"


def test_stopping_keeps_the_finished_pieces(view, server):
    page = view(accept_downloads=True)
    page.fill("#document-text", "I have two cats. She has a dog.\n" * 1000)
    page.fill("#prefix", "fix grammar:")
    page.click("#document-form button[type=submit]")
    page.locator("#pieces li").nth(3).wait_for()
    assert page.locator("#download").is_disabled() and page.locator("#document-stop").is_enabled()
    page.keyboard.press("Escape")
    page.locator("#status", has_text="Stopped").wait_for(state="attached")
    server.until(server.idle)
    count = page.locator("#pieces li").count()
    assert count < 2000 and page.inner_text("#document-count") == f"{count} of 2000 sentences"
    name, content = downloaded(page)
    assert name == "document-answer-part.txt"
    assert content.decode().startswith("I have two cats. She has a dog.\nI have")


def events(count, failed=(), long=0, looped=()):
    """Yields the stream of a text of `count` pieces, each `a b`; the answers look like HTML."""
    bold = "<b id=injected>x</b>"
    stats = dict.fromkeys(TextStats.model_fields, 1)
    tokens = [{"text": bold, "origin": "draft"}]
    for i in range(count):
        piece = {"start": 4 * i, "end": 4 * i + 3, "text": bold, "finish_reason": "stop"}
        if i in failed:
            piece |= {"finish_reason": "error", "error": bold, "text": "a b"}
        elif i in looped:
            piece["looped"] = True
        else:
            piece["speculation"] = {"tokens": tokens, "stats": stats}
        totals = {"pieces": count, "cut": 0, "failed": sum(n <= i for n in failed), "kept": 0}
        totals["length"] = long
        totals["looped"] = sum(n <= i for n in looped)
        choice = {"delta": {"content": piece["text"] + "\n"}, "pieces": [piece], "stats": totals}
        yield f"data: {json.dumps({'choices': [choice]})}\n\n"


def answered(page, *stream):
    answer = {"body": "".join(stream), "content_type": "text/event-stream"}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    page.click("#document-form button[type=submit]")


def test_failed_pieces_are_marked_and_nothing_is_html_on_a_phone(view):
    page = view(**NARROW)
    page.fill("#document-text", "a b\n" * 3 + "🐧" * 400)
    answered(page, *events(3, failed=[1], long=2, looped=[2]))
    done(page, 3)
    counts = "3 of 3 sentences, 1 left as they were, 2 cut off, 1 looped"
    assert page.inner_text("#document-count") == counts
    assert "It ran into a loop" in page.locator("#pieces li").nth(2).inner_text()
    row = page.locator("#pieces li.failed")
    assert row.count() == 1 and row.locator("p").all_text_contents() == ["a b", "a b"]
    assert row.locator("small").text_content() == "Left as it was: <b id=injected>x</b>"
    assert page.locator("#injected").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_piece_that_was_kept_shows_its_source(view):
    page = view()
    source = "See https://example.org/x now."
    page.fill("#document-text", f"I have two cats. {source}")
    page.fill("#prefix", PREFIX)
    page.click("#document-form button[type=submit]")
    done(page, 2)
    assert page.inner_text("#document-count") == "2 of 2 sentences, 1 left as they were"
    row = page.locator("#pieces li").nth(1)
    assert row.locator("p").all_text_contents() == [source, source]
    assert "lacked a URL" in row.locator("small").text_content()


def test_the_page_shows_thousands_of_pieces_and_survives_a_broken_stream(view):
    page = view()
    drop(page, "long.txt", b"a b\n", 5000)
    page.locator("#document-note", has_text="long.txt, 20000 characters").wait_for()
    *almost, _ = events(5000)
    answered(page, *almost, 'data: {"error": {"message": "the server is shutting down"}}\n\n')
    page.locator("#document-error", has_text="shutting down").wait_for()
    page.locator("#document-count", has_text="4999 of 5000").wait_for()
    assert page.locator("#pieces li").last.get_attribute("data-number") == "4999"
    page.locator("#download:enabled").wait_for()  # the finished pieces can be kept
