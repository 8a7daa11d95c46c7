"""What the model's own files say about requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlx_t5.checkpoints.generation_config import FILE, Preset


@dataclass(frozen=True)
class Presets:
    """The defaults and the tasks that the model's own files define."""

    general: Preset = Preset(FILE)
    tasks: Mapping[str, Preset] = field(default_factory=dict)  # prefix and settings by name
    translation_prefix: str = ""  # a template that replaces the one in config.json
    rerank_words: Sequence[str] | None = None  # None: monoT5's

    @property
    def notes(self) -> list[str]:
        """What the model's files ask for in vain: unsupported entries, samples' values, beams."""
        presets = self.general, *self.tasks.values()
        notes = [preset.note for preset in presets]
        if not self.general.settings.get("temp"):  # requests are greedy unless they ask for more
            notes += [preset.unread_note for preset in presets]
        notes.append(max(presets, key=lambda preset: preset.num_beams).beams_note)
        return [note for note in notes if note]
