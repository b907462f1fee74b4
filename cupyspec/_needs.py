"""What the calls of a range of shapes need: kernels to compile, bytes of scratch. Found by planning such calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cupyspec._compile import CupyBackend, Specialisation
from cupyspec._segments import SEG
from cupyspec.rules import Sigmoid, Token
from cupyspec.rules._launch import ChainPlan, plan_chain

_EACH_BATCH = 1024  # up to here every batch size is planned: plans change with the device's size, far below


@dataclass(frozen=True)
class Range:
    """Calls of `verify` with up to so many rows, drafts and ids, with and without draft scores and normalisers."""

    max_batch_size: int
    max_draft_tokens: int
    vocab_size: int
    target_dtype: str
    draft_dtype: str
    token_dtype: str
    rule: Token | Sigmoid

    def kernels(self, backend: CupyBackend) -> list[tuple[Specialisation, str]]:
        """Every kernel that one of the calls launches."""
        drafts = sorted({0, min(1, self.max_draft_tokens), self.max_draft_tokens})
        plans = (plan for n in drafts for plan in self._plans(backend, self._powers(1), n))
        return list({(launch.specialisation, launch.name): None for plan in plans for launch in plan.launches})

    def scratch(self, backend: CupyBackend) -> int:
        """Bytes of scratch that are enough for each of the calls."""
        each = min(self.max_batch_size, _EACH_BATCH)
        batches = [*range(1, each + 1), *self._powers(each)]
        return max(plan.scratch for plan in self._plans(backend, batches, self.max_draft_tokens))

    def _powers(self, first: int) -> list[int]:
        sizes = [first]
        while sizes[-1] < self.max_batch_size:
            sizes.append(min(2 * sizes[-1], self.max_batch_size))
        return sizes

    def _plans(self, backend: CupyBackend, batches: Iterable[int], drafts: int) -> Iterator[ChainPlan]:
        sigmoid = isinstance(self.rule, Sigmoid)
        for batch in batches:
            for draft_dtype in (self.draft_dtype, None) if drafts else (None,):
                for normalized in (
                    ((False, False),) if sigmoid else ((False, False), (True, False), (False, True), (True, True))
                ):
                    yield plan_chain.__wrapped__(
                        batch=batch,
                        drafts=drafts,
                        vocab=self.vocab_size,
                        segment=SEG,
                        target_dtype=self.target_dtype,
                        draft_dtype=draft_dtype,
                        token_dtype=self.token_dtype,
                        sigmoid=sigmoid,
                        target_normalized=normalized[0],
                        draft_normalized=normalized[1] and draft_dtype is not None,
                        multiprocessors=backend.multiprocessors,
                        threads=backend.threads,
                        max_cluster=backend.max_cluster,
                    )


def compile_for(ranges: Iterable[Range]) -> int:
    """Compile and load, on the current device, what calls of these ranges launch; how many kernels that is."""
    backend = CupyBackend()
    kernels = dict.fromkeys(kernel for calls in ranges for kernel in calls.kernels(backend))
    for specialisation, name in kernels:
        backend.compile(specialisation, name)
    return len(kernels)
