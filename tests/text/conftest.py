"""What tests of tokenizers share."""

import pytest

import tokenizer_folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders with tokenizers of every kind, by the names in tokenizer_folders."""
    root = tmp_path_factory.mktemp("tokenizers")
    tokenizer_folders.make(root)
    return root
