"""docs/forecasting.md does what chronos-forecasting and transformers do."""

import json

import numpy as np
import pytest
import torch

import main
from demo import forecasting
from draws import total_variation_bound
from mlx_t5 import SpeculativeDecoder, load
from mlx_t5.convert import convert
from mlx_t5.network.sharing import shared_draft
from record_chronos import CHRONOS, FILE, series_of

FUNCTIONS, USE = forecasting.blocks()
PAGE = {}
exec(FUNCTIONS, PAGE)
to_tokens, to_values, forecast = (PAGE[n] for n in ("to_tokens", "to_values", "forecast"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns a random model of Chronos-T5's form in transformers, and its folder."""
    torch.manual_seed(0)
    reference = forecasting.new_model((2, 64, 128, 2)).eval()
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if weight.ndim == 2 and "relative" not in name:
                scale = 1.0 if "shared" in name else 0.3 if ".q." in name else 2.0
                weight.normal_(std=scale * weight.shape[-1] ** -0.5)
            elif "relative" in name:
                weight.normal_()
    folder = tmp_path_factory.mktemp("chronos")
    reference.save_pretrained(folder)
    return reference, folder


def test_tokens_and_values_are_those_of_chronos_forecasting():
    recorded = json.loads(FILE.read_text())
    assert forecasting.CHRONOS == CHRONOS and len(recorded["records"]) == 20
    for number, record in enumerate(recorded["records"]):
        ids, mask, scale = to_tokens(np.array(record["series"], float), CHRONOS)
        assert (ids, mask) == (record["ids"], record["mask"]), number
        values = to_values(ids[-6:-1], scale, CHRONOS)
        np.testing.assert_allclose(values, record["last_values"], rtol=1e-5, atol=1e-6 * scale)


def test_tokens_are_those_of_the_installed_chronos_forecasting():
    chronos = pytest.importorskip("chronos", reason="chronos-forecasting is not installed")
    tokenizer = chronos.ChronosConfig(**CHRONOS).create_tokenizer()
    for number in range(200):
        series = np.array(series_of(number) * (1 + number % 5 * 9), np.float32)
        ids, mask, _ = tokenizer.context_input_transform(torch.tensor(series)[None])
        assert to_tokens(series, CHRONOS)[:2] == (ids[0].tolist(), mask[0].tolist()), number


@pytest.mark.parametrize(
    ("series", "cause"),
    [
        ([], "at least one number"),
        ([np.nan, np.nan], "at least one number"),
        ([1.0, np.inf], "no infinite ones"),
        (["high", "low"], "could not convert string to float"),
    ],
)
def test_a_series_without_finite_numbers_is_refused(series, cause):
    with pytest.raises(ValueError, match=cause):
        to_tokens(series, CHRONOS)


def test_missing_values_are_ignored_as_in_transformers(models):
    reference, folder = models
    target, _ = load(folder, "float32")
    series = [np.array(series_of(number), float) for number in (0, 3, 6, 8)]
    prompts, masks, _ = zip(*(to_tokens(one, CHRONOS) for one in series), strict=True)
    results = SpeculativeDecoder(target, shared_draft(target, 1)).generate(
        prompts, attention_mask=masks, min_tokens=16, max_tokens=16
    )
    for ids, mask, result in zip(prompts, masks, results, strict=True):
        attention = {"attention_mask": torch.tensor([mask])}
        length = {"min_new_tokens": 16, "max_new_tokens": 16}
        ids = torch.tensor([ids])
        assert reference.generate(ids, **attention, **length)[0, 1:].tolist() == result.tokens
        other = reference.generate(ids, attention_mask=torch.ones_like(ids), **length)
        assert all(mask) or other[0, 1:].tolist() != result.tokens


def test_samples_follow_the_distribution_of_transformers(models):
    reference, folder = models
    decoder = SpeculativeDecoder(load(folder, "float32")[0])
    ids, mask, scale = to_tokens(np.array(series_of(3), float), CHRONOS)
    start = torch.tensor([[0]])
    with torch.no_grad():
        logits = reference(torch.tensor([ids]), torch.tensor([mask]), decoder_input_ids=start)
    logits = logits.logits[0, 0]
    logits[CHRONOS["eos_token_id"]] = -np.inf
    top = logits.topk(CHRONOS["top_k"])
    exact = dict(zip(top.indices.tolist(), top.values.softmax(0).tolist(), strict=True))
    draws = 2000
    results = decoder.generate(
        ids,
        attention_mask=mask,
        temp=1.0,
        top_k=50,
        num_samples=draws,
        max_tokens=1,
        min_tokens=1,
        batch_size=1000,
    )
    tokens, counts = np.unique([r.tokens[0] for r in results], return_counts=True)
    assert set(tokens) <= set(exact)
    seen = dict(zip(tokens.tolist(), counts / draws, strict=True))
    variation = sum(abs(seen.get(token, 0) - exact[token]) for token in exact) / 2
    assert variation < total_variation_bound(exact.values(), draws)


def test_the_page_forecasts_and_draws(models, tmp_path, monkeypatch):
    decoder = SpeculativeDecoder(load(models[1])[0])
    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", lambda name, draft: decoder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = dict(PAGE)
    exec(USE, names)
    low, median, high = names["low"], names["median"], names["high"]
    assert low.shape == (64,) and (low <= median).all() and (median <= high).all()
    assert (low < high).any() and (tmp_path / "forecast.png").stat().st_size > 10_000


def test_a_converted_model_keeps_its_bins_and_main_names_the_page(models, tmp_path, capsys):
    folder = convert(models[1], tmp_path / "mlx")
    assert json.loads((folder / "config.json").read_text())["chronos_config"] == CHRONOS
    assert main.main(["--model", str(folder), "--prompt", "1 2 3"]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].endswith("call it in Python as docs/forecasting.md does")
