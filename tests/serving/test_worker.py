"""Tests the thread that owns MLX, on models whose cache is the list of their tokens."""

import pytest

from fake_model import FakeModel, drafter, good, random_table
from fake_serving import ENDLESS, PATIENCE, Gated, V, hold, until
from mlx_t5.backend import cpu_only
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.drafting.source_copy import SourceCopy
from mlx_t5.engine.generation_request import GenerationRequest
from mlx_t5.errors import UserError
from mlx_t5.network.compiled import PASSES_BEFORE_COMPILING
from mlx_t5.serving import worker as worker_module
from mlx_t5.serving.api_error import ApiError
from mlx_t5.serving.metrics import Metrics
from mlx_t5.serving.requests import MAX_BEAMS, MAX_NUM_DRAFT
from mlx_t5.serving.worker import Worker, warm_up
from mlx_t5.settings import AUTO
from mlx_t5.text.prompts import Prompt


def test_a_row_with_logits_that_are_not_finite_fails_only_its_job(serve):
    def table(source, seen):
        return ENDLESS(source, seen) * (float("nan") if source[0] == 5 and len(seen) > 3 else 1)

    served = serve(FakeModel(table, V))
    bad = served.submit([[5]], max_tokens=9, num_draft=0)
    fine = served.submit([[4]], max_tokens=9, num_draft=0)
    failure = bad.next()
    assert failure.status == 500
    assert "after 3 tokens are NaN" in str(failure)
    assert len(fine.results()[0].tokens) == 9


def copied(result):
    return result.stats.speculation.copied


def test_jobs_with_different_settings_share_a_batch_and_write_what_they_write_alone(serve):
    model = Gated(random_table(V, eos_bias=-1.0), V)
    served = serve(model)
    requests = [
        {"max_tokens": 9},
        {"max_tokens": 20, "temp": 1.0, "seed": 3, "delta": 0.3, "num_draft": 2},
        {"max_tokens": 14, "num_draft": 0},
        {"max_tokens": 12, "temp": 0.7, "top_p": 0.8, "seed": 4, "samples": 2},
        {"max_tokens": 12, "temp": 0.7, "seed": 5},
    ]
    prompts = [*map(Prompt, ([2, 3], [4], [5, 6, 2, 2], [3, 3, 3]))]
    prompts.append(Prompt([4, 5], prediction=[4, 2, 5, 2, 3]))
    hold(model)
    clients = [served.submit([p], **w) for p, w in zip(prompts, requests, strict=True)]
    served.release()
    results = [c.results() for c in clients]
    assert max(len(tokens) for _, tokens in model.calls) == 4
    for prompt, options, together in zip(prompts, requests, results, strict=True):
        options = dict(options)
        settings = {n: options.pop(n) for n in ("delta", "num_draft") if n in options}
        alone = SpeculativeDecoder(model, drafter(good(model.table), model), None, 5).generate(
            [prompt.source],
            num_samples=options.pop("samples", 1),
            prediction=prompt.prediction and [prompt.prediction],
            **options,
            **settings,
        )
        assert [r.tokens for r in alone] == [r.tokens for r in together]
        assert [copied(r) for r in alone] == [copied(r) for r in together]
    assert copied(together[0]) > 0, "of its prediction"


def test_a_sampled_request_that_is_alone_gets_the_same_proposals_every_time(serve):
    served = serve()
    request = {"max_tokens": 60, "temp": 1.0, "num_draft": AUTO}
    alone = [served.submit([[4]], **request).results()[0].stats for _ in range(3)]
    assert alone[0].speculation == alone[1].speculation == alone[2].speculation
    assert alone[0].drafted


def test_searches_have_their_own_batch_and_give_their_best_texts(serve):
    model = Gated(random_table(V, eos_bias=-1.0), V)
    served = serve(model)
    search = {"num_beams": 3, "num_return_sequences": 2, "max_tokens": 9}
    hold(model)
    greedy = served.submit([[2, 3]], max_tokens=9)
    beams = served.submit([[4], [5, 6]], samples=2, **search)
    served.release()
    together = beams.results()
    assert len(greedy.results()[0].tokens) > 0
    assert max(len(tokens) for _, tokens in model.calls) == 2 * 3
    alone = SpeculativeDecoder(model).generate([[4], [5, 6]], **search)
    outcomes = [(r.tokens, r.score, r.stats.generated_tokens) for r in together]
    assert outcomes == [(r.tokens, r.score, r.stats.generated_tokens) for r in alone]


def test_the_rows_of_all_numbers_of_beams_share_the_places(serve):
    model = FakeModel(ENDLESS, V)
    served = serve(model, max_batch=2, max_queue=99)
    decode, running = model.decode, []

    def counted(*arguments):
        running.append(served.worker.rows[0])
        return decode(*arguments)

    model.decode = counted
    clients = [served.submit([[2], [3]], num_beams=beams, max_tokens=5) for beams in range(1, 9)]
    for client in clients:
        client.results()
    assert max(running) == 2


def test_an_update_has_the_counts_of_its_step(serve):
    served = serve(FakeModel(ENDLESS, V))
    stream = served.submit([[2]], max_tokens=9, num_draft=0, stream=True)
    chunks = [stream.next() for _ in range(9)]
    assert [chunk.stats.target_calls for chunk in chunks] == list(range(1, 10))


def test_a_withdrawn_job_leaves_the_batch_and_the_others_go_on(serve):
    served = serve()
    hold(served.model)
    gone = served.submit([[2]], max_tokens=10**9, stream=True)
    stays = served.submit([[3]], max_tokens=40)
    served.release()
    gone.next()
    served.worker.jobs.cancel(gone.job)
    assert len(stays.results()[0].tokens) == 40
    until(lambda: served.worker.rows == (0, 0))
    assert served.worker._generation._schedulers[1].engine.cache is None, "its memory is free"


def test_a_job_that_is_withdrawn_while_it_waits_is_never_decoded(serve):
    served = serve(max_batch=1)
    first = served.submit_held([[2]], max_tokens=5)
    waits = served.submit([[3, 4]], max_tokens=5)
    served.worker.jobs.cancel(waits.job)
    served.release()
    first.results()
    until(lambda: served.worker.rows == (0, 0))
    assert served.worker.stop(PATIENCE) and waits.events.empty()


def test_a_full_queue_refuses_and_has_room_again_afterwards(serve):
    served = serve(max_batch=1, max_queue=2)
    hold(served.model)
    first = served.submit([[2]], max_tokens=4)
    second = served.submit([[3]], max_tokens=4, temp=1.0, samples=2)
    with pytest.raises(ApiError, match="queue is full") as refused:
        served.submit([[4]])
    assert refused.value.status == 429 and 1 <= int(refused.value.headers["Retry-After"]) <= 60
    assert refused.value.body.error.code == "queue_full"
    served.release()
    first.results()
    second.results()
    until(lambda: served.worker.rows == (0, 0))
    assert len(served.submit([[4]], max_tokens=3).results()) == 1


METAL_OUT_OF_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)."
)


class Failing(Gated):
    """Raises the errors in its next passes, the last error first; None raises nothing."""

    def __init__(self, table, vocab_size):
        super().__init__(table, vocab_size)
        self.errors = []

    def decode(self, tokens, cache, offsets):
        logits = super().decode(tokens, cache, offsets)
        error = self.errors.pop() if self.errors else None
        if error:
            raise error
        return logits


@pytest.mark.parametrize(
    "error, status",
    [
        (TypeError("of a secret prompt"), 500),
        (RuntimeError("Unable to allocate"), 503),
        (RuntimeError(METAL_OUT_OF_MEMORY), 503),
    ],
)
def test_a_failed_step_ends_only_its_own_rows(serve, caplog, error, status):
    model = Failing(ENDLESS, V)
    served = serve(model, max_batch=1)
    broken = served.submit_held([[2]], max_tokens=50)
    waits = served.submit([[3]], max_tokens=5, logprobs=0)
    model.errors += [error, None]  # set when the other job is known to wait
    served.release()
    failure = broken.next()
    assert failure.status == status
    chunk = waits.next()
    assert len(chunk.result.tokens) == len(chunk.logprobs) == 5
    until(lambda: served.worker.rows == (0, 0))
    assert type(error).__name__ in caplog.text and "secret" not in caplog.text


def test_a_job_that_fails_to_start_affects_no_other_job(serve, monkeypatch):
    served = serve()
    make = GenerationRequest.rows

    def rows(self, prompt, *arguments):
        if prompt.source == [2]:
            raise RuntimeError("of a secret prompt")
        return make(self, prompt, *arguments)

    monkeypatch.setattr(GenerationRequest, "rows", rows)
    running = served.submit_held([[3]], max_tokens=6)
    broken, waits = served.submit([[2]]), served.submit([[4]], max_tokens=5)
    served.release()
    assert broken.next().status == 500
    assert [len(c.results()[0].tokens) for c in (running, waits)] == [6, 5]


@pytest.mark.parametrize(
    "error, status, message",
    [
        (TypeError("of a secret prompt"), 500, "internal error"),
        # The same request would fail again.
        (RuntimeError("[malloc] Unable to allocate 1 bytes."), 400, "no memory for a prompt of 10"),
    ],
)
def test_a_prompt_that_the_model_breaks_on_fails_alone(serve, unpadded, error, status, message):
    class Small(Gated):
        def encode(self, ids, mask=None):
            if ids.shape[1] > 9:
                raise error
            return super().encode(ids, mask)

    served = serve(Small(ENDLESS, V))
    failure = served.submit([[2] * 10]).next()
    assert failure.status == status and message in str(failure)
    assert len(served.submit([[3]], max_tokens=5).results()[0].tokens) == 5


def test_a_prompt_waits_while_others_use_the_memory(serve, unpadded):
    class Small(Gated):
        def cache_memory(self, prompts, source, target, rows=0):
            return (source > 9 or prompts > 1) * 10**18

    model = Small(ENDLESS, V)
    served = serve(model)
    hold(model)
    clients = [served.submit([[2 + i]], max_tokens=5 + i) for i in range(3)]
    large = served.submit([[2] * 10])
    served.release()
    assert [len(c.results()[0].tokens) for c in clients] == [5, 6, 7]
    assert large.next().status == 400
    assert max(len(tokens) for _, tokens in model.calls) == 1


def test_a_job_ends_if_its_clients_event_loop_has_closed(serve):
    served = serve()

    def put(event):
        raise RuntimeError("Event loop is closed")

    served.submit([[2]], put=put, max_tokens=10**9, stream=True)
    until(lambda: served.worker.rows == (0, 0))
    assert len(served.submit([[4]], max_tokens=5).results()[0].tokens) == 5


def test_a_prompt_that_the_model_cannot_read_is_the_clients_fault(serve):
    served = serve(Gated(ENDLESS, V))
    failure = served.submit([[2], [V]]).next()
    assert failure.status == 400 and "vocabulary" in str(failure)


def test_a_search_for_a_piece_that_fails_reports_each_of_its_texts(serve):
    search = {"num_beams": 2, "num_return_sequences": 2, "max_tokens": 4}
    searches = serve(Gated(ENDLESS, V)).submit([[V], [2]], samples=2, document="pieces", **search)
    events = [searches.next() for _ in range(4)]
    assert [event.index for event in events] == [0, 0, 2, 3]
    assert [event.result.error is None for event in events] == [False, False, True, True]


def test_models_that_cannot_be_loaded_are_an_error_at_the_start():
    def load():
        raise UserError("no such folder")

    with pytest.raises(UserError, match="no such folder"):
        Worker(load, 1, 1, Metrics()).start()


@pytest.mark.parametrize(
    "kind, num_draft", [("draft", 5), ("draft", AUTO), ("copy", 1), ("copy", AUTO), ("none", 5)]
)
def test_the_worker_warms_up_passes_of_every_width(num_draft, kind):
    model = FakeModel(ENDLESS, V)
    drafters = {"draft": drafter(good(model.table), model), "copy": SourceCopy(), "none": None}
    model.decoder_passes = 0
    warm_up(SpeculativeDecoder(model, drafters[kind], num_draft=num_draft), 2)
    assert model.decoder_passes == PASSES_BEFORE_COMPILING, "layers are compiled at once"
    most = (1 if cpu_only() else MAX_NUM_DRAFT) if drafters[kind] else 0
    widths = {len(tokens[0]) for _, tokens in model.calls}
    of_text = range(1, 2 + (num_draft if num_draft != AUTO and drafters[kind] else most))
    assert set(range(1, most + 2)) <= widths <= {*of_text, *range(1, most + 2)}


def test_on_a_gpu_the_worker_warms_up_each_kind_of_request(monkeypatch):
    monkeypatch.setattr(worker_module, "cpu_only", lambda: False)
    decoder = SpeculativeDecoder(FakeModel(ENDLESS, V))
    engine, kinds = decoder.engine, set()

    def recorded(settings, batch_size):
        kinds.add((settings.temp, settings.top_p, settings.delta, settings.num_beams))
        return engine(settings, batch_size)

    monkeypatch.setattr(decoder, "engine", recorded)
    warm_up(decoder, 2)
    greedy = {(0, 1, 0, 1), (0, 1, 0.5, 1), (0, 1, 0, MAX_BEAMS)}
    assert kinds == greedy | {(1, 1, 0, 1), (1, 0.9, 0, 1), (1, 1, 0.5, 1)}
