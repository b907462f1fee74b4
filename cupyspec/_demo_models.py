"""Two small language models for the demo: n-gram models over the words and punctuation of one text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

UNKNOWN = -1  # a piece that the text does not have
TARGET_CONTEXT, DRAFT_CONTEXT = 4, 2
_DISCOUNT = 0.5
_PIECE = re.compile(r" ?\w+(?:'\w+)?| ?[^\w\s]|\s+")  # joined again they are the text, to the letter


def language_reference() -> str:
    """Paragraphs of prose from the Python language reference, which `help()` reads and every Python ships."""
    from pydoc_data.topics import topics

    paragraphs = []
    for topic in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[topic]):
            text = " ".join(block.split()).removeprefix("* ")
            # Headings, grammar, code and tables are left out: unwrapped they would read as noise.
            if re.match(r"[A-Z].{30,}[.:]$", text) and not re.search(r"::=|>>>|\*\*\*|---|===|\|", text):
                paragraphs.append(text)
    return "\n\n".join(dict.fromkeys(paragraphs))  # some stand under several topics


class NgramModel:
    """The next piece given up to `context` pieces before it: interpolated absolute discounting (Ney et al., 1994).

    The text's positions are sorted by the piece before, then by the one before that, and so on: the places where a
    context occurs are one range, and each further piece narrows it.
    """

    def __init__(self, tokens: npt.NDArray[np.int64], vocab_size: int, context: int) -> None:
        before = [np.concatenate([np.full(back, UNKNOWN), tokens[:-back]]) for back in range(1, context + 1)]
        order = np.lexsort(before[::-1])  # the last key is the first to sort by
        self._before = [column[order] for column in before]
        self._next = tokens[order]
        self._vocab_size = vocab_size
        self._unigram = np.bincount(tokens, minlength=vocab_size) / len(tokens)

    def probabilities(self, context: Sequence[int]) -> npt.NDArray[np.float64]:
        """[V], sums to 1, positive everywhere: every piece of the vocabulary occurs in the text."""
        row, low, high = self._unigram, 0, len(self._next)
        for column, piece in zip(self._before, reversed(context), strict=False):
            if piece == UNKNOWN:
                break
            first, last = np.searchsorted(column[low:high], [piece, piece + 1])
            low, high = low + int(first), low + int(last)
            if low == high:
                break
            counts = np.bincount(self._next[low:high], minlength=self._vocab_size)
            shared = _DISCOUNT * np.count_nonzero(counts) / (high - low)  # mass taken from the pieces seen here
            row = shared * row + np.maximum(counts - _DISCOUNT, 0) / (high - low)
        return row

    def logits(self, context: Sequence[int]) -> npt.NDArray[np.float32]:
        """[V] float32: natural logarithms of the probabilities, one of many logit rows with this softmax."""
        return np.log(self.probabilities(context)).astype(np.float32)


@dataclass(frozen=True)
class LanguageModels:
    """A target that sees four pieces back and a draft that sees two, over one vocabulary."""

    pieces: list[str]  # id -> text
    text: npt.NDArray[np.int64]  # the text as ids
    target: NgramModel
    draft: NgramModel

    def encode(self, prompt: str) -> list[int]:
        """Ids of a prompt's pieces, UNKNOWN for those that the text never has."""
        ids = {piece: token for token, piece in enumerate(self.pieces)}
        # A prompt's first word has no space before it, and may stand in the text only with one.
        return [ids.get(piece, ids.get(" " + piece, UNKNOWN)) for piece in _PIECE.findall(prompt.rstrip())]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids."""
        return "".join(self.pieces[token] for token in tokens)


def build_models(text: str) -> LanguageModels:
    """Both models of a text. ValueError if there is too little of it to learn from."""
    found = _PIECE.findall(text)
    if len(found) < 100:
        raise ValueError(f"too short: {len(found)} words and punctuation marks, at least 100 are needed")
    ids = {piece: token for token, piece in enumerate(dict.fromkeys(found))}
    tokens = np.array([ids[piece] for piece in found], np.int64)
    target, draft = (NgramModel(tokens, len(ids), context) for context in (TARGET_CONTEXT, DRAFT_CONTEXT))
    return LanguageModels(list(ids), tokens, target, draft)
