"""A state dict that is hard to read."""

from collections import OrderedDict

import torch


def views(dtype: str = "float32") -> OrderedDict[str, torch.Tensor]:
    """Returns a state dict that is hard to read: views, ties, a scalar, an empty tensor."""
    torch.manual_seed(0)
    base = torch.randn(6, 8).to(getattr(torch, dtype))
    state = OrderedDict(
        base=base,
        tied=base,
        transposed=base.T,
        inner=base[2:5, 1:7:2],
        cube=base.view(2, 3, 8).permute(2, 0, 1),
        tail=base.view(-1)[41:],
        scalar=base[3, 3],
        parameter=torch.nn.Parameter(torch.randn(5).to(base.dtype)),
        empty=base[:0],
    )
    state._metadata = OrderedDict({"": {"version": 1}})  # torch's modules add this
    return state
