"""Fixtures for tests of tokenizers."""

import pytest

import tokenizer_folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Returns a folder of tokenizers of every kind, named as in tokenizer_folders."""
    root = tmp_path_factory.mktemp("tokenizers")
    tokenizer_folders.make(root)
    return root
