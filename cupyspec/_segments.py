"""The segment: the fixed group of consecutive token ids in which weights are summed and raced.

One size for every dtype, device and rule. It is part of the contract: the same seed gives other tokens under another size.
"""

from __future__ import annotations

SEG = 1024


def segment_count(vocab_size: int, segment: int = SEG) -> int:
    """Segments that cover `vocab_size` ids."""
    return -(-vocab_size // segment)
