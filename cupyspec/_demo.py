"""`cupyspec demo`: speculative decoding of real text with two small models, and figures that show it is right."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

import cupyspec
from cupyspec._compile import import_cupy
from cupyspec._demo_checks import SURE_FAULT, LawCheck, check_law, median_seconds, plain_verify, softmax
from cupyspec._demo_models import (
    DRAFT_CONTEXT,
    TARGET_CONTEXT,
    UNKNOWN,
    LanguageModels,
    build_models,
    language_reference,
)
from cupyspec._draws import chain_draws
from cupyspec._philox import split_seed
from cupyspec.diagnostics import expected_tokens
from cupyspec.rules import Sigmoid, Token

Logits = npt.NDArray[np.float32]
Kind = Literal["accepted", "resampled", "bonus"]

TEXT_LIMIT = 2_000_000  # characters: what keeps building the models to about a second
MODERN_VOCABULARY = 128_256  # Llama 3's
LINE = 78

# ANSI colour on a terminal, else a mark after the token.
COLOUR: dict[Kind, str] = {"accepted": "32", "resampled": "1;31", "bonus": "1;36"}
MARK: dict[Kind, str] = {"accepted": "", "resampled": "~", "bonus": "+"}


class OptionError(Exception):
    """A value that an option cannot have, found while the demo runs."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"argument {option}: {message}")


class Device:
    """Where the arrays of the demo live. The models stay on the CPU."""

    def __init__(self, name: str) -> None:
        self.xp: Any = _cupy_with_gpu() if name == "cuda" else np
        self.on_gpu = name == "cuda"
        self.name = f"CUDA device ({_gpu_name(self.xp)})" if self.on_gpu else "CPU"

    def array(self, values: npt.ArrayLike) -> Any:
        """The values in an array on this device."""
        return self.xp.asarray(values)

    def host(self, array: Any) -> npt.NDArray[Any]:
        """An array of this device in NumPy."""
        values: npt.NDArray[Any] = array.get() if self.on_gpu else array
        return values

    def synchronize(self) -> None:
        """Wait for work that was launched."""
        if self.on_gpu:
            self.xp.cuda.get_current_stream().synchronize()


def _cupy_with_gpu() -> Any:
    try:
        cupy = import_cupy()
    except ImportError as error:
        raise OptionError("--device", str(error)) from None
    try:
        if cupy.cuda.runtime.getDeviceCount():
            return cupy
        reason = "CuPy sees no CUDA device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        reason = str(error)
    raise OptionError("--device", f"cuda needs an NVIDIA GPU and its driver ({reason}): see `cupyspec doctor`")


def _gpu_name(cupy: Any) -> str:
    name: bytes = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
    return name.decode()


class Call(NamedTuple):
    """One target call: what `verify()` was given, and what it answered."""

    step: int
    draft_tokens: Any  # [1, K]
    target_logits: Any  # [1, K+1, V]
    draft_logits: Any  # [1, K, V]
    num_accepted: int


@dataclass
class Run:
    """A decoded text and what was seen on the way."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)  # sum(min(p, q)) where a draft was tested
    # Logit rows at the place where a wrong law would show best: for the check.
    telling_score: float = -1.0
    telling_context: list[int] = field(default_factory=list)
    telling_rows: tuple[Logits, Logits] | None = None  # target, draft

    def look_at(self, target: Logits, draft: Logits, temperature: float, context: list[int], tested: bool) -> None:
        """Note a place that the run passed."""
        p, q = softmax(target, temperature), softmax(draft, temperature)
        overlap = float(np.minimum(p, q).sum())
        if tested:
            self.overlaps.append(overlap)
        # The models differ, and the target has many likely pieces.
        score = (1 - overlap) * -float(p @ np.log(p, where=p > 0, out=np.zeros_like(p)))
        if score > self.telling_score:
            self.telling_score, self.telling_context, self.telling_rows = score, context, (target, draft)


def decode(models: LanguageModels, prompt: list[int], options: Namespace, device: Device) -> Run:
    """At least `options.tokens` tokens after the prompt, up to `draft_length` + 1 of them by each target call."""
    K, seed, sampling = options.draft_length, options.seed, cupyspec.Sampling(temperature=options.temperature)
    vocab_size, run = len(models.pieces), Run()
    while len(run.tokens) < options.tokens:
        context = prompt + run.tokens
        step = len(run.tokens)  # new to this seed at every call; drafts and verification share it
        drafts: list[int] = []
        draft_logits = np.empty((1, K, vocab_size), np.float32)
        for i in range(K):
            draft_logits[0, i] = models.draft.logits(context + drafts)
            row = device.array(draft_logits[:, i])
            drafted = cupyspec.sample(row, seed=seed, step=step, position=i, sampling=sampling, check=True)
            drafts.append(int(drafted.tokens[0]))

        # A neural target scores all K + 1 places in one pass: that is what drafting saves.
        target_logits = np.stack([models.target.logits(context + drafts[:i]) for i in range(K + 1)])[None]
        arrays = (
            device.array(np.array([drafts], np.int32)),
            device.array(target_logits),
            device.array(draft_logits),
        )
        verified = cupyspec.verify(*arrays, seed=seed, step=step, rule=options.rule, sampling=sampling, check=True)

        accepted = int(verified.num_accepted[0])
        run.tokens += device.host(verified.tokens)[0, : accepted + 1].tolist()
        run.kinds += itertools.repeat("accepted", accepted)
        run.kinds.append("bonus" if accepted == K else "resampled")
        run.calls.append(Call(step, *arrays, accepted))
        for i in range(min(accepted + 1, max(K, 1))):
            draft = draft_logits[0, i] if K else models.draft.logits(context)
            run.look_at(target_logits[0, i], draft, options.temperature, context + drafts[:i], tested=K > 0)
    return run


def show_text(prompt: str, pieces: list[str], kinds: list[Kind], colour: bool) -> str:
    """The text with its tokens told apart, wrapped between words."""
    shown, column = [prompt], len(prompt)
    for piece, kind in zip(pieces, kinds, strict=True):
        mark = "" if colour else MARK[kind]
        word = piece.rstrip()
        gap = piece[len(word) :]
        if word.startswith(" ") and column + len(word + mark) > LINE:
            word, column = word[1:], 0
            shown.append("\n")
        shown.append((f"\x1b[{COLOUR[kind]}m{word}\x1b[0m" if colour and word else word + mark) + gap)
        column = len(gap) - gap.rindex("\n") - 1 if "\n" in gap else column + len(word + mark + gap)
    return "".join(shown)


def legend(colour: bool) -> str:
    """What the colours or marks mean."""
    meaning: dict[Kind, str] = {
        "accepted": "accepted draft",
        "resampled": "resampled after a rejection",
        "bonus": "bonus, from the target after the last draft",
    }
    if colour:
        return "; ".join(f"\x1b[{COLOUR[kind]}m{text}\x1b[0m" for kind, text in meaning.items())
    return "; ".join(f"word{MARK[kind]} {text}" for kind, text in meaning.items())


def report_acceptance(run: Run, K: int, exact: bool) -> str:
    """Acceptance and tokens per call beside what theory says of them."""
    calls, emitted = len(run.calls), len(run.tokens)
    if K == 0:
        return f"Tokens per target call  {emitted / calls:.2f} ({calls} calls): nothing is drafted, each call gives one token"
    accepted, tested = emitted - calls, len(run.overlaps)
    overlap = np.array(run.overlaps)
    mean = float(overlap.mean().clip(0, 1))
    per_call = np.array([call.num_accepted + 1 for call in run.calls])
    found, predicted = float(per_call.mean()), expected_tokens(mean, K)
    error = float(per_call.std() / math.sqrt(calls))
    deviation = float(np.sqrt((overlap * (1 - overlap)).clip(0).sum())) / tested
    lines = [
        f"Acceptance rate         {accepted / tested:.3f}: {accepted} of {tested} drafts tested",
        f"  expected              {mean:.3f} +- {deviation:.3f}: mean of sum(min(p, q)) at the same places"
        + ("" if exact else ", for the exact rule"),
        f"Tokens per target call  {found:.2f} +- {error:.2f}: {emitted} tokens, {calls} calls",
        f"  formula               {predicted:.2f}: (1 - a^(K+1)) / (1 - a) with a = {mean:.3f}, K = {K}",
    ]
    if not exact:
        lines.append(
            "  This rule is lossy: it accepts drafts that the exact rule, for which both figures hold, rejects."
        )
    else:
        lines.append(
            "  The formula takes every draft to be accepted with the same chance, whatever came before. In\n"
            f"  text that chance changes from place to place (here from {overlap.min():.2f} to {overlap.max():.2f}), and later drafts are\n"
            "  tested only where earlier ones were easy: the two agree roughly"
            + ("; here within the run's noise." if abs(found - predicted) <= 2 * error else ".")
        )
    return "\n".join(lines)


def report_time(run: Run, options: Namespace, device: Device) -> str:
    """Time of a verification beside the plain scheme: on inputs of this run, and on the same at a larger vocabulary."""
    vocab_size = run.calls[0].target_logits.shape[-1]
    library = "CuPy" if device.on_gpu else "NumPy"
    lines = [f"Time per verification   of one row, K = {options.draft_length}, float32; medians over the same inputs"]
    widths = [vocab_size]
    if vocab_size < MODERN_VOCABULARY and options.draft_length <= 32:  # more drafts would take gigabytes
        widths.append(MODERN_VOCABULARY)
    for width in widths:
        calls = [_widened(call, width, device) for call in run.calls[: 16 if width == vocab_size else 4]]
        times = _measure(calls, options, device)
        if times is None:
            lines.append(
                f"  V = {width:<8}          not measured: the plain scheme and cupyspec accept different drafts"
            )
            continue
        ours, plain = times
        slower, factor = ("plain", plain / ours) if plain >= ours else ("cupyspec", ours / plain)
        lines.append(
            f"  V = {width:<8}          cupyspec {ours * 1e6:.0f} us, plain {plain * 1e6:.0f} us: "
            f"{slower} takes {factor:.1f} times as long" + (" (logits repeated)" if width != vocab_size else "")
        )
    lines.append(
        f"  Plain is the usual scheme in {library}: softmax of all rows, then all ratios, residuals and normalisers. Its\n"
        "  answers were compared with cupyspec's first."
    )
    return "\n".join(lines)


def _widened(call: Call, width: int, device: Device) -> Call:
    """The call with its logits repeated up to a vocabulary of `width`: ratios p / q stay nearly what they were."""

    def widen(rows: Any) -> Any:
        copies = -(-width // rows.shape[-1])
        return device.xp.ascontiguousarray(device.xp.tile(rows, copies)[..., :width])

    return call._replace(target_logits=widen(call.target_logits), draft_logits=widen(call.draft_logits))


def _measure(calls: list[Call], options: Namespace, device: Device) -> tuple[float, float] | None:
    """Seconds of cupyspec and of the plain scheme over these calls in turn; None if their answers differ."""
    temperature = options.temperature if options.temperature >= 2.0**-126 else 1.0  # the plain scheme divides by it
    sampling = cupyspec.Sampling(temperature=temperature)

    def fused(call: Call, rule: Token | Sigmoid) -> cupyspec.Verification:
        arrays = (call.draft_tokens, call.target_logits, call.draft_logits)
        return cupyspec.verify(*arrays, seed=options.seed, step=call.step, rule=rule, sampling=sampling)

    plain_inputs = []
    for call in calls:
        rows = (call.draft_tokens[0], call.target_logits[0], call.draft_logits[0])
        seeds, steps = split_seed(options.seed % 2**64, 1), np.array([call.step], np.uint64)
        draws = chain_draws(seeds, steps, options.draft_length, rows[1].shape[-1])
        plain_inputs.append((*rows, temperature, device.array(draws.coins[0]), float(draws.picks[0, 0, 0, 0])))
        # The same coins accept the same drafts. After a rejection comes a token that p favours over q.
        accepted, token = plain_verify(device.xp, *plain_inputs[-1])
        if accepted != int(fused(call, Token()).num_accepted[0]):
            return None
        if accepted < options.draft_length:
            p, q = (softmax(device.host(side[accepted]), temperature) for side in rows[1:])
            if not p[token] > q[token]:
                return None

    turn, plain_turn = itertools.cycle(calls), itertools.cycle(plain_inputs)

    def time_fused() -> None:
        fused(next(turn), options.rule)
        device.synchronize()

    return median_seconds(time_fused), median_seconds(lambda: plain_verify(device.xp, *next(plain_turn)))


def _statistic(check: LawCheck) -> str:
    p_value = f"p-value {check.p_value:.3g}" if check.p_value >= 1e-99 else "p-value below 1e-99"
    strays = f", {check.strays} tokens that should hardly come" if check.strays else ""
    return f"chi-square {check.chi_square:.1f}{strays}, {p_value}"


def report_law(run: Run, options: Namespace, models: LanguageModels, device: Device) -> tuple[str, bool]:
    """Many draws from one place of the text against the target's own law; False if they certainly differ."""
    if run.telling_rows is None:
        raise ValueError("a run without a target call has no rows to draw from")
    target, draft = run.telling_rows
    vocab_size, columns = len(target), min(options.draft_length, 1)
    draws = max(2000, min(10_000, 40_000_000 // vocab_size))
    random: dict[str, Any] = {"seed": options.seed, "step": len(run.tokens)}  # a step that the run has not used
    sampling = cupyspec.Sampling(temperature=options.temperature)
    # One row of memory, seen as many: strides of 0 are read in place.
    target_rows = device.xp.broadcast_to(device.array(target), (draws, columns + 1, vocab_size))
    draft_rows = device.xp.broadcast_to(device.array(draft), (draws, 1, vocab_size))
    drafted = cupyspec.sample(draft_rows[:, 0], sampling=sampling, **random)
    verified = cupyspec.verify(
        drafted.tokens[:, None][:, :columns],
        target_rows,
        draft_rows[:, :columns],
        rule=options.rule,
        sampling=sampling,
        **random,
    )
    law = softmax(target, options.temperature)
    check = check_law(device.host(verified.tokens)[:, 0], law)
    overlap = float(np.minimum(law, softmax(draft, options.temperature)).sum())

    place = models.decode([token for token in run.telling_context[-TARGET_CONTEXT:] if token != UNKNOWN])
    lines = [
        f"Tokens follow the target?  {draws} verifications after {place.strip()!r}, where sum(min(p, q)) is {overlap:.2f}"
    ]
    statistic = f"{check.cells} cells, {_statistic(check)}"
    if not options.rule.exact:
        lines += [
            f"  Not exactly: {options.rule} is a lossy rule. Total variation from the target {check.distance:.3f}, where",
            f"  draws of an exact rule would show about {check.noise:.3f} and the draft's own {1 - overlap:.3f} ({statistic}).",
        ]
        return "\n".join(lines), True
    right = check.p_value >= SURE_FAULT
    if np.count_nonzero(law) == 1:
        lines.append(
            f"  {'Yes: each is the one token' if right else 'NO: not each is the one token'} that the target allows."
        )
        return "\n".join(lines), right
    lines.append(f"  {'Yes' if right else 'NO'}: {statistic}")
    lines.append(
        "  p is the chance of a difference this large if they do. A p below 1e-6 is taken as a fault."
        if right
        else "  Draws of the target differ as much less than once in a million runs: this is a fault, please report it."
    )
    if columns:
        before = check_law(device.host(drafted.tokens), law)
        lines.append(f"  The drafts themselves, before verification: {_statistic(before)}")
    return "\n".join(lines), right


def read_text(path: str | None) -> str:
    """The text to learn from. OptionError if it cannot be had."""
    if path is None:
        try:
            return language_reference()
        except ImportError:
            raise OptionError("--text", "this Python comes without pydoc_data: give a text file of your own") from None
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            return file.read(TEXT_LIMIT)
    except OSError as error:
        raise OptionError("--text", f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError("--text", f"{path} is not UTF-8 text") from None


def run_demo(options: Namespace) -> int:
    """Print the demo; 0, or 1 if the tokens do not follow the target. OptionError for a value that cannot be used."""
    device = Device(options.device)
    text = read_text(options.text)
    start = time.perf_counter()
    try:
        models = build_models(text)
    except ValueError as error:
        raise OptionError("--text", f"{options.text} is {error}") from None
    built = time.perf_counter() - start

    prompt_text = options.prompt
    if prompt_text is None:
        prompt_text = models.decode(models.text[:3].tolist())
    prompt = models.encode(prompt_text)
    source = options.text or "Python's language reference"
    print(
        f"{source}: {len(models.text)} tokens, {len(models.pieces)} different; models built in {built:.2f} s\n"
        f"target: {TARGET_CONTEXT + 1}-gram, draft: {DRAFT_CONTEXT + 1}-gram; {options.draft_length} drafts per target call, "
        f"temperature {options.temperature:g}, seed {options.seed}\n"
        f"rule: {options.rule}, {'exact' if options.rule.exact else 'lossy'}; on the {device.name}"
    )
    if UNKNOWN in prompt:
        print(
            f"{prompt.count(UNKNOWN)} of the prompt's {len(prompt)} tokens are not in that text: the models see what follows them"
        )

    run = decode(models, prompt, options, device)
    colour = (
        bool(sys.stdout and sys.stdout.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
    pieces = [models.pieces[token] for token in run.tokens[: options.tokens]]
    print(f"\n{show_text(prompt_text, pieces, run.kinds[: options.tokens], colour)}\n\n{legend(colour)}\n")
    print(report_acceptance(run, options.draft_length, options.rule.exact), end="\n\n")
    print(report_time(run, options, device), end="\n\n")
    law, right = report_law(run, options, models, device)
    print(law)
    return 0 if right else 1
