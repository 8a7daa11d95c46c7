"""Tests the page in headless Chromium: what a user sees, by keyboard and on a phone.

PAGE_SCREENSHOT=mlx_t5/serving/page/screenshot.png takes the README's picture again.
"""

import json
import os
import re

import pytest

import ranking_models
from fake_serving import PHONE
from mlx_t5.serving.responses import TextStats
from serving_process import Server

pytestmark = pytest.mark.slow  # starts a browser
FIXED = "My sisters want to buy some tools including saws, hammers, and brushes."
TASKS = {"shorten": {"prefix": "shorten: ", "num_beams": 3, "length_penalty": 2.0, "max_length": 6}}
TASKS |= {"translate": {"prefix": "translate English to German: "}}
FIX = "fix grammar: My sisters wants to buy some tools including saws, hmamers, and brushes."


def finished(page):
    """Waits for both texts; returns the line that compares them."""
    page.locator("#verdict", has_text="passes").wait_for()
    return page.inner_text("#verdict")


def run(page, prompt=FIX):
    """Decodes a prompt with and without drafts; returns the comparing line."""
    page.fill("#prompt", prompt)
    page.click("#run")
    return finished(page)


def fits(page):
    """Returns whether the page is no wider than a phone's screen."""
    return page.evaluate("document.documentElement.scrollWidth") <= PHONE["viewport"]["width"]


def figure(page, panel, name):
    return float(page.inner_text(f"#{panel} [data-figure={name}]"))


def origins(page, panel):
    """Returns the origin of each token of a text."""
    tokens = page.locator(f"#{panel} .token").all()
    return [token.get_attribute("class").split()[1] for token in tokens]


@pytest.fixture(scope="module")
def ranker(browser, tmp_path_factory):
    """Starts a server of a model that has tasks and can rank."""
    folder = tmp_path_factory.mktemp("models") / "ranker"
    ranking_models.save(folder, task_specific_params=TASKS)
    running = Server("--model", str(folder), "--draft-model", "none", "--dtype", "float32")
    yield running
    running.close()


def test_the_page_shows_each_tokens_origin_beside_regular_decoding(visit, server, decoder):
    page = visit(server, viewport={"width": 1040, "height": 900})
    page.get_by_role("button", name="Fix grammar").click()
    assert page.input_value("#prompt") == FIX
    page.get_by_role("button", name=re.compile("^Run")).click()
    assert "The same text." in finished(page)
    result = decoder.generate(FIX)
    for panel in ("speculative", "regular"):
        assert page.inner_text(f"#{panel} .text") == FIXED
    # Every token is marked, except tokens that are a space alone.
    shown = origins(page, "speculative")
    spaces = [i for i, t in enumerate(result.tokens) if not decoder.tokenizer.decode([t]).strip()]
    assert shown == [w for i, w in enumerate(result.origins) if i not in spaces]
    assert set(shown) == {"draft", "copy", "target"}
    assert set(origins(page, "regular")) == {"target"}
    assert figure(page, "speculative", "perCall") == round(result.stats.tokens_per_call, 2)
    assert figure(page, "speculative", "calls") == result.stats.target_calls
    assert page.locator("#speculative .pass").count() == result.stats.target_calls
    assert figure(page, "regular", "perCall") == 1
    for origin in ("draft", "copy", "target"):
        assert page.inner_text(f"#count-{origin}") == str(result.origins.count(origin))
    assert page.locator("#bar-calls-s").evaluate("m => m.value") == result.stats.target_calls
    if picture := os.environ.get("PAGE_SCREENSHOT"):
        page.screenshot(path=picture, full_page=True)


def test_the_sliders_reach_the_decoder(visit, server):
    page = visit(server)
    page.fill("#prompt", FIX)
    page.uncheck("#compare")
    page.locator("#num-draft").fill("3")
    page.locator("#delta").fill("0.25")
    for auto, expected in ((False, 3), (True, "auto")):
        page.set_checked("#auto", auto)
        with page.expect_request("**/v1/completions") as request:
            page.click("#run")
        sent = request.value.post_data_json
        assert (sent["num_draft"], sent["delta"], sent["prompt"]) == (expected, 0.25, FIX)
        assert page.locator("#num-draft").is_disabled() == auto
    assert not page.get_by_text("The two runs follow each other").is_visible()


def test_the_page_says_that_nothing_was_proposed(visit, server):
    page = visit(server)
    page.route("**/v1/completions", lambda route: route.continue_(post_data=without_draft(route)))
    assert run(page).startswith("Nothing was proposed, so the large model made as many passes")


def test_runs_that_are_short_are_timed_several_times_and_compared_exactly(visit, server):
    page = visit(server)
    times = {True: [0.9, 0.004, 0.004, 0.004, 0.001], False: [0.012, 0.03, 0.012, 0.001, 0.012]}

    def answer(route):
        body = route.request.post_data_json
        taken = {"encode_seconds": 0, "decode_seconds": times[body.get("draft", True)].pop(0)}
        stats = dict.fromkeys(TextStats.model_fields, 1) | taken
        tokens = [{"text": "She", "origin": "draft"}]
        choice = {"index": 0, "text": "She", "speculation": {"tokens": tokens, "stats": stats}}
        events = f'data: {{"choices": [{json.dumps(choice)}]}}\n\ndata: [DONE]\n\n'
        route.fulfill(body=events, content_type="text/event-stream")

    page.route("**/v1/completions", answer)
    assert "3.0× the speed (medians of 5 runs)" in run(page)
    assert page.inner_text("#seconds-r") == "0.012 s regular"
    assert figure(page, "speculative", "seconds") == 0.004


def test_a_request_that_waits_says_so(visit, server):
    page, held = visit(server), []
    busy = {"status": "ok", "running": 8, "waiting": 3}
    page.route("**/health", lambda route: route.fulfill(json=busy))
    page.route("**/v1/completions", lambda route: held.append(route))
    page.click("#run")
    page.locator("#waiting", has_text="being decoded: 8, in the queue: 3").wait_for()
    for route in held:
        route.continue_()
    page.unroute("**/v1/completions")
    page.locator("#waiting").wait_for(state="hidden")
    assert "The same text." in finished(page)


def without_draft(route):
    return json.dumps(route.request.post_data_json | {"draft": False})


def test_the_page_works_by_keyboard_alone(visit, server):
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
    assert "tokens per target call" in page.inner_text("#status"), "a screen reader is told"


def test_the_answer_is_in_sight_on_a_laptop(visit, server):
    page = visit(server, viewport={"width": 1280, "height": 850})
    page.click("#run")  # of the example that is there
    finished(page)
    for panel in ("speculative", "regular"):
        box = page.locator(f"#{panel} .text").bounding_box()
        assert page.inner_text(f"#{panel} .text").startswith("Allons au magasin")
        assert box["y"] + box["height"] <= 850 and page.evaluate("scrollY") == 0


def test_a_text_that_is_cut_off_says_so(visit, server):
    page = visit(server)

    def shorter(route):
        body = json.loads(route.request.post_data) | {"max_tokens": 4}
        route.continue_(post_data=json.dumps(body))

    tokens = page.locator("#speculative [data-figure=tokens]")
    run(page)
    assert tokens.text_content().isdigit()
    page.route("**/v1/completions", shorter)
    run(page)
    assert tokens.text_content() == "4, then cut off"


def test_on_a_phone_nothing_sticks_out(visit, server):
    page = visit(server, **PHONE)
    page.get_by_role("button", name="Fix grammar").tap()
    page.tap("#run")
    finished(page)
    assert fits(page)
    page.evaluate("scrollTo(0, 0)")
    page.press("#prompt", "Control+Enter")
    finished(page)
    box = page.locator("#speculative .text").bounding_box()
    assert 0 <= box["y"] < PHONE["viewport"]["height"] - box["height"], "the answer is in sight"


def test_only_its_own_scripts_run(visit, server):
    policy = server.http.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy
    page = visit(server)  # checks that nothing foreign is loaded
    page.goto(server.url + "/docs")
    page.get_by_text("/v1/chat/completions").first.wait_for()


def test_a_replay_shows_both_texts_again(visit, server):
    page = visit(server)
    run(page)
    page.click("#replay")
    assert page.inner_text("#regular .text") != FIXED, "it begins anew"
    page.locator("#speculative .text", has_text=FIXED).wait_for()
    assert page.locator("#regular .pass").count() < 20, "and regular decoding is behind"


def test_the_page_handles_errors_keys_and_a_missing_draft(visit):
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
        assert page.get_by_role("link", name="Metrics").count() == 0, "it would send no key"
        for prompt, message in (("many words " * 20, "at most 20"), ('"' * 600_000, "1 MiB")):
            page.fill("#prompt", "fix grammar: " + prompt)
            page.click("#run")
            page.locator("#error", has_text=message).wait_for()
        run(page, "fix grammar: She have two cat.")
        assert page.inner_text("#speculative .text") == "She has two cats."
        assert page.locator("#num-draft").is_disabled() and page.locator("#delta").is_disabled()
        assert not page.locator("#error").is_visible()
    finally:
        guarded.close()


# ---- beams, tasks, scores and vectors ------------------------------------------------------------


def test_beams_show_their_texts_with_scores(visit, server, decoder):
    page = visit(server, **PHONE)
    page.fill("#prompt", FIX)
    page.click("summary")
    page.locator("#num-beams").fill("4")
    page.locator("#texts").fill("2")
    assert page.inner_text("#search-summary") == "4 beams"
    for control in ("#num-draft", "#auto", "#delta", "#compare"):
        assert page.locator(control).is_disabled()
    page.click("#run")
    page.locator("#search-texts li").first.wait_for()
    expected = decoder.generate(FIX, num_beams=4, num_return_sequences=2)
    assert page.locator("#search-texts .text").all_inner_texts() == [r.text for r in expected]
    scores = page.locator("#search-texts .score").all_inner_texts()
    values = [float(score.removeprefix("score ").replace("−", "-")) for score in scores]
    assert values == pytest.approx([r.score for r in expected], abs=6e-4)
    assert page.locator("#panels").is_hidden()
    assert fits(page)
    page.locator("#num-beams").fill("1")
    run(page)
    assert page.inner_text("#speculative .text") == FIXED and page.locator("#search").is_hidden()


def test_a_chosen_task_replaces_the_prompts_prefix(visit, ranker):
    page = visit(ranker)
    assert page.input_value("#prompt").startswith("translate English to German: The house")
    page.select_option("#task", "shorten")
    page.get_by_role("link", name="Document").click()
    page.locator("#document-form").wait_for()
    assert page.input_value("#prefix") == "shorten:", "as chosen for a single prompt"
    page.get_by_role("link", name="Write").click()
    assert "shorten: " in page.inner_text("#task-note")
    assert page.input_value("#prompt").startswith("The house")
    assert "the model's files ask for 3 beams" in page.inner_text("header")
    assert page.inner_text("#search-summary") == "off", "it is the user who searches"
    with page.expect_request("**/v1/completions") as request:
        page.click("#run")
    sent = request.value.post_data_json
    assert (sent["task"], sent["num_beams"]) == ("shorten", 1)
    page.get_by_role("button", name="Summarize").click()
    assert page.input_value("#task") == "", "an example says itself what is to be done"


def test_the_page_shows_scores_ranks_and_similarities(visit, ranker):
    page = visit(ranker, **PHONE)
    bold = "<b id=injected>x</b>"
    page.get_by_role("link", name="Score").click()
    page.fill("#score-prompt", "a tale")
    page.fill("#score-targets", f"mouse\n\n{bold}\ncat")
    page.keyboard.press("Control+Enter")
    page.locator("#scores strong").wait_for()
    body = {"prompt": "a tale", "targets": ["mouse", bold, "cat"]}
    data = ranker.http.post("/v1/score", json=body).json()["data"]
    for item, entry in zip(page.locator("#scores li").all(), data, strict=True):
        shown = [float(n.replace("−", "-")) for n in item.locator("small").all_inner_texts()]
        assert shown == pytest.approx(entry["token_logprobs"], abs=6e-3)
        best = entry["logprob"] == max(score["logprob"] for score in data)
        assert item.locator("strong").count() == best
    assert page.locator("#injected").count() == 0

    page.get_by_role("link", name="Rank").click()
    page.locator("#rerank-form button").click()
    page.locator("#ranks li").first.wait_for()
    documents = page.input_value("#documents").splitlines()
    body = {"query": page.input_value("#query"), "documents": documents}
    results = ranker.http.post("/v1/rerank", json=body).json()["results"]
    shown = page.locator("#ranks .text").all_inner_texts()
    assert shown == [documents[result["index"]] for result in results]

    page.get_by_role("link", name="Embed").click()
    page.fill("#inputs", "only one")
    page.locator("#embeddings-form button").click()
    page.locator("#embeddings-form .error", has_text="at least two").wait_for()
    page.fill("#inputs", "a cat\na dog\na cat")
    page.locator("#embeddings-form button").click()
    page.locator("#similarities tr").first.wait_for()
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#similarities tr").all()]
    assert rows[1][0] == rows[1][2] == rows[3][0] == "1.00" and rows[1] == rows[3]
    assert float(rows[1][1].replace("−", "-")) < 1
    assert fits(page)


def test_only_what_the_model_can_do_is_offered(visit, server, ranker):
    page = visit(server)
    links = [page.get_by_role("link", name=name).count() for name in ("Rank", "Metrics")]
    assert links == [0, 1]
    page = visit(ranker)
    served = ranker.http.get("/v1/models").json()
    served["data"][0]["capabilities"] = ["embeddings"]
    page.route("**/v1/models", lambda r: r.fulfill(json=served))
    page.reload()
    page.locator("#view-embeddings").wait_for()
    assert page.locator("#views").is_hidden() and page.locator("#form").is_hidden()
