"""The examples of docs/testing.md run as they stand, on right samplers and on wrong ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cupyspec.testing
from cupyspec.testing import ErrorBudget

PAGE = (Path(__file__).parent.parent / "docs" / "testing.md").read_text(encoding="utf-8")
SAMPLER, VERIFIER, LAWS, OWN_RULE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(example: str, *changes: tuple[str, str], variables: dict[str, Any] | None = None) -> dict[str, Any]:
    """The variables of an example after it ran, with some of its text changed."""
    for old, new in changes:
        assert example.count(old) == 1, f"{old!r} is not in the example once"
        example = example.replace(old, new)
    variables = {} if variables is None else variables
    exec(example, variables)
    return variables


def test_right_sampler(need_frontend: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    """An example that does not run, or whose output is not what the page shows."""
    need_frontend("torch")
    run(SAMPLER)
    shown = capsys.readouterr().out
    pattern = r"chi-square [\d.]+ on 5 cells, 100000 draws: p = [\d.]+, TV seen 0\.00\d+; TV found with 99 %: 0\.013\n"
    assert re.fullmatch(pattern, shown)
    assert re.search(pattern, PAGE)


@pytest.mark.parametrize(
    "change",
    [
        ("(logits.softmax(-1) /", "((logits / 1.05).softmax(-1) /"),
        (".argmax(-1)\n", ".argmax(-1).clamp(max=3)\n"),
        ("torch.empty(n, 5)", "torch.empty(n, 1)"),
    ],
    ids=["temperature", "last id lost", "one number for all ids"],
)
def test_wrong_samplers(change: tuple[str, str], need_frontend: Callable[[str], ModuleType]) -> None:
    """A fault that the page's own example would not notice."""
    need_frontend("torch")
    with pytest.raises(AssertionError, match="do not follow the probabilities"):
        run(SAMPLER, change)


def test_the_quoted_failure(need_frontend: Callable[[str], ModuleType]) -> None:
    """A message on the page that is not the one that is raised."""
    need_frontend("torch")
    with pytest.raises(AssertionError) as caught:
        run(SAMPLER, ("(logits.softmax(-1) /", "((logits / 1.05).softmax(-1) /"))
    words = re.sub(r"[\d.e+-]+", "#", str(caught.value)).split()
    quoted = re.search(r"AssertionError: (draws do.*?)```", PAGE, re.DOTALL)
    assert quoted and re.sub(r"[\d.e+-]+", "#", quoted[1]).split() == words


def test_right_verifier(need_frontend: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    """An example that does not run, or is biased itself."""
    need_frontend("torch")
    run(VERIFIER)
    assert "on 27 cells" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        [("(p[:, i] - q[:, i])", "p[:, i]")],
        [("p[alive, K].multinomial", "q[alive, K - 1].multinomial")],
        [("(p[:, i] - q[:, i])", "(p[:, i] - p[rows, i, x[:, i], None] * (torch.arange(3) == x[:, i, None]))")],
        [
            (
                "residual.multinomial(1, generator=generator)[:, 0]",
                "(residual.cumsum(1) <= coin[:, None] * residual.sum(1, True)).sum(1)",
            )
        ],
        [("< p[rows, i, x[:, i]]", "< p[rows, i + 1, x[:, i]]")],
    ],
    ids=["no residual", "bonus from the draft", "only the rejected removed", "coin used twice", "next row"],
)
def test_wrong_verifiers(changes: list[tuple[str, str]], need_frontend: Callable[[str], ModuleType]) -> None:
    """A fault that the page says is noticed."""
    need_frontend("torch")
    with pytest.raises(AssertionError, match="do not follow the target's law"):
        run(VERIFIER, *changes)


def test_laws() -> None:
    """Equalities on the page that do not hold."""
    run(OWN_RULE, variables=run(LAWS))


def test_what_the_page_says_of_the_kit() -> None:
    """Numbers and names that are not those of the code."""
    assert f"{ErrorBudget().false_alarm_rate(1000):.1%}" == "0.1%" and "0.1 % for 1000 checks" in PAGE
    for name in (
        "ErrorBudget",
        "chi_square",
        "g_test",
        "exact_multinomial",
        "two_sample",
        "independence",
        "draws_needed",
    ):
        assert f"`{name}" in PAGE and name in cupyspec.testing.__all__
