"""Verification rules: what is accepted, and what replaces a rejected draft."""

from cupyspec.rules.sigmoid import Sigmoid
from cupyspec.rules.token import Token

__all__ = ["Sigmoid", "Token"]
