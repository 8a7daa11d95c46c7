"""Tests that a server decodes equal greedy requests once."""

from fake_model import FakeModel, greedy
from fake_serving import ENDLESS, Gated, V, hold
from mlx_t5.serving.builders import usage
from mlx_t5.text.prompts import Prompt


def test_a_repeated_request_is_answered_without_a_pass(serve):
    served = serve(FakeModel(ENDLESS, V), answers=10)
    request = served.submit([[4]], max_tokens=9)
    (first,) = request.results()
    passes = len(served.model.calls)
    (again,) = served.submit([[4]], max_tokens=9).results()
    stream = served.submit([[4]], max_tokens=9, stream=True)
    chunk = stream.next()
    assert len(served.model.calls) == passes
    assert again.tokens == chunk.tokens == chunk.result.tokens == first.tokens
    counts = usage(request.job, [first.stats])
    assert usage(stream.job, [again.stats]) == usage(stream.job, [chunk.stats]) == counts
    assert counts.completion_tokens == 9
    assert counts.completion_tokens_details.accepted_prediction_tokens > 0
    (sampled,) = served.submit([[4]], max_tokens=9, temp=1.0).results()
    (scored,) = served.submit([[4]], max_tokens=9, logprobs=1).results()
    assert not sampled.stats.reused and not scored.stats.reused


def test_a_stored_answer_needs_no_free_place(serve):
    served = serve(FakeModel(ENDLESS, V), max_batch=1, answers=10)
    (first,) = served.submit([[4]], max_tokens=9).results()
    busy = served.submit([[2]], max_tokens=10**9, stream=True)
    waits = served.submit([[5], [4]], max_tokens=9)
    again = served.submit([[4], [4]], max_tokens=9).results()
    assert [result.tokens for result in again] == [first.tokens] * 2
    assert waits.events.empty(), "its first text needs a place"
    served.worker.jobs.cancel(busy.job)
    assert [len(result.tokens) for result in waits.results()] == [9, 9]


def test_a_client_never_gets_what_another_one_has_predicted(serve):
    served = serve(FakeModel(ENDLESS, V), answers=10)
    lenient = {"max_tokens": 9, "delta": 1.0, "num_draft": 5}
    (alone,) = served.submit([[4]], **lenient).results()
    secret = Prompt([4], prediction=[6, 5, 6, 5, 6])
    (predicted,) = served.submit([secret], **lenient).results()
    (again,) = served.submit([[4]], **lenient).results()
    assert alone.tokens == again.tokens != predicted.tokens[:9]


def test_without_a_store_every_request_is_decoded(serve):
    served = serve(FakeModel(ENDLESS, V), answers=0)
    results = [served.submit([[4]], max_tokens=9).results()[0] for _ in range(2)]
    assert not any(result.stats.reused for result in results)


def test_if_the_client_of_a_text_leaves_the_text_is_decoded_for_the_next(serve):
    served = serve(Gated(ENDLESS, V), answers=10)
    hold(served.model)
    gone = served.submit([[4]], max_tokens=30, stream=True)
    stays = served.submit([[4], [4]], max_tokens=30)
    served.model.arrived.acquire()
    served.worker.jobs.cancel(gone.job)
    served.release()
    results = stays.results()
    assert sorted(result.stats.reused for result in results) == [0, 1]
    for result in results:
        assert result.tokens == greedy(served.model, [4], 30)[0]


def test_if_decoding_fails_the_rows_that_waited_for_the_text_are_decoded(serve):
    served = serve(Gated(ENDLESS, V), answers=10)
    decode, fails = served.model.decode, [True]

    def failing(*args):
        logits = decode(*args)
        if fails.pop() if fails else False:
            raise RuntimeError("the device is lost")
        return logits

    served.model.decode = failing
    hold(served.model)
    first = served.submit([[4]], max_tokens=9)
    second = served.submit([[4]], max_tokens=9)
    served.model.arrived.acquire()
    served.release()
    outcomes = [first.next(), second.next()]
    assert [getattr(outcome, "status", 0) for outcome in outcomes] == [500, 0]
    assert outcomes[1].result.tokens == greedy(served.model, [4], 9)[0]
