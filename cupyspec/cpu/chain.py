"""`verify()` and `sample()` for CPU arrays.

All rows of a block go down the chain together, one position at a time; a row leaves where it stops, so positions after
a rejection are never read. A row's answer depends on that row alone: every sum runs over one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyspec._arrays import aligned_empty, host
from cupyspec._call import ChainCall, ChainResult
from cupyspec._philox import Purpose, UInt64, coin, draw_words, split_seed
from cupyspec._status import Status
from cupyspec.cpu.race import race
from cupyspec.cpu.rows import Bools, Float32, Indices, Rows, Side, Statuses, Weights, per_row
from cupyspec.cpu.rules import Proposal, accept, residual
from cupyspec.rules import Sigmoid, Token

Kinds = npt.NDArray[np.signedinteger[Any]]
_GREEDY, _SAMPLED, _GREEDY_DRAFT = 0, 1, 2  # of a batch row; the last: sampled, with drafts from an argmax

_BLOCK_SCORES = 1 << 18  # scores of one side looked at together: 1 MiB of float32, about a core's L2
_BLOCK_ROWS = 4096  # rows whose coins are drawn together


def run(call: ChainCall, rule: Token | Sigmoid) -> ChainResult:
    """The answer to a checked call whose arrays are on the CPU."""
    with np.errstate(all="ignore"):
        return _Chain(call, rule).run()


class _Chain:
    def __init__(self, call: ChainCall, rule: Token | Sigmoid) -> None:
        self.call, self.rule = call, rule
        batch, rows = call.batch_size, np.arange(call.batch_size)
        self.log_normalizer = None if call.purpose is None else aligned_empty((batch,), np.float32)
        self.result = ChainResult(
            tokens=aligned_empty((batch, call.num_drafts + 1), call.token_dtype),
            num_accepted=aligned_empty((batch,), np.int32),
            status=aligned_empty((batch,), np.int32),
            log_normalizer=self.log_normalizer,
        )
        self.result.tokens.fill(-1)
        for values in self.result[1:]:
            if values is not None:
                values.fill(0)
        self.drafts, self.lengths, starts = self._read_drafts()
        self.target = Side(call, call.target, None if starts is None else starts + rows)
        self.draft = None if call.draft is None else Side(call, call.draft, starts)
        self.kind: Kinds = np.where(self.target.greedy, _GREEDY, _SAMPLED)
        if self.draft is not None:
            self.kind[self.draft.greedy & ~self.target.greedy] = _GREEDY_DRAFT
        self.seeds: UInt64 = split_seed(call.seed, batch) if isinstance(call.seed, int) else host(call.seed)
        self.steps: UInt64 = per_row(call.step, batch).astype(np.uint64)
        self.position, self.draw = per_row(call.position, batch), per_row(call.draw, batch)

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
            wrong, lengths = np.zeros(batch, np.bool_), np.full(batch, width)
        status[wrong] |= Status.LENGTH_OUT_OF_RANGE

        ends_row = (ids < 0) | (ids >= call.vocab_size) | (np.arange(width) >= lengths[:, None])
        first = np.where(ends_row, np.arange(width), width).min(axis=1, initial=width)
        cut = np.flatnonzero(first < lengths)
        out_of_range = cut[ids[cut, first[cut]] != -1]
        status[out_of_range] |= Status.TOKEN_OUT_OF_RANGE
        # Ids behind a row's end may be anything: no longer looked at, they must still index.
        return np.where(ends_row, 0, ids).astype(np.intp), first, starts

    def run(self) -> ChainResult:
        rows = np.arange(self.call.batch_size)
        if self.call.active is not None:
            active = host(self.call.active).astype(np.bool_)
            rows = rows[active]
            self.result.status[~active] = 0
        for start in range(0, rows.size, _BLOCK_ROWS):
            self._walk(rows[start : start + _BLOCK_ROWS])
        return self.result

    def _walk(self, alive: Indices) -> None:
        """Take rows down the chain until none is left."""
        width = int(self.lengths[alive].max(initial=0))
        (word,) = draw_words(
            self.seeds[alive, None],
            self.steps[alive, None],
            Purpose.ACCEPT,
            position=np.arange(width)[None, :],
            words=1,
        )
        coins = coin(word)
        where = np.arange(alive.size)  # of the alive rows in coins
        for i in range(width + 1):
            at_end = self.lengths[alive] == i
            for block in self._blocks(np.flatnonzero(at_end)):
                self._finish(alive[block], i)
            alive, where = alive[~at_end], where[~at_end]
            accepted = np.zeros(alive.size, np.bool_)
            for block in self._blocks(np.arange(alive.size)):
                accepted[block] = self._step(alive[block], i, coins[where[block], i])
            alive, where = alive[accepted], where[accepted]

    def _blocks(self, rows: Indices) -> Iterator[Indices]:
        size = max(1, _BLOCK_SCORES // self.call.vocab_size)
        for start in range(0, rows.size, size):
            yield rows[start : start + size]

    def _step(self, b: Indices, i: int, coins: Float32) -> Bools:
        """Test the drafts of rows b at position i and answer the rows that stop there. True: accepted."""
        accepted = np.zeros(b.size, np.bool_)
        test_of_kind = {_GREEDY: self._test_greedy, _SAMPLED: self._test_sampled, _GREEDY_DRAFT: self._test_sampled}
        for kind, rows in _groups(self.kind[b]):
            accepted[rows] = test_of_kind[kind](b[rows], i, coins[rows])
        self.result.tokens[b[accepted], i] = self.drafts[b[accepted], i]
        self.result.num_accepted[b[accepted]] = i + 1
        return accepted

    def _test_greedy(self, b: Indices, i: int, coins: Float32) -> Bools:
        rows = Rows(self.target, b, i)
        best, status = np.argmax(rows.scores, axis=1), rows.status
        accepted = (status == 0) & (best == self.drafts[b, i])
        self._answer(b[~accepted], i, best[~accepted], status[~accepted])
        return accepted

    def _test_sampled(self, b: Indices, i: int, coins: Float32) -> Bools:
        draft = None if self.draft is None else Rows(self.draft, b, i)
        draft_greedy = self.kind[b[0]] == _GREEDY_DRAFT
        proposal = Proposal(self.drafts[b, i], Rows(self.target, b, i), draft, draft_greedy)
        accepted, status = accept(self.rule, proposal, coins)
        rejected = np.flatnonzero(~accepted & (status == 0))
        if rejected.size:
            weights, status[rejected] = residual(self.rule, proposal.take(rejected))
            tokens = self._race(b[rejected], i, weights, Purpose.RESIDUAL)
            self._answer(b[rejected], i, tokens, status[rejected])
        self.result.status[b] |= status
        return accepted

    def _finish(self, b: Indices, i: int) -> None:
        """Answer rows b, whose next token comes from the target at position i without a rejection."""
        for kind, subset in _groups(np.minimum(self.kind[b], _SAMPLED)):
            rows = Rows(self.target, b[subset], i)
            if kind == _GREEDY:
                tokens, status, log_sum = np.argmax(rows.scores, axis=1), rows.status, np.zeros(subset.size)
            else:
                tokens = self._race(rows.b, i, rows.weights, self.call.purpose or Purpose.BONUS)
                status = rows.status | rows.normalizer_status
                log_sum = rows.top / rows.temperature.astype(np.float64) + np.log(rows.weights.total())
            self._answer(rows.b, i, tokens, status)
            if self.log_normalizer is not None:
                self.log_normalizer[rows.b] = np.where(status, np.nan, log_sum)

    def _race(self, b: Indices, i: int, weights: Weights, purpose: Purpose) -> Indices:
        sampling = self.call.purpose is not None
        return race(
            weights,
            self.seeds[b],
            self.steps[b],
            purpose,
            position=self.position[b] if sampling else np.full(b.size, i),
            draw=self.draw[b],
            segment=self.call.segment,
        )

    def _answer(self, b: Indices, i: int, tokens: Indices, status: Statuses) -> None:
        """Write the token that ends rows b at position i, or -1 where their rows cannot be used."""
        self.result.tokens[b, i] = np.where(status, -1, tokens)
        self.result.status[b] |= status


def _groups(kinds: Kinds) -> Iterator[tuple[int, Indices]]:
    """Each kind that occurs, and where."""
    for kind in (_GREEDY, _SAMPLED, _GREEDY_DRAFT):
        rows = np.flatnonzero(kinds == kind)
        if rows.size:
            yield kind, rows
