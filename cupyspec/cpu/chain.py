"""`verify()` and `sample()` for CPU arrays.

All rows of a block go down the chain together, one position at a time; a row leaves where it stops, so positions after
a rejection are never read. A row's answer depends on that row alone: every sum runs over one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

import numpy as np

from cupyspec._arrays import aligned_empty, host
from cupyspec._call import ChainCall, ChainResult
from cupyspec._philox import Purpose, UInt64, coin, draw_words, split_seed
from cupyspec._status import Status
from cupyspec.cpu.race import race
from cupyspec.cpu.rows import Bools, Float64, Indices, Rows, Side, Statuses, Weights, per_row
from cupyspec.cpu.rules import Proposal, accept, residual
from cupyspec.rules import Sigmoid, Token

_LENGTH_OUT_OF_RANGE, _TOKEN_OUT_OF_RANGE = np.int32(Status.LENGTH_OUT_OF_RANGE), np.int32(Status.TOKEN_OUT_OF_RANGE)

_BLOCK_SCORES = 1 << 18  # scores of one side looked at together: 1 MiB of float32, about a core's L2
_BLOCK_ROWS = 4096  # rows whose coins are drawn together


def run(call: ChainCall, rule: Token | Sigmoid) -> ChainResult:
    """The answer to a checked call whose arrays are on the CPU."""
    with np.errstate(all="ignore"):
        return _Chain(call, rule).run()


class _Kind(Enum):
    """How a row is treated, by its temperatures."""

    GREEDY = auto()
    SAMPLED = auto()
    GREEDY_DRAFT = auto()  # sampled, with drafts from an argmax


class _Chain:
    def __init__(self, call: ChainCall, rule: Token | Sigmoid) -> None:
        self.call, self.rule = call, rule
        batch = call.batch_size
        outputs = {name: aligned_empty(*spec) for name, spec in call.outputs().items()}
        for name, values in outputs.items():
            values.fill(-1 if name == "tokens" else 0)
        self.result = ChainResult(**outputs)
        self.log_normalizer = self.result.log_normalizer
        self.drafts, self.lengths, starts = self._read_drafts()
        target_starts = None if starts is None else starts + np.arange(batch)
        self.target = Side(call, call.target, target_starts, Status.TARGET_NOT_FINITE, Status.TARGET_EMPTY)
        self.draft = None
        if call.draft is not None:
            self.draft = Side(call, call.draft, starts, Status.DRAFT_INVALID, Status.DRAFT_INVALID)
        self.seeds: UInt64 = split_seed(call.seed, batch) if isinstance(call.seed, int) else host(call.seed)
        self.steps: UInt64 = per_row(call.step, batch, np.uint64)
        if call.purpose is not None:
            self.position, self.draw = (per_row(v, batch, np.uint64) for v in (call.position, call.draw))

    def _read_drafts(self) -> tuple[Indices, Indices, Indices | None]:
        """Draft ids [B, K], how many of them each row has, and where its rows start when flattened."""
        call, status = self.call, self.result.status
        batch, width = call.batch_size, call.num_drafts
        if call.draft_tokens is None:
            return np.empty((batch, 0), np.intp), np.zeros(batch, np.intp), None
        ids, starts = host(call.draft_tokens), None
        if call.cu_num_draft_tokens is not None:
            bounds = host(call.cu_num_draft_tokens)
            if bounds.dtype == np.uint64:
                bounds = np.minimum(bounds, np.uint64(ids.size + 1))
            bounds = bounds.astype(np.int64)
            starts = np.clip(bounds[:-1], 0, ids.size)
            ends = np.clip(bounds[1:], starts, ids.size)
            wrong = (starts != bounds[:-1]) | (ends != bounds[1:]) | (ends - starts > width)
            wrong[:1] |= bounds[:1] != 0
            lengths = np.minimum(ends - starts, width)
            columns = np.minimum(starts[:, None] + np.arange(width), max(ids.size - 1, 0))
            ids = ids[columns] if ids.size else np.full((batch, width), -1)
        elif call.num_draft_tokens is not None:
            given = host(call.num_draft_tokens)
            wrong = (given < 0) | (given > width)
            lengths = np.clip(given, 0, width).astype(np.intp)
        else:
            wrong, lengths = None, np.full(batch, width)
        if wrong is not None:
            status[wrong] |= _LENGTH_OUT_OF_RANGE

        columns = np.arange(width)
        ends_row = (ids < 0) | (ids >= call.vocab_size) | (columns >= lengths[:, None])
        if ends_row.any():
            first = np.where(ends_row, columns, width).min(axis=1)
            cut = np.flatnonzero(first < lengths)
            out_of_range = cut[ids[cut, first[cut]] != -1]
            status[out_of_range] |= _TOKEN_OUT_OF_RANGE
            # Ids behind a row's end may be anything: no longer looked at, they must still index.
            ids, lengths = np.where(ends_row, 0, ids), first
        return ids.astype(np.intp, copy=False), lengths, starts

    def run(self) -> ChainResult:
        rows = np.arange(self.call.batch_size)
        if self.call.active is not None:
            active = host(self.call.active).astype(np.bool_)
            rows = rows[active]
            self.result.status[~active] = 0
        for kind, of_kind in self._by_kind(rows):
            for start in range(0, of_kind.size, _BLOCK_ROWS):
                self._walk(of_kind[start : start + _BLOCK_ROWS], kind)
        return self.result

    def _by_kind(self, rows: Indices) -> Iterator[tuple[_Kind, Indices]]:
        """Rows that are treated alike."""
        greedy = self.target.greedy[rows]
        yield _Kind.GREEDY, rows[greedy]
        rows = rows[~greedy]
        if self.draft is not None:
            greedy = self.draft.greedy[rows]
            yield _Kind.GREEDY_DRAFT, rows[greedy]
            rows = rows[~greedy]
        yield _Kind.SAMPLED, rows

    def _walk(self, alive: Indices, kind: _Kind) -> None:
        """Take rows down the chain until none is left."""
        width = int(self.lengths[alive].max())
        coins = np.empty((alive.size, width)) if kind == _Kind.GREEDY else self._coins(alive, width)
        i = 0
        while alive.size:
            at_end = self.lengths[alive] == i
            if at_end.any():
                ending = alive[at_end]
                for block in self._blocks(ending):
                    self._finish(ending[block], i, kind)
                alive, coins = alive[~at_end], coins[~at_end]
            accepted = np.empty(alive.size, np.bool_)
            for block in self._blocks(alive):
                accepted[block] = self._step(alive[block], i, kind, coins[block, i])
            if not accepted.all():
                alive, coins = alive[accepted], coins[accepted]
            i += 1

    def _coins(self, b: Indices, width: int) -> Float64:
        """Acceptance coins [R, width] of rows b."""
        seeds, steps = self.seeds[b][:, None], self.steps[b][:, None]
        (word,) = draw_words(seeds, steps, Purpose.ACCEPT, position=np.arange(width), words=1)
        return coin(word).astype(np.float64)

    def _blocks(self, rows: Indices) -> Iterator[slice]:
        size = max(1, _BLOCK_SCORES // self.call.vocab_size)
        return (slice(start, start + size) for start in range(0, rows.size, size))

    def _step(self, b: Indices, i: int, kind: _Kind, coins: Float64) -> Bools:
        """Test the drafts of rows b at position i and answer the rows that stop there. True: accepted."""
        x, target = self.drafts[b, i], Rows(self.target, b, i)
        if kind == _Kind.GREEDY:
            tokens, status = target.scores.argmax(axis=1), target.status
            accepted = (status == 0) & (tokens == x)
        else:
            draft = None if self.draft is None else Rows(self.draft, b, i)
            proposal = Proposal(x, target, draft, kind == _Kind.GREEDY_DRAFT)
            accepted, status = accept(self.rule, proposal, coins)
            tokens = np.zeros(b.size, np.intp)
            rejected = np.flatnonzero(~accepted & (status == 0))
            if rejected.size:
                weights, status[rejected] = residual(self.rule, proposal.take(rejected))
                tokens[rejected] = self._race(b[rejected], i, weights, Purpose.RESIDUAL)
        if not accepted.all():
            stopped = ~accepted
            self._answer(b[stopped], i, tokens[stopped], status[stopped])
        return accepted

    def _finish(self, b: Indices, i: int, kind: _Kind) -> None:
        """Answer rows b, whose next token comes from the target at position i without a rejection."""
        rows = Rows(self.target, b, i)
        if kind == _Kind.GREEDY:
            tokens, status = rows.scores.argmax(axis=1), rows.status
        else:
            tokens = self._race(b, i, rows.weights, self.call.purpose or Purpose.BONUS)
            status = rows.status | rows.normalizer_status
        self._answer(b, i, tokens, status)
        if self.log_normalizer is not None:
            if kind == _Kind.GREEDY:
                log_sum = np.zeros(b.size)
            else:
                log_sum = rows.top / rows.temperature.astype(np.float64) + np.log(rows.weights.total())
            self.log_normalizer[b] = np.where(status, np.nan, log_sum)

    def _race(self, b: Indices, i: int, weights: Weights, purpose: Purpose) -> Indices:
        sampling = self.call.purpose is not None
        return race(
            weights,
            self.seeds[b],
            self.steps[b],
            purpose,
            position=self.position[b] if sampling else i,
            draw=self.draw[b] if sampling else 0,
            segment=self.call.segment,
        )

    def _answer(self, b: Indices, i: int, tokens: Indices, status: Statuses) -> None:
        """Write the answer of rows b, which end at position i with a token, or -1 where their rows cannot be used."""
        self.result.tokens[b, :i] = self.drafts[b, :i]
        self.result.tokens[b, i] = np.where(status, -1, tokens)
        self.result.num_accepted[b] = i
        self.result.status[b] |= status
