"""Tests docs/works-with.md: each recipe runs alone with its library."""

import itertools
import re

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, T5Config, T5EncoderModel

import ranking_models
import sentence_folders
import snippets
from serving_process import Server

PAGE = snippets.ROOT / "docs" / "works-with.md"
RANKER, PIPELINE = "monot5-base-msmarco-10k", "PixArt-XL-2-512x512"
PRINTING = (
    "Works with",
    "LibreTranslate's clients",
    "LangChain",
    "LiteLLM",
    "sentence-transformers",
)


def recipes() -> dict[str, list[snippets.Snippet]]:
    """Returns the page's blocks by their heading."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    titles = [(number, line) for number, line in enumerate(lines, 1) if re.match("#+ ", line)]
    ends = [*(number for number, _ in titles[1:]), len(lines)]
    blocks = snippets.read(PAGE)
    return {
        title.lstrip("# "): [block for block in blocks if start < block.line < end]
        for (start, title), end in zip(titles, ends, strict=True)
    }


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    """Returns a folder of small random models named as the page's models from the Hub."""
    folder = tmp_path_factory.mktemp("downloads")
    ranking_models.save(folder / RANKER, decoder_start_token_id=0)
    dense = sentence_folders.dense(32, 48)
    modules = sentence_folders.pooling("mean"), dense, sentence_folders.NORMALIZE
    sentence_folders.folder_of(folder / "sentence-t5-base", *modules)
    return folder


@pytest.fixture(scope="module")
def ranking_server(downloads):
    running = Server("--model", str(downloads / RANKER), "--draft-model", "none")
    yield running
    running.close()


@pytest.fixture
def run(tmp_path, downloads, request, monkeypatch):
    """Returns a function that runs a recipe in a separate folder and returns its variables."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # avoids a download
    servers = {"8080": "server", "8081": "ranking_server"}

    def run(title: str) -> dict:
        session = snippets.Session(
            tmp_path, lambda port: request.getfixturevalue(servers[port]).url
        )
        (tmp_path / "models").symlink_to(downloads)
        blocks = [block for block in recipes()[title] if not block.not_run]
        assert blocks
        for block in blocks:
            session.check(block)
        return session.names

    return run


def test_no_recipe_is_left_out():
    assert set(recipes()) == {*PRINTING, "rerankers", "diffusers"}


@pytest.mark.slow
@pytest.mark.parametrize("title", PRINTING)
def test_a_recipe_prints_what_the_page_says(title, run):
    run(title)


@pytest.mark.slow
def test_ranks_are_those_that_rerankers_computes_with_torch(run, downloads):
    names = run("rerankers")
    from rerankers import Reranker

    words = {"token_true": "▁true", "token_false": "▁false"}
    ranker = Reranker(str(downloads / RANKER), model_type="t5", verbose=0, **words)
    query, documents = names["query"], names["documents"]
    served, expected = (r.rank(query, documents).results for r in (names["ranker"], ranker))
    assert [result.doc_id for result in served] == [result.doc_id for result in expected]
    by_litellm = [result["document"]["text"] for result in names["ranks"].results]
    assert by_litellm == [documents[result.doc_id] for result in expected]
    scores = [result.score for result in expected]
    assert [result.score for result in served] == pytest.approx(scores, abs=1e-5)
    assert all(a - b > 1e-3 for a, b in itertools.pairwise(scores))


@pytest.mark.slow
def test_prompt_embeddings_are_those_of_the_pipelines_own_encoder(run, downloads):
    folder = save_pipeline(downloads / PIPELINE)
    names = run("diffusers")
    ids, mask = (torch.from_numpy(names["read"][key]) for key in ("input_ids", "attention_mask"))
    with torch.inference_mode():
        encoder = T5EncoderModel.from_pretrained(folder / "text_encoder")
        expected = encoder(ids, attention_mask=mask).last_hidden_state
    assert names["states"].shape == expected.shape == (2, 120, 32)
    assert mask.sum(1).tolist() == [17, 1]
    torch.testing.assert_close(names["states"], expected, rtol=0, atol=1e-5)
    assert np.ptp(np.asarray(names["image"])) > 50


def save_pipeline(folder):
    """Saves a PixArt of one layer, for pictures of 512 x 512, and its text encoder."""
    from diffusers import (
        AutoencoderKL,
        DPMSolverMultistepScheduler,
        PixArtAlphaPipeline,
        PixArtTransformer2DModel,
    )

    tokenizer = AutoTokenizer.from_pretrained(ranking_models.save(folder / "tokenizer_only"))
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", **sizes)
    transformer = PixArtTransformer2DModel(
        num_attention_heads=1,
        attention_head_dim=8,
        num_layers=1,
        cross_attention_dim=8,
        caption_channels=config.d_model,
        sample_size=64,
        norm_num_groups=1,
    )
    autoencoder = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[4] * 4,
        norm_num_groups=1,
    )
    parts = tokenizer, T5EncoderModel(config), autoencoder, transformer
    PixArtAlphaPipeline(*parts, DPMSolverMultistepScheduler()).save_pretrained(folder)
    return folder
