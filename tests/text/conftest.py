"""Fixtures for tests of tokenizers."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from tokenizer_folders import (
    CLASSES,
    LAYOUTS,
    RESAVED,
    SPECIAL,
    old_json,
    settings,
    train,
    write,
    write_class,
)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Returns a folder with all kinds in tokenizer_folders, and "byt5"."""
    root = tmp_path_factory.mktemp("tokenizers")
    for layout in LAYOUTS:
        folder = root / layout
        train(folder, layout)
        both = shutil.copytree(folder, root / f"{layout}-both")
        state = old_json(folder, settings(layout)["extra_ids"])
        write(both, state)
        write(root / f"{layout}-json", state, settings(layout))
        if f"{layout}-resaved" in RESAVED:
            resaved = AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str()
            write(root / f"{layout}-resaved", json.loads(resaved), settings(layout))
    for kind in CLASSES:
        write_class(root / kind, kind)
    named = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125, **SPECIAL}
    write(root / "byt5", None, named)
    return root
