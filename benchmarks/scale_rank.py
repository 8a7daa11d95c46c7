"""One rank of `scale`, in a process of its own (see peer_process.py), on cores of its own.

MLX is imported only after the cores are chosen, as its libraries start a thread for each.
"""

from __future__ import annotations

import os
import time
from typing import Any

END = ["end"]  # rank 0's message that a text is done


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
    """A rank that has a part of the target."""

    def __init__(self, rank: int, cores: int, model: str, dtype: str | None) -> None:
        """Loads its part and makes a step; MLX_RANK and MLX_HOSTFILE say who else there is."""
        choose_cores(rank, cores)
        from benchmarks import machine
        from benchmarks.costs import CostMeter
        from convert import convert
        from mlx_t5.backend import cpu_only, mx
        from mlx_t5.cli.models import locate
        from mlx_t5.machines.team import Team
        from mlx_t5.text.tokenizer import load_tokenizer
        from model import load

        folder = locate(model, convert)
        load_tokenizer(folder)  # what it imports is no part of the model's memory
        self._mx, self._dtype, imports = mx, dtype, machine.peak_resident()
        self._team = Team("127.0.0.1") if os.environ.get("MLX_HOSTFILE") else None
        self._group = self._team.group if self._team else None
        self._model, self._tokenizer = load(folder, dtype, group=self._group)
        self._meter = CostMeter(self._model, self._model, source=32)
        self._meter.target_seconds(self._meter.longest)
        own = machine.peak_resident() - imports
        self._peak = own if cpu_only() else mx.get_peak_memory()
        self._deciders: dict[bool, Any] = {}  # by whether rank 0 leads

    def memory(self) -> dict[str, Any]:
        """What this rank has needed.

        Returns:
            Bytes of each parameter; the most bytes until the first step was made, and whether those
            are resident ones beyond the imports (without a GPU) or what MLX has allocated.
        """
        from mlx_t5.backend import cpu_only, tree_flatten

        arrays = tree_flatten(self._model.parameters())
        weights = {name: array.nbytes for name, array in arrays}
        return {"weights": weights, "peak": self._peak, "resident": cpu_only()}

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

    def load_draft(self, name: str) -> int:
        """Loads the whole draft, which `decode` needs; returns its bytes in memory."""
        from benchmarks.subject import Subject
        from convert import convert
        from mlx_t5.cli.models import locate
        from mlx_t5.machines.leader import Follower, Leader
        from model import load

        folder = locate(name, convert)
        before = self._mx.get_active_memory()
        draft, _ = load(folder, self._dtype, shared_with=self._model)
        size = self._mx.get_active_memory() - before
        alike = Subject(self._model, draft, self._tokenizer)
        self._deciders = {False: alike, True: alike}
        if self._team and self._team.rank:
            self._deciders[True] = Follower(self._model)
        elif self._team:
            leader: Any = Leader(self._model, self._team.tell)
            if draft.shares_with is not None:  # it asks its target, and so all ranks
                draft, _ = load(folder, self._dtype, shared_with=leader)
            self._deciders[True] = Subject(leader, draft, self._tokenizer)
        return size

    def decode(
        self, prompt: str, leads: bool, num_draft: int | str, max_tokens: int
    ) -> dict[str, Any] | None:
        """Decodes a prompt by speculation.

        Args:
            prompt: a text.
            leads: have rank 0 draft and decide for all, and tell the others; else every rank drafts
                and decides.
            num_draft: proposals a step.
            max_tokens: of the text.

        Returns:
            Its tokens; seconds from the moment when all ranks were there until the text was, those
            of its steps alone, and how many steps it took. None of a rank that was told.
        """
        from benchmarks.options import DRAFT

        decider, team = self._deciders[leads], self._team
        if team:
            self.gathers(size=4, count=1)  # when that is done, all are there
        if leads and team and team.rank:
            while (message := team.next_message()) != END:
                decider.do(*message)
            return None
        decoder = decider.speculative(DRAFT, num_draft)
        began = time.perf_counter()
        try:
            result = decoder.generate(prompt, max_tokens=max_tokens)
            seconds = time.perf_counter() - began
        finally:
            if leads and team:
                team.tell(END)
        return {
            "seconds": seconds,
            "decode_seconds": result.stats.decode_seconds,
            "steps": result.stats.target_calls,
            "tokens": result.tokens,
        }
