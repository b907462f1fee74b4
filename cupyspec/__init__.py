"""cupyspec: the verification step of speculative sampling, for CUDA and CPU arrays of any framework."""

from cupyspec._sampling import Sampling
from cupyspec._seeds import row_seeds
from cupyspec._status import Status
from cupyspec.chain import Verification, verify
from cupyspec.diagnostics import expected_tokens
from cupyspec.rules import Sigmoid, Token
from cupyspec.sampling import Sample, sample
from cupyspec.verifier import Verifier
from cupyspec.warmup import warm_up

__version__ = "0.1.0"

__all__ = [
    "Sample",
    "Sampling",
    "Sigmoid",
    "Status",
    "Token",
    "Verification",
    "Verifier",
    "expected_tokens",
    "row_seeds",
    "sample",
    "verify",
    "warm_up",
]
