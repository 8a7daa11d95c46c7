"""Bytes as people read them."""

from __future__ import annotations


def readable(size: float) -> str:
    """A number of bytes in GB, or in MB below a tenth of one."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
