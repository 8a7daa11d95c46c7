"""Makes a random T5 whose tokenizer has the words of monoT5."""

import shutil
from pathlib import Path

import checkpoints


def save(folder: Path, **entries) -> Path:
    """Writes the folder of the model; `entries` are added to config.json."""
    shutil.copytree(Path(__file__).with_name("monot5"), folder)
    config = {**checkpoints.TINY, **entries}
    return checkpoints.save(checkpoints.random_state(config), folder, config=config)
