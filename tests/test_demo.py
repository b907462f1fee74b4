"""`cupyspec demo`: its models, its statistics, its plain scheme, and what the command prints and refuses."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyspec
from cupyspec import _demo
from cupyspec.__main__ import main
from cupyspec._demo_checks import check_law, plain_verify, softmax
from cupyspec._demo_models import UNKNOWN, NgramModel, build_models, language_reference

ROOT = Path(__file__).resolve().parent.parent

STORY = (
    "The cat sat on the mat, and the dog sat on the rug. The dog saw the cat on the mat.\n"
    "Don't sit on the rug, said the cat; the mat is mine, and the rug is the dog's.\n"
)


@pytest.fixture(scope="module")
def models():
    return build_models(STORY * 3)


@pytest.fixture
def story(tmp_path: Path) -> str:
    path = tmp_path / "story.txt"
    path.write_text(STORY * 3, encoding="utf-8")
    return str(path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings of one repeat at the text's own vocabulary: these tests look at everything else."""
    monkeypatch.setattr(_demo, "median_seconds", lambda call: [call(), 1e-3][1])
    monkeypatch.setattr(_demo, "MODERN_VOCABULARY", 0)


def run(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> str:
    assert main(["demo", *options]) == code
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The message of a demo that must end as argparse ends for a wrong option."""
    with pytest.raises(SystemExit) as caught:
        main(["demo", *options])
    assert caught.value.code == 2
    return capsys.readouterr().err


# The models


def test_rows_are_distributions_whatever_the_context(models):
    # Catches discounted mass that is lost or given out twice, and pieces that can never come.
    generator = np.random.default_rng(0)
    contexts = [
        [],
        [UNKNOWN],
        [0, UNKNOWN],
        [UNKNOWN, 3],
        *generator.integers(0, len(models.pieces), (200, 6)).tolist(),
    ]
    contexts += [models.text[i : i + 5].tolist() for i in range(0, len(models.text), 7)]
    for model, context in itertools.product((models.target, models.draft), contexts):
        row = model.probabilities(context)
        assert row.shape == (len(models.pieces),)
        assert row.sum() == pytest.approx(1, abs=1e-12)
        assert row.min() > 0
        logits = model.logits(context)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(softmax(logits, 1.0), row, rtol=1e-5)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_ngram_rows_equal_plain_counting(models, context):
    # Catches a context read in the wrong direction, one piece too short or long, or sorted wrongly.
    text, size = models.text.tolist(), len(models.pieces)
    model = NgramModel(models.text, size, context)
    for given in [text[i : i + 6] for i in range(0, len(text) - 6, 11)] + [[0, 1, 2], [5], []]:
        row = np.bincount(text, minlength=size) / len(text)
        for length in range(1, min(context, len(given)) + 1):
            tail = given[-length:]
            after = [text[i] for i in range(length, len(text)) if text[i - length : i] == tail]
            if not after:
                break
            counts = np.bincount(after, minlength=size)
            row = 0.5 * np.count_nonzero(counts) / len(after) * row + np.maximum(counts - 0.5, 0) / len(after)
        np.testing.assert_allclose(model.probabilities(given), row, rtol=1e-12)


def test_unknown_pieces_end_the_context(models):
    # Catches -1 taken for an index from the end, or matched with the places before the text begins.
    known = models.encode("the cat")
    np.testing.assert_array_equal(
        models.target.probabilities([7, UNKNOWN, *known]), models.target.probabilities([UNKNOWN, *known])
    )
    np.testing.assert_array_equal(models.target.probabilities([UNKNOWN]), models.target.probabilities([]))


def test_pieces_keep_the_text_to_the_letter(models):
    assert models.decode(models.text.tolist()) == STORY * 3
    assert models.decode(models.encode("The cat sat")) == "The cat sat"
    # A first word that the text has only after a space; a word it does not have; a space at the end.
    assert models.encode("sat") == models.encode(" sat") == models.encode("sat ") != [UNKNOWN]
    assert models.encode("The xylophone sat")[1] == UNKNOWN
    assert models.encode("") == []


def test_language_reference_is_prose():
    text = language_reference()
    assert len(text) > 150_000
    assert not re.search(r"::=|>>>|\*\*\*\*", text)
    assert len(build_models(text).pieces) > 2500


# The statistics

LAW = np.array([0.4, 0.3, 0.2, 0.1 - 2e-5, 2e-5, 0.0])


def draws(law: Any, count: int, seed: int) -> Any:
    return np.random.default_rng(seed).choice(len(law), count, p=law)


def test_check_law_is_calibrated():
    # Catches wrong degrees of freedom: 400 p-values of right draws are uniform, their mean .5 within 6 deviations.
    p_values = [check_law(draws(LAW, 3000, seed), LAW).p_value for seed in range(400)]
    assert abs(np.mean(p_values) - 0.5) < 6 * np.sqrt(1 / 12 / 400)
    assert min(p_values) > 1e-6


def test_check_law_noise_is_what_right_draws_show():
    # Catches a noise level that would make a lossy rule look exact.
    law = np.random.default_rng(1).dirichlet(np.ones(50))
    found = [check_law(draws(law, 5000, seed), law) for seed in range(200)]
    assert np.mean([check.distance for check in found]) == pytest.approx(found[0].noise, rel=0.03)


def test_check_law_rejects_another_law():
    # Catches a check that nothing fails: a law off by .04 in total variation, power above .999 at 10,000 draws.
    wrong = LAW + np.array([0.04, -0.04, 0, 0, 0, 0])
    assert all(check_law(draws(wrong, 10_000, seed), LAW).p_value < 0.05 for seed in range(20))
    far = np.full(6, 1 / 6)
    far[5] = 0
    assert check_law(draws(far / far.sum(), 10_000, 0), LAW).p_value < 1e-99


def test_check_law_rejects_an_impossible_token():
    tokens = draws(LAW, 3000, 0)
    tokens[17] = 5
    check = check_law(tokens, LAW)
    assert check.strays == 1
    assert check.p_value == 0


def test_check_law_pools_small_cells():
    # At 3000 draws token 4 expects 0.06: alone it would make the statistic jump by 16 at one draw.
    assert check_law(draws(LAW, 3000, 0), LAW).cells == 4
    tokens = draws(LAW, 3000, 0)
    tokens[0] = 4
    assert check_law(tokens, LAW).p_value > 1e-3


def test_check_law_pools_a_flat_law_into_many_cells():
    # Catches a single pool, which would let any law pass where no token is likely, and cells that expect too little.
    generator = np.random.default_rng(2)
    law = generator.dirichlet(np.full(4000, 3.0))
    p_values = [check_law(draws(law, 8000, seed), law).p_value for seed in range(100)]
    assert abs(np.mean(p_values) - 0.5) < 6 * np.sqrt(1 / 12 / 100)
    check = check_law(draws(law, 8000, 0), law)
    assert 600 < check.cells <= 1600
    assert check_law(generator.integers(0, 4000, 8000), law).p_value < 1e-6


def test_check_law_finds_rare_tokens_beside_a_certain_one():
    # Catches leftovers that vanish in the cell they are pooled with: at a low temperature that is the only cell.
    law = np.array([1 - 1e-40, 1e-40, 0.0])
    assert check_law(np.zeros(3000, np.int64), law).p_value == 1
    check = check_law(np.repeat([0, 1], [2999, 1]), law)
    assert check.strays == 1
    assert check.p_value < 1e-30
    assert check_law(np.ones(3000, np.int64), law).distance == pytest.approx(1)


def test_check_law_of_one_possible_token():
    law = np.array([0.0, 1.0])
    assert check_law(np.ones(10, np.int64), law).p_value == 1
    assert check_law(np.array([1, 0]), law).p_value == 0


def test_softmax_at_temperatures():
    logits = np.array([[0.0, 2.0, 2.0, -np.inf]], np.float32)
    np.testing.assert_array_equal(softmax(logits, 0.0), [[0, 1, 0, 0]])  # the lowest id of a tie
    np.testing.assert_array_equal(softmax(logits, 1e-30), [[0, 0.5, 0.5, 0]])
    expected = np.exp([0.0, 1.0, 1.0, -np.inf])
    np.testing.assert_allclose(softmax(logits, 2.0)[0], expected / expected.sum())


# The plain scheme


def law_of_plain(temperature: float) -> tuple[Any, Any]:
    """The law of the first token with two drafts, coins and picks integrated on a grid, and the target's."""
    target = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]])).astype(np.float32)
    draft = np.log(np.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])).astype(np.float32)
    q = softmax(draft, temperature)
    grid = (np.arange(100) + 0.5) / 100
    law = np.zeros(3)
    for drafts in itertools.product(range(3), repeat=2):
        for coin, pick in itertools.product(grid, grid[::5]):
            coins = np.array([coin, 0.99], np.float32)
            accepted, token = plain_verify(np, np.array(drafts), target, draft, temperature, coins, pick)
            first = drafts[0] if accepted else token
            law[first] += q[0, drafts[0]] * q[1, drafts[1]] / (grid.size * grid[::5].size)
    return law, softmax(target[0], temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_plain_scheme_follows_the_target(temperature):
    # Catches a baseline that is quick because it is wrong: the draft row for the target's, no clip, no temperature.
    law, target = law_of_plain(temperature)
    np.testing.assert_allclose(law, target, atol=0.02)


def test_plain_scheme_stops_where_it_should():
    target = np.log(np.array([[0.9, 0.1], [0.1, 0.9], [0.25, 0.75]])).astype(np.float32)
    draft = np.log(np.array([[0.5, 0.5], [0.9, 0.1]])).astype(np.float32)
    answer = [
        plain_verify(np, np.array(drafts), target, draft, 1.0, np.array(coins), pick)
        for drafts, coins, pick in (
            ([0, 0], [0.9, 0.1], 0.2),  # both accepted, bonus from (.25, .75)
            ([0, 0], [0.9, 0.2], 0.0),  # the second rejected: its residual is token 1 alone
            ([1, 0], [0.3, 0.0], 0.99),  # the first rejected: token 0 alone, and the second draft does not count
        )
    ]
    assert answer == [(2, 0), (1, 1), (0, 0)]
    empty = np.empty((0, 2), np.float32)
    assert plain_verify(np, np.empty(0, int), target[:1], empty, 1.0, np.empty(0), 0.95) == (0, 1)


def test_plain_scheme_with_equal_models_accepts_everything():
    # The residual is zero everywhere: 0 / 0 must not warn, and a draft of probability 0 is no reason to stop.
    rows = np.array([[0.0, 1.0, -200.0]] * 3, np.float32)
    coins = np.array([0.99, 0.99])
    assert plain_verify(np, np.array([0, 1]), rows, rows[:2], 1.0, coins, 0.0) == (2, 0)


# The command

SMALL = ("--tokens", "30", "--draft-length", "3")


def without_times(text: str) -> str:
    return re.sub(r"built in [\d.]+ s|cupyspec \d+ us, plain .*", "", text)


def test_same_seed_same_output_other_seed_other_text(capsys, quick, story):
    # Catches a source of randomness that --seed does not govern, and a seed that has no effect.
    first, again, other = (run(capsys, *SMALL, "--text", story, "--seed", seed) for seed in ("5", "5", "6"))
    assert without_times(first) == without_times(again)
    assert first.split("\n\n")[1] != other.split("\n\n")[1]


def test_output_to_a_file_has_marks_and_no_escape_codes(capsys, quick, story):
    output = run(capsys, *SMALL, "--text", story)
    assert "\x1b" not in output
    assert re.search(r"\w~", output) and re.search(r"\w\+", output)
    assert "word~ resampled after a rejection" in output


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colour_on_a_terminal_unless_refused(capsys, monkeypatch, quick, story, no_color, coloured):
    monkeypatch.setenv("NO_COLOR", no_color)  # no-color.org: set and not empty
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output = run(capsys, *SMALL, "--text", story)
    assert ("\x1b[32m" in output) == coloured
    assert output.count("\x1b[") == 2 * output.count("\x1b[0m")  # each colour is ended
    assert ("~ resampled" in output) != coloured


def test_shown_text_is_the_text(models):
    # Catches a wrap that loses or doubles a space, and lines longer than a terminal.
    tokens = models.text.tolist() * 2
    pieces = [models.pieces[token] for token in tokens]
    kinds = list(itertools.islice(itertools.cycle(["accepted", "resampled", "bonus"]), len(pieces)))
    shown = _demo.show_text("Once", pieces, kinds, colour=False)
    assert max(map(len, shown.splitlines())) <= 80
    assert re.sub(r"[~+]", "", shown).split() == ("Once" + "".join(pieces)).split()
    coloured = _demo.show_text("Once", pieces, kinds, colour=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).split() == ("Once" + "".join(pieces)).split()


def options(**changed: Any) -> Namespace:
    given = {"tokens": 300, "draft_length": 4, "temperature": 1.0, "rule": cupyspec.Token(), "seed": 0, "device": "cpu"}
    return Namespace(**{**given, **changed})


@pytest.mark.parametrize("K", [0, 1, 4])
def test_counts_of_a_run_add_up(models, K):
    # Catches rates over the wrong denominator: a draft after the first rejection is not tested.
    result = _demo.decode(models, [0], options(draft_length=K), _demo.Device("cpu"))
    accepted = [call.num_accepted for call in result.calls]
    assert len(result.tokens) == len(result.kinds) == sum(accepted) + len(accepted) >= 300
    assert result.kinds.count("accepted") == sum(accepted)
    assert result.kinds.count("bonus") == accepted.count(K)
    assert len(result.overlaps) == sum(min(n + 1, K) for n in accepted)
    assert [call.step for call in result.calls] == list(np.cumsum([0, *accepted])[:-1] + np.arange(len(accepted)))


def test_rows_are_those_of_the_text_so_far(models):
    # Catches rows of a context without the latest token: every figure would agree with itself, the text be wrong.
    result, prompt = _demo.decode(models, [3, 4], options(), _demo.Device("cpu")), [3, 4]
    for call in result.calls:
        drafts = call.draft_tokens[0].tolist()
        for i in range(5):
            context = prompt + result.tokens[: call.step] + drafts[:i]
            np.testing.assert_array_equal(call.target_logits[0, i], models.target.logits(context))
            if i < 4:
                np.testing.assert_array_equal(call.draft_logits[0, i], models.draft.logits(context))


def test_no_random_number_is_used_twice(capsys, monkeypatch, quick, story):
    # Catches a step or position that stands still: drafts of a call, or calls, would repeat each other's luck.
    used: dict[str, list[tuple[int, int]]] = {"sample": [], "verify": []}

    def record(name: str) -> None:
        function = getattr(cupyspec, name)

        def recorded(*arrays: Any, **given: Any) -> Any:
            used[name].append((given["step"], given.get("position", 0)))
            return function(*arrays, **given)

        monkeypatch.setattr(cupyspec, name, recorded)

    record("sample")
    record("verify")
    monkeypatch.setattr(_demo, "report_time", lambda *given: "")  # it repeats calls on purpose
    run(capsys, *SMALL, "--text", story)
    for places in used.values():
        assert len(set(places)) == len(places) > 8
    assert {step for step, _ in used["sample"]} == {step for step, _ in used["verify"]}


def test_acceptance_is_the_overlap(models):
    # Catches drafts and verification that share random numbers, or rows shifted by one: within 5 deviations.
    result = _demo.decode(models, [0], options(tokens=2000), _demo.Device("cpu"))
    overlap = np.array(result.overlaps)
    accepted = sum(call.num_accepted for call in result.calls)
    assert abs(accepted - overlap.sum()) < 5 * np.sqrt((overlap * (1 - overlap)).sum())


def test_figures_printed_are_those_of_the_run(models):
    result = _demo.decode(models, [0], options(), _demo.Device("cpu"))
    report = _demo.report_acceptance(result, 4, exact=True)
    calls = len(result.calls)
    assert f"{len(result.tokens) / calls:.2f} +- " in report
    assert f"{len(result.tokens) - calls} of {len(result.overlaps)} drafts tested" in report
    predicted = sum(np.mean(result.overlaps) ** i for i in range(5))
    assert f"formula               {predicted:.2f}" in report


def test_tokens_of_a_wrong_verification_are_rejected(capsys, monkeypatch, quick, story):
    # The planted fault: every draft is accepted. A check that lets it pass proves nothing.
    def accept_all(draft_tokens: Any, target_logits: Any, draft_logits: Any, **given: Any) -> Any:
        answer = right(draft_tokens, target_logits, draft_logits, **given)
        tokens = np.concatenate([draft_tokens, answer.tokens[:, :1]], axis=1)
        return answer._replace(tokens=tokens, num_accepted=np.full_like(answer.num_accepted, draft_tokens.shape[1]))

    right = cupyspec.verify
    monkeypatch.setattr(cupyspec, "verify", accept_all)
    output = run(capsys, "--tokens", "200", "--text", story, code=1)
    assert "NO: " in output
    assert "not measured: the plain scheme and cupyspec accept different drafts" in output


def test_tokens_of_the_exact_rule_are_not_rejected(capsys, quick, story):
    output = run(capsys, *SMALL, "--text", story)
    assert "  Yes: " in output
    assert "The drafts themselves, before verification" in output


@pytest.mark.parametrize("rule", ["token:0.4", "sigmoid", "sigmoid:-100,100"])
def test_lossy_rules_say_so_and_are_no_failure(capsys, quick, story, rule):
    output = run(capsys, *SMALL, "--text", story, "--rule", rule)
    distance, noise = map(float, re.search(r"from the target ([\d.]+).*\n.*about ([\d.]+)", output).groups())
    assert distance > 3 * noise
    assert "lossy" in output
    assert "  Yes: " not in output
    assert re.search(r"cupyspec \d+ us, plain \d+ us", output)  # the plain scheme is compared under the exact rule


def test_temperature_0_follows_the_argmax(capsys, quick, story):
    # Every token is the target's most likely one, whatever the seed.
    first, other = (run(capsys, *SMALL, "--text", story, "--temperature", "0", "--seed", s) for s in ("1", "2"))
    assert first.split("\n\n")[1] == other.split("\n\n")[1]
    assert "Yes: each is the one token" in first


@pytest.mark.parametrize(
    "given",
    [
        ("--draft-length", "0"),
        ("--tokens", "1"),
        ("--temperature", "1e-30"),
        ("--temperature", "1e30"),
        ("--temperature", "0.01"),
        ("--prompt", ""),
        ("--prompt", "the cat"),
        ("--seed", "-1"),
        ("--seed", str(2**64 - 1)),
        ("--draft-length", "40"),
    ],
)
def test_unusual_options_work(capsys, quick, story, given):
    assert "Tokens follow the target?" in run(capsys, *SMALL, "--text", story, *given)


def test_unknown_words_of_a_prompt_are_told(capsys, quick, story):
    output = run(capsys, *SMALL, "--text", story, "--prompt", "the xylophone")
    assert "1 of the prompt's 2 tokens are not in that text" in output
    assert "\nthe xylophone" in output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tokens", "0", "at least 1"),
        ("--tokens", "-5", "at least 1"),
        ("--tokens", "many", "at least 1"),
        ("--draft-length", "-1", "from 0 to 255"),
        ("--draft-length", "256", "from 0 to 255"),
        ("--temperature", "-1", "finite number of at least 0"),
        ("--temperature", "nan", "finite number of at least 0"),
        ("--temperature", "inf", "finite number of at least 0"),
        ("--seed", "1.5", "an integer from"),
        ("--seed", str(2**64), "an integer from"),
        ("--rule", "greedy", "token[:LENIENCE] or sigmoid[:ALPHA,BETA]"),
        ("--rule", "token:0", "lenience must be in (0, 1]"),
        ("--rule", "token:half", "could not convert"),
        ("--rule", "sigmoid:1", "token[:LENIENCE] or sigmoid[:ALPHA,BETA]"),
        ("--rule", "sigmoid:5,-5", "alpha must be below beta"),
        ("--rule", "token:", "could not convert"),
        ("--device", "tpu", "invalid choice"),
        ("--text", "/no/such/file", "cannot read /no/such/file"),
        ("--text", str(ROOT), "cannot read"),
    ],
)
def test_wrong_options_are_named(capsys, option, value, message):
    error = refused(capsys, option, value)
    assert f"argument {option}: " in error
    assert message in error


def test_text_that_cannot_be_learned_from(capsys, tmp_path):
    for name, content, message in (
        ("latin.txt", "caf\xe9 ".encode("latin-1") * 500, "is not UTF-8 text"),
        ("short.txt", b"Too few words.", "is too short: 4 words"),
        ("empty.txt", b"", "is too short: 0 words"),
    ):
        (tmp_path / name).write_bytes(content)
        error = refused(capsys, "--text", str(tmp_path / name))
        assert "argument --text: " in error and message in error


def test_cuda_without_cupy_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # its import then fails
    error = refused(capsys, "--device", "cuda")
    assert "argument --device: " in error
    assert "pip install 'cupyspec[cuda12]'" in error


def test_cuda_without_a_gpu_says_so(capsys, need_frontend):
    cupy = need_frontend("cupy")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        count = 0
    if count:
        pytest.skip("this machine has a GPU")
    assert "needs an NVIDIA GPU and its driver" in refused(capsys, "--device", "cuda")


def test_a_reader_that_leaves_early_gets_no_traceback(story):
    command = [sys.executable, "-m", "cupyspec", "demo", *SMALL, "--text", story]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_an_ascii_terminal_gets_question_marks(tmp_path):
    # Catches UnicodeEncodeError half way through the text.
    path = tmp_path / "text.txt"
    path.write_text("Das Mädchen aß süße Äpfel. " * 30, encoding="utf-8")
    command = [sys.executable, "-m", "cupyspec", "demo", *SMALL, "--text", str(path)]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, timeout=60, env={"PYTHONIOENCODING": "ascii", "PATH": ""}
    )
    assert result.returncode == 0, result.stderr.decode()
    assert b"?" in result.stdout


def test_no_options_at_all(capsys):
    # What a newcomer types. Timings and all.
    output = run(capsys)
    assert "V = 128256" in output
    assert "  Yes: " in output
