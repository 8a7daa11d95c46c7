"""What ranks have to have in common before their first pass.

Ranks with other weights of the same shapes would compute nonsense together, and ranks with other
shapes would wait for each other for ever. So all compare what they were asked and what they read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from mlx_t5.backend import cpu_only, mx
from mlx_t5.checkpoints.identity import adapter_identity, identity

NAMES = ("model", "draft_model", "adapter_path")  # options: what they lead to is compared


def common_facts(pair: Any, decoder: Any, options: Mapping[str, Any]) -> dict[str, str]:
    """What ranks have to have in common, so that it does not matter who computes what.

    Args:
        pair: the folders of the models, a `loading.ModelPair`.
        decoder: a `SpeculativeDecoder` with these models.
        options: of the command line, after the model's own wishes.

    Raises:
        UserError: a folder cannot be read.
    """
    drafter = decoder.drafter
    asked = {name: value for name, value in options.items() if name not in NAMES}
    asked |= {"num_draft": decoder.defaults.num_draft, "drafter": type(drafter).__name__}
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode())
    return {
        "version of MLX": mx.__version__,
        "kind of device": str(cpu_only()),  # which pads in its own way
        "set of options": digest.hexdigest(),
        "dtype (see --dtype)": str(decoder.model.dtype),
        "target model": identity(pair.target),
        "draft model": identity(pair.draft) if pair.draft else "none",
        "adapter": adapter_identity(pair.adapter) if pair.adapter else "none",
    }
