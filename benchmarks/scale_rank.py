"""One rank of `scale`, in a process of its own (see peer_process.py), on cores of its own.

MLX is imported only after the cores are chosen, as its libraries start a thread for each.
"""

from __future__ import annotations

import os
import time
from typing import Any


def choose_cores(rank: int, cores: int) -> None:
    """Keeps this process on as many cores as a rank is to have, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        free = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {free[(rank * cores + i) % len(free)] for i in range(cores)})


class DataRank:
    """A rank that shares prompts with others. It holds the whole models."""

    def __init__(
        self, rank: int, cores: int, model: str, draft_model: str, dtype: str | None
    ) -> None:
        """Loads the pair."""
        choose_cores(rank, cores)
        from benchmarks.subject import Subject

        self._rank = rank
        self._subject = Subject.load(model, draft_model, dtype)

    def run(
        self, ranks: int, port: int, prompts: list[str], num_draft: int, **options: Any
    ) -> dict[str, Any] | None:
        """Does its part of the prompts.

        Args:
            ranks: how many there are.
            port: of rank 0, on this machine.
            prompts: all of them; rank 0 hands them out.
            num_draft: proposals a step.
            options: of `SpeculativeDecoder.results`.

        Returns:
            Of rank 0: seconds from the moment when all were there until all was done, prompts by
            rank, and of each text its tokens and its latency in seconds. None of the others.
        """
        from benchmarks.options import DRAFT
        from mlx_t5.machines.block_links import BlockClient, BlockServer
        from mlx_t5.machines.blocks import Blocks, Share, lead
        from mlx_t5.machines.launched import Rank
        from mlx_t5.machines.outcomes import TEXTS, common

        decoder = self._subject.speculative(DRAFT, num_draft)

        def work(items: Any, indexes: Any, ready: Any) -> Any:
            return decoder.results(items, ready=ready, indexes=indexes, **options)

        agreed = common(decoder, options)
        rank = Rank(self._rank, ranks, (("127.0.0.1", port),))
        if self._rank:
            with BlockClient(rank, agreed) as rank_0:
                for block, outcomes in Share(rank_0.take).outcomes(work):
                    rank_0.deliver(block, [TEXTS.packed(outcome) for outcome in outcomes])
            return None
        results: list[Any] = []
        with BlockServer(rank, lambda line: None) as server:
            here = lambda: len(server.seen) == ranks - 1  # noqa: E731
            blocks = Blocks(iter(prompts), options["batch_size"], ready=here)
            server.share(blocks, agreed, TEXTS)
            while not here():
                time.sleep(0.01)
            began = time.perf_counter()
            for block in lead(blocks, work, 1, "0"):
                results += block.outcomes
            seconds = time.perf_counter() - began
        by_rank = [
            sum(n for name, n in blocks.prompts.items() if name.split(".")[0] == str(r))
            for r in range(ranks)
        ]
        latencies = [r.stats.encode_seconds + r.stats.decode_seconds for r in results]
        tokens = [r.tokens for r in results]
        return {"seconds": seconds, "by_rank": by_rank, "latencies": latencies, "tokens": tokens}


class TensorRank:
    """A rank that has a part of the target, and makes the same calls as the others."""

    def __init__(self, rank: int, cores: int, model: str, dtype: str | None) -> None:
        """Loads its part; MLX_RANK and MLX_HOSTFILE say who else there is."""
        choose_cores(rank, cores)
        from benchmarks.costs import CostMeter
        from convert import convert
        from mlx_t5.backend import mx
        from mlx_t5.cli.models import locate
        from model import load

        several = bool(os.environ.get("MLX_HOSTFILE"))
        self._mx = mx
        self._group = mx.distributed.init(strict=True, backend="ring") if several else None
        self._model, _ = load(locate(model, convert), dtype, group=self._group)
        self._meter = CostMeter(self._model, self._model, source=32)

    def sizes(self) -> dict[str, Any]:
        """What its passes read and exchange.

        Returns:
            Collectives of a pass; bytes of a position's state, and of its logits that this rank
            computes.
        """
        before = self._model.ranks.collectives
        self._meter.target_seconds(1)
        config, each = self._model.config, self._model.dtype.size
        columns = self._model.ranks.share(config.vocab_size, 0).stop
        return {
            "collectives": self._model.ranks.collectives - before,
            "state": config.d_model * each,
            "logits": columns * each,
        }

    def steps(self, width: int, count: int, alone: bool = False) -> list[float]:
        """Seconds of each of so many target passes over so many positions.

        Args:
            width: positions.
            count: passes.
            alone: leave the collectives out, which leaves this rank's own work.
        """
        ranks = self._model.ranks
        if alone:
            ranks.__dict__["_gather"] = lambda array: [array] * ranks.size
        try:
            return [self._meter.target_seconds(width) for _ in range(count)]
        finally:
            ranks.__dict__.pop("_gather", None)

    def gathers(self, size: int, count: int) -> list[float]:
        """Seconds of each of so many collectives in which every rank has so many bytes."""
        mx, seconds = self._mx, []
        part = mx.zeros((1, size // 4))
        mx.eval(part)
        for _ in range(count):
            began = time.perf_counter()
            mx.eval(mx.distributed.all_gather(part, group=self._group))
            seconds.append(time.perf_counter() - began)
        return seconds
