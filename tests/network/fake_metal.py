"""A fake of MLX's few calls about the memory of a Mac's GPU."""

from __future__ import annotations

from mlx_t5.backend import mx
from mlx_t5.backend.device_memory import WORKING_SET


class FakeMetal:
    """Stands in for MLX's memory calls and refuses what Metal refuses.

    Attributes:
        recommended: the recommended working set in bytes.
        active: the bytes of arrays in use.
        cached: the bytes of freed buffers.
        limits: the limits that were set, in order.
        cache_limits: the limits of freed buffers in bytes that were set, in order.
    """

    def __init__(self, monkeypatch, recommended: int, memory: int = 0) -> None:
        self.recommended, self.active, self.cached = recommended, 0, 0
        self.limits: list[int] = []
        self.cache_limits: list[int] = []
        facts = {"device_name": "Apple M9", WORKING_SET: recommended, "memory_size": memory}
        monkeypatch.setattr(mx, "device_info", lambda: facts)
        monkeypatch.setattr(mx, "get_active_memory", lambda: self.active)
        monkeypatch.setattr(mx, "get_cache_memory", lambda: self.cached)
        monkeypatch.setattr(mx, "set_wired_limit", self._set_wired_limit)
        monkeypatch.setattr(mx, "clear_cache", self._clear_cache)
        monkeypatch.setattr(mx, "set_cache_limit", self.cache_limits.append)

    def _set_wired_limit(self, limit: int) -> int:
        if limit > self.recommended:
            raise ValueError("a wired limit larger than the maximum working set size")
        self.limits.append(limit)
        return self.limits[-2] if len(self.limits) > 1 else 0

    def _clear_cache(self) -> None:
        self.cached = 0
