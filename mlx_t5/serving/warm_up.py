"""What the first requests would otherwise wait for: weights on disk, kernels that are not compiled.

On the page the first text is decoded with proposals and then regularly, for comparison. Without
this the first one would pay for both.
"""

from __future__ import annotations

from mlx_t5.backend import mx
from mlx_t5.drafting.costs import longest
from mlx_t5.network.encoding import encoded
from mlx_t5.serving.jobs import Decoder

DUMMY_TOKENS = 8  # tokens of the dummy prompt


def warm_up(decoder: Decoder, batch_size: int) -> None:
    """Decodes a dummy prompt, then makes a pass of the target of every width there may be.

    Those are 1 to num_draft + 1 positions, or with "auto" 1 to `longest()` + 1. Drafters need not
    propose so many for a dummy prompt, so the passes are made whatever they say. In exact decoding
    all passes are of one width, and were checked when it was found.

    Args:
        decoder: with the models.
        batch_size: rows decoded at the same time; in exact decoding all passes have them.
    """
    model, wanted = decoder.model, decoder.defaults.num_draft
    filler = model.config.eos_token_id
    if not model.can_decode:
        decoder.embed([[filler] * DUMMY_TOKENS])
        return
    decoder.generate([[filler] * DUMMY_TOKENS], max_tokens=8, batch_size=batch_size)
    if decoder.exact:
        return
    most = wanted if isinstance(wanted, int) else longest()
    cache = encoded(model, [[filler] * DUMMY_TOKENS])
    for width in range(1, most + 2 if decoder.drafter else 2):
        cache.reserve(width)
        mx.eval(model.decode(mx.array([[filler] * width], mx.int32), cache, [0]))
