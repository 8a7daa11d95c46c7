"""Bytes as people read them, and how much the encoder reads at once."""

from __future__ import annotations

# Source positions, padding included, that a pass of the encoder takes at most, if it is more than
# one prompt. Larger passes were no faster, and the larger, the more of them is padding.
PASS_POSITIONS = 256


def readable(size: float) -> str:
    """A number of bytes in GB, or in MB below a tenth of one."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
