"""The command line: `cupyspec demo`, `cupyspec check` and `cupyspec doctor`, also as `python -m cupyspec`."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable, Sequence

from cupyspec import __version__
from cupyspec.rules import Sigmoid, Token


def _integer(low: int, high: int, allowed: str) -> Callable[[str], int]:
    """An argparse type: an integer in [low, high]."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
        return value

    return parse


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 3.4e38:  # it is used in float32
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text!r}")
    return value


def _draws(text: str) -> int:
    """An integer, also as 1e9."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (1 <= value <= 1e15 and value == int(value)):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, as 1e9, got {text!r}")
    return int(value)


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _rule(text: str) -> Token | Sigmoid:
    name, given, constants = text.partition(":")
    try:
        numbers = [float(number) for number in constants.split(",")] if given else []
        if name == "token" and len(numbers) <= 1:
            return Token(*numbers)
        if name == "sigmoid" and len(numbers) in (0, 2):
            return Sigmoid(*numbers)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    raise argparse.ArgumentTypeError(f"must be token[:LENIENCE] or sigmoid[:ALPHA,BETA], got {text!r}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cupyspec", description="The verification step of speculative sampling.")
    parser.add_argument("--version", action="version", version=f"cupyspec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{demo,check,doctor}")

    demo = commands.add_parser(
        "demo",
        help="speculative decoding of real text with two small models",
        description="Decode text with a target and a draft model, both learned from one text in a second, through "
        "sample() and verify(); then show acceptance, time, and that the tokens follow the target. "
        "Exit code 1 if they do not.",
    )
    demo.set_defaults(parser=demo)
    demo.add_argument("--text", metavar="FILE", help="UTF-8 text to learn from (default: Python's language reference)")
    demo.add_argument("--prompt", metavar="TEXT", help="what to continue (default: the first words of the text)")
    demo.add_argument(
        "--tokens",
        type=_integer(1, 2**31, "an integer of at least 1"),
        default=150,
        metavar="N",
        help="tokens to generate (default: %(default)s)",
    )
    demo.add_argument(
        "--draft-length",
        type=_integer(0, 255, "an integer from 0 to 255"),
        default=4,
        metavar="K",
        help="drafts per target call (default: %(default)s)",
    )
    demo.add_argument(
        "--temperature", type=_temperature, default=1.0, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    demo.add_argument(
        "--rule",
        type=_rule,
        default=Token(),
        metavar="RULE",
        help="token, token:LENIENCE (lossy below 1), sigmoid or sigmoid:ALPHA,BETA (lossy) (default: token)",
    )
    demo.add_argument(
        "--seed",
        type=_integer(-(2**63), 2**64 - 1, "an integer from -2^63 to 2^64 - 1"),
        default=0,
        metavar="SEED",
        help="the same seed gives the same text (default: %(default)s)",
    )
    demo.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")

    check = commands.add_parser(
        "check",
        help="statistical proof that tokens follow their exact laws, on this machine",
        description="Draw with sample() and verify() under every rule and dtype, count, and test the counts against exact "
        "probabilities. The table says how small a fault each check finds. Exit code 1 if one fails or cannot decide.",
    )
    check.set_defaults(parser=check)
    check.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    check.add_argument(
        "--draws",
        type=_draws,
        metavar="N",
        help="verifications of each check, 1e9 say (default: what takes about 20 seconds)",
    )
    check.add_argument(
        "--minutes",
        type=_minutes,
        metavar="M",
        help="stop after about so long, the time shared by the checks; without --draws, use all of it",
    )
    check.add_argument(
        "--seed",
        type=_integer(-(2**63), 2**64 - 1, "an integer from -2^63 to 2^64 - 1"),
        default=0,
        metavar="SEED",
        help="the same seed gives the same draws (default: %(default)s)",
    )
    check.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only checks whose name contains this, as 'Sigmoid' or 'sample|chain' (a regular expression)",
    )
    check.add_argument("--json", metavar="FILE", help="write a report there")

    commands.add_parser(
        "doctor",
        help="what is installed, what is missing and how to get it",
        description="Show versions and devices, make a call whose answer is known, and say how to get what is missing. "
        "Exit code 0 when the CPU path works.",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    # Imported here, so that `--help` and mistakes in the options answer at once.
    if options.command == "doctor":
        from cupyspec._doctor import run_doctor

        return run_doctor()
    from cupyspec._demo import OptionError, run_demo

    try:
        if options.command == "check":
            from cupyspec._check import run_check

            return run_check(options)
        return run_demo(options)
    except OptionError as error:
        parser: argparse.ArgumentParser = options.parser
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. A wrong option exits with 2, as argparse has it."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # text of any script on a terminal of any code page
    try:
        code = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at exit
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
