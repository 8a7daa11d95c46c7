"""The page in headless Chromium: what a user sees, by keyboard and on a phone.

PAGE_SCREENSHOT=serving/page/screenshot.png takes the README's picture anew.
"""

import json
import os
import re
import shutil

import pytest

from serving_process import Server

FIX = "fix grammar: My sisters wants to buy some tools including saws, hmamers, and brushes."
FIXED = "My sisters want to buy some tools including saws, hammers, and brushes."
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
PHONE = {"width": 375, "height": 700}


@pytest.fixture(scope="module")
def browser():
    """A Chromium that is installed already; nothing is downloaded."""
    if CHROMIUM is None:
        pytest.skip("no Chromium found: apt install chromium, or set CHROMIUM to its path")
    sync_api = pytest.importorskip("playwright.sync_api", exc_type=ImportError)
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    """`visit(server, **options)`: the page, which may raise no error and load nothing foreign."""
    contexts, problems = [], []

    def start(server, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        # What is left behind when a page is left is no failure.
        page.on("requestfailed", lambda r: "ABORTED" in r.failure or problems.append(r.url))
        page.on("request", lambda r: r.url.startswith(server.url) or problems.append(r.url))
        page.goto(server.url)
        page.locator("#presets button").first.wait_for()
        return page

    yield start
    for context in contexts:
        context.close()
    assert problems == []


def finished(page):
    """Waits for both texts; returns the verdict."""
    page.locator("#verdict", has_text="passes").wait_for()
    return page.inner_text("#verdict")


def figure(page, panel, name):
    return float(page.inner_text(f"#{panel} [data-figure={name}]"))


def written(page, panel):
    """The tokens of a text: what they say and who wrote them."""
    tokens = page.locator(f"#{panel} .token").all()
    return [(t.inner_text(), t.get_attribute("class").split()[1]) for t in tokens]


def test_who_wrote_each_token_beside_regular_decoding(visit, server, decoder, tmp_path):
    page = visit(server, viewport={"width": 1040, "height": 900})
    page.get_by_role("button", name="Fix grammar").click()
    assert page.input_value("#prompt") == FIX
    page.get_by_role("button", name=re.compile("^Run")).click()
    verdict = finished(page)
    assert "The same text." in verdict
    result = decoder.generate(FIX)
    for panel in ("speculative", "regular"):
        assert page.inner_text(f"#{panel} .text") == FIXED
    # Every token is marked, but for those that are a space alone.
    shown = [writer for _, writer in written(page, "speculative")]
    spaces = [i for i, t in enumerate(result.tokens) if not decoder.tokenizer.decode([t]).strip()]
    assert shown == [w for i, w in enumerate(result.writers) if i not in spaces]
    assert set(shown) == {"draft", "copy", "target"}
    assert {writer for _, writer in written(page, "regular")} == {"target"}
    assert figure(page, "speculative", "perCall") == round(result.stats.tokens_per_call, 2)
    assert figure(page, "speculative", "calls") == result.stats.target_calls
    assert page.locator("#speculative .pass").count() == result.stats.target_calls
    assert figure(page, "regular", "perCall") == 1
    for writer in ("draft", "copy", "target"):
        assert page.inner_text(f"#count-{writer}") == str(result.writers.count(writer))
    assert page.locator("#bar-calls-s").evaluate("m => m.value") == result.stats.target_calls
    picture = os.environ.get("PAGE_SCREENSHOT") or tmp_path / "page.png"
    page.screenshot(path=picture, full_page=True)
    assert os.path.getsize(picture) > 20_000


def test_the_sliders_reach_the_decoder(visit, server):
    page = visit(server)
    page.fill("#prompt", FIX)
    page.uncheck("#compare")
    with page.expect_request("**/v1/completions") as request:
        page.locator("#num-draft").fill("3")
        page.locator("#delta").fill("0.25")
        page.click("#run")
    sent = request.value.post_data_json
    assert (sent["num_draft"], sent["delta"], sent["prompt"]) == (3, 0.25, FIX)
    assert page.inner_text("#num-draft-value") == "3"
    page.locator("#status", has_text="Done").wait_for(state="attached")
    with page.expect_request("**/v1/completions") as request:
        page.check("#auto")
        page.click("#run")
    assert request.value.post_data_json["num_draft"] == "auto"
    assert page.locator("#num-draft").is_disabled()
    page.locator("#status", has_text="Done").wait_for(state="attached")


def test_by_keyboard_alone(visit, server):
    page = visit(server)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the output"
    for _ in range(20):
        if page.evaluate("document.activeElement.id") == "prompt":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Control+a")
    page.keyboard.type(FIX)
    page.keyboard.press("Control+Enter")
    finished(page)
    assert FIXED in page.inner_text("#speculative .text")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "num-draft"
    before = page.input_value("#num-draft")
    page.keyboard.press("ArrowRight")
    assert int(page.input_value("#num-draft")) == int(before) + 1
    assert "tokens per target call" in page.inner_text("#status"), "a screen reader is told"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_sticks_out_and_both_schemes_can_be_read(visit, server, scheme):
    page = visit(server, viewport=PHONE, color_scheme=scheme, has_touch=True, is_mobile=True)
    page.get_by_role("button", name="Fix grammar").tap()
    page.tap("#run")
    finished(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    for selector in ("body", ".token.draft", ".token.copy", ".token.target", "#run", "footer p"):
        ink, ground = page.locator(selector).first.evaluate(
            """e => {
              let ground = e;
              while (/, 0\\)|transparent/.test(getComputedStyle(ground).backgroundColor))
                ground = ground.parentElement;
              return [getComputedStyle(e).color, getComputedStyle(ground).backgroundColor];
            }"""
        )
        assert contrast(ink, ground) >= 4.5, (selector, ink, ground)
    lines = {
        page.locator(f".token.{w}").first.evaluate("e => getComputedStyle(e).borderBottomStyle")
        for w in ("draft", "copy", "target")
    }
    assert len(lines) == 3, "not by colour alone"


def test_on_a_phone_bars_do_not_cover_their_labels(visit, server):
    narrow = {"width": 390, "height": 844}
    page = visit(server, viewport=narrow, has_touch=True, is_mobile=True)
    page.get_by_role("button", name="Fix grammar").tap()
    page.tap("#run")
    finished(page)
    labels, bars = page.locator(".bars div > span"), page.locator(".bars div > meter")
    assert labels.count() == bars.count() == 4
    for label, bar in zip(labels.all(), bars.all(), strict=True):
        box, below = label.bounding_box(), bar.bounding_box()
        assert box["y"] + box["height"] <= below["y"]
    # A browser may paint a bar outside of its box; so labels have to look the same without any.
    with_bars = [label.screenshot() for label in labels.all()]
    bars.evaluate_all("all => all.forEach(bar => (bar.style.visibility = 'hidden'))")
    assert with_bars == [label.screenshot() for label in labels.all()]


def contrast(first, second):
    """Contrast ratio by WCAG 2 of two colours, each `rgb(r, g, b)`."""

    def luminance(colour):
        values = [int(v) / 255 for v in re.findall(r"\d+", colour)[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted(map(luminance, (first, second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_is_never_taken_for_html(visit, server):
    page = visit(server)
    bold = "<b id=injected>bold</b>"
    tokens = [{"text": " " + bold, "writer": "draft"}]
    stats = dict.fromkeys(
        ("tokens_per_call", "target_calls", "generated_tokens", "encode_seconds"), 1
    )
    stats |= {"decode_seconds": 1, "drafted": 1, "acceptance_rate": 1}
    choice = {"index": 0, "text": bold, "speculation": {"tokens": tokens, "stats": stats}}
    body = f'data: {{"choices": [{json.dumps(choice)}]}}\n\ndata: [DONE]\n\n'
    page.route(
        "**/v1/completions", lambda r: r.fulfill(body=body, content_type="text/event-stream")
    )
    page.click("#run")
    finished(page)
    assert bold in page.inner_text("#speculative .text")
    assert page.locator("#injected").count() == 0


def test_only_its_own_scripts_run(server):
    policy = server.http.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy
    sources = re.findall(r'(?:src|href)="([^"]+)"', server.http.get("/").text)
    assert sources and not [source for source in sources if not re.match(r"[/#]", source)]
    for source in sources:
        if source[0] == "/":
            assert server.http.get(source).status_code == 200, source


def test_the_documentation_loads_nothing_foreign_either(browser, visit, server):
    page = visit(server)
    page.goto(server.url + "/docs")
    page.get_by_text("/v1/chat/completions").first.wait_for()


def test_a_replay_waits_until_both_texts_are_there(visit, server):
    page = visit(server)
    page.evaluate(
        """() => {
          const replay = document.getElementById("replay");
          window.early = [];
          new MutationObserver(() => {
            if (!document.getElementById("stop").disabled) window.early.push(replay.disabled);
          }).observe(document.getElementById("regular"), { childList: true, subtree: true });
        }"""
    )
    page.fill("#prompt", FIX)
    page.click("#run")
    finished(page)
    early = page.evaluate("window.early")
    assert early and all(early)
    assert page.locator("#replay").is_enabled()


def test_a_replay_shows_the_same_again(visit, server):
    page = visit(server)
    page.fill("#prompt", FIX)
    page.click("#run")
    finished(page)
    page.click("#replay")
    assert page.inner_text("#regular .text") != FIXED, "it begins anew"
    page.locator("#speculative .text", has_text=FIXED).wait_for()
    assert page.locator("#regular .pass").count() < 20, "and regular decoding is behind"


def test_errors_keys_and_a_server_without_a_draft(visit):
    limits = ["--max-prompt-tokens", "20", "--draft-model", "none"]
    guarded = Server(*limits, "--api-key", "the key", key="the key")
    try:
        page = visit(guarded)
        page.fill("#key", "another key")
        page.keyboard.press("Enter")
        page.locator("#key-note", has_text="not accepted").wait_for()
        page.fill("#key", "the key")
        page.keyboard.press("Enter")
        page.locator("#model", has_text="demo").wait_for()
        page.fill("#prompt", "fix grammar: " + "many words " * 20)
        page.click("#run")
        page.locator("#error", has_text="at most 20").wait_for()
        page.fill("#prompt", "fix grammar: She have two cat.")
        page.click("#run")
        finished(page)
        assert page.inner_text("#speculative .text") == "She has two cats."
        assert page.locator("#num-draft").is_disabled() and page.locator("#delta").is_disabled()
        assert not page.locator("#error").is_visible()
    finally:
        guarded.close()
