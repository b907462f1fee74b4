"""Tools to look inside a call: every random number it uses, and seeds whose coins are known."""

from cupyspec._draws import Draws
from cupyspec.testing.randomness import draws, seed_with

__all__ = ["Draws", "draws", "seed_with"]
