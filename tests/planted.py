"""Mistakes that samplers of this kind are known for, each as a diff of the CPU path and one of the kernels.

`PYTHONPATH=. python tests/planted.py` prints the table of docs/faults.md.
"""

from __future__ import annotations

from typing import NamedTuple

from cupyspec.testing import CheckResult
from experiments import experiments
from machines import HostMachine, Machine, Patch

ALPHA = 1e-9  # a planted fault must be rejected at this level by one sample


class Fault(NamedTuple):
    """A mistake, and the experiment that must notice it."""

    name: str
    experiment: str
    numpy: tuple[Patch, ...]
    kernels: tuple[Patch, ...]

    def machine(self, back_end: str) -> Machine:
        """A back end that makes the mistake."""
        return HostMachine(self.kernels) if back_end == "host_cuda" else Machine(self.numpy)

    def check(self, back_end: str, seed: int = 0) -> CheckResult:
        """What the experiment finds."""
        return experiments()[self.experiment].check(self.machine(back_end), seed, alpha=ALPHA)


def statistic(result: CheckResult) -> str:
    """A result in the table of planted faults."""
    if result.impossible:
        return f"{result.impossible} of {result.draws} impossible"
    return f"chi-square {result.statistic:.0f}, {result.cells} cells, {result.draws} draws"


def _diff(*changes: tuple[str, str]) -> tuple[Patch, ...]:
    return tuple(Patch(*change) for change in changes)


_CPU_TEMPERATURE = "self.temperature = per_row(scores.temperature, call.batch_size, np.float32)"
_CPU_SEEDS = "split_seed(call.seed, batch) if isinstance(call.seed, int) else host(call.seed)"
_CPU_ACCEPTED = "(status == 0) & (p > 0) & (coins * lenience * q < p)"
_ACCEPTED = "target_probability > 0.0 && price < target_probability"
_ROW_OF_FACT = "fact == FACT_END ? b + 1 : b"
_TARGET_ROW = "(p.flattened ? (row.start + row.b + i) * s.row_stride : row.b * s.batch_stride + i * s.row_stride)"
_DRAFT_ROW = "(p.flattened ? (row.start + i) * s.row_stride : row.b * s.batch_stride + i * s.row_stride)"
_TARGET_ROW_OF = """\
__device__ inline const Target* target_row(const ChainParams& p, const Row& row, int i) {
"""
_SEGMENT_SUM = """\
        return {max, warp_sum_all(sum)};
    }

    __device__ Pair probability_pair_all"""

FAULTS = (
    Fault(
        "residual not subtracted: p itself after a rejection",
        "chain of two drafts",
        _diff(("            w -= q\n", "            w = target.weights.w.copy()\n")),
        _diff(("out.values[j] = fmaxf(out.values[j] - less[j], 0.0f);", "(void)less;")),
    ),
    Fault(
        "only the rejected token subtracted",
        "chain of two drafts",
        _diff(
            ("status, one_hot = target.status, proposal.one_hot()", "status, one_hot = target.status, (proposal.x, 0)")
        ),
        _diff(
            (
                "        if (!less_draft) {\n"
                "            w.hot = p.has_draft ? __float_as_uint(totals.draft.sum) : draft_token(p, row, n);",
                "        if (true) {\n            w.hot = draft_token(p, row, n);",
            )
        ),
    ),
    Fault(
        "one-hot draft not removed after its rejection",
        "one-hot draft",
        _diff(("w[np.arange(w.shape[0]), one_hot[0]] = 0", "pass")),
        _diff(("out.values[j] = hot == j ? 0.0f : out.values[j];", "(void)hot;")),
    ),
    Fault(
        "bonus from the draft's last row",
        "chain of two drafts",
        _diff(
            (
                "        rows = Rows(self.target, b, i)",
                "        last = i > 0 and self.draft is not None\n"
                "        rows = Rows(self.draft, b, i - 1) if last else Rows(self.target, b, i)",
            )
        ),
        _diff(
            (
                _TARGET_ROW_OF,
                "__device__ inline const Draft* draft_row(const ChainParams& p, const Row& row, int i);\n"
                + _TARGET_ROW_OF
                + "    if (p.has_draft && i > 0 && i == row.drafts) {\n"
                "        return (const Target*)draft_row(p, row, i - 1);\n"
                "    }\n",
            )
        ),
    ),
    Fault(
        "target row of the position before",
        "chain of two drafts",
        _diff(
            ("self.drafts[b, i], Rows(self.target, b, i)", "self.drafts[b, i], Rows(self.target, b, max(i - 1, 0))"),
            ("        rows = Rows(self.target, b, i)", "        rows = Rows(self.target, b, max(i - 1, 0))"),
        ),
        _diff((_TARGET_ROW, "row.b * s.batch_stride + (i > 0 ? i - 1 : 0) * s.row_stride")),
    ),
    Fault(
        "draft row of the position before",
        "chain of two drafts",
        _diff(("else Rows(self.draft, b, i)", "else Rows(self.draft, b, max(i - 1, 0))")),
        _diff((_DRAFT_ROW, "row.b * s.batch_stride + (i > 0 ? i - 1 : 0) * s.row_stride")),
    ),
    Fault(
        "temperature of the draft ignored",
        "chain of two drafts",
        _diff(
            (
                "        self.steps: UInt64 =",
                "        if self.draft is not None:\n"
                "            self.draft.temperature = self.target.temperature\n"
                "        self.steps: UInt64 =",
            )
        ),
        _diff(
            (
                "valid &= judge_temperature(facts[FACT_DRAFT_TEMPERATURE],",
                "valid &= judge_temperature(facts[FACT_TARGET_TEMPERATURE],",
            )
        ),
    ),
    Fault(
        "noise of the draft used again after a rejection",
        "chain of two drafts",
        _diff(("weights, Purpose.RESIDUAL)", "weights, Purpose.DRAFT)")),
        _diff(
            (
                "verdict == REJECT ? PURPOSE_RESIDUAL : PURPOSE_BONUS",
                "verdict == REJECT ? PURPOSE_DRAFT : PURPOSE_BONUS",
            )
        ),
    ),
    Fault(
        "coin of position 0 at every position",
        "chain of two drafts",
        _diff(("position=np.arange(width), words=1", "position=np.zeros(width, np.intp), words=1")),
        _diff(("PURPOSE_ACCEPT, i, 0)", "PURPOSE_ACCEPT, 0, 0)")),
    ),
    Fault(
        "coin that rejected also picks the replacement",
        "coin and replacement",
        _diff(
            (
                "coin(pick[rows, winner])",
                "coin(draw_words(seeds, steps, Purpose.ACCEPT, position=position, words=1)[0])",
            )
        ),
        _diff(
            (
                "coin(segment_words(draw, segment).w1)",
                "coin(random_words(draw.noise.seed, draw.noise.step, PURPOSE_ACCEPT, draw.position, 0).w0)",
            )
        ),
    ),
    Fault(
        "temperature 1.05 for 1",
        "draft from the tail",
        _diff((_CPU_TEMPERATURE, f"{_CPU_TEMPERATURE} * np.float32(1.05)")),
        _diff(("temperature = (float)given;", "temperature = (float)(given * 1.05);")),
    ),
    Fault(
        "temperature of row 0 for all rows",
        "rows of two temperatures",
        _diff((_CPU_TEMPERATURE, f"{_CPU_TEMPERATURE}[:1].repeat(call.batch_size)")),
        _diff((_ROW_OF_FACT, f"fact == FACT_TARGET_TEMPERATURE ? 0 : {_ROW_OF_FACT}")),
    ),
    Fault(
        "`<=` and no p > 0: coin 0 accepts an impossible draft",
        "coins at the ends",
        _diff((_CPU_ACCEPTED, "(status == 0) & (coins * lenience * q <= p)")),
        _diff((_ACCEPTED, "price <= target_probability")),
    ),
    Fault(
        "`<=` where the coin is exactly p / q",
        "coins at the ends",
        _diff((_CPU_ACCEPTED, "(status == 0) & (p > 0) & (coins * lenience * q <= p)")),
        _diff((_ACCEPTED, "target_probability > 0.0 && price <= target_probability")),
    ),
    Fault(
        "coin rounded to 1",
        "coins at the ends",
        _diff((" & np.uint64(2**64 - 2**29)", "")),
        _diff(("if (excess > 0) {", "if (excess > 99) {")),
    ),
    Fault(
        "weights below 2^-24 of the row's largest dropped",
        "tiny residual",
        _diff(("np.exp(w, out=w)", "np.exp(w, out=w)\n        w[w < 2.0**-24] = 0")),
        _diff(
            (
                "{ return exp2f((z - pivot) * scale); }",
                "{\n    const float w = exp2f((z - pivot) * scale);\n    return w < 5.9604645e-8f ? 0.0f : w;\n}",
            )
        ),
    ),
    Fault(
        "sums of weights in float16",
        "coins near p / q",
        _diff(("segment_count(vocab, segment)), np.float32)", "segment_count(vocab, segment)), np.float16)")),
        _diff(
            (
                _SEGMENT_SUM,
                _SEGMENT_SUM.replace(
                    "warp_sum_all(sum)", "float_of((__float_as_uint(warp_sum_all(sum)) + 0x1000u) & 0xFFFFE000u)"
                ),
            )
        ),
    ),
    Fault(
        "log-normaliser off by 0.001",
        "coins near p / q, normaliser given",
        _diff(
            (
                "values: Float64 = self.log_normalizer[self._at(b, i)].astype(np.float64)",
                "values: Float64 = self.log_normalizer[self._at(b, i)].astype(np.float64) + 1e-3",
            )
        ),
        _diff(
            (
                ": (double)((const float*)s.log_normalizer)[at];",
                ": (double)((const float*)s.log_normalizer)[at] + 1e-3;",
            ),
            ("? ((const double*)s.log_normalizer)[at]", "? ((const double*)s.log_normalizer)[at] + 1e-3"),
        ),
    ),
    Fault(
        "lenience ignored",
        "lenient rule",
        _diff(("lenience = rule.lenience if isinstance(rule, Token) else 1.0", "lenience = 1.0")),
        _diff(("const double lenience = RULE == RULE_TOKEN ? p.lenience : 1.0;", "const double lenience = 1.0;")),
    ),
    Fault(
        "lenience applied to the residual too",
        "lenient rule",
        _diff(
            (
                "            np.maximum(w, q, out=w)",
                "            q = q * np.float32(rule.lenience)\n            np.maximum(w, q, out=w)",
            )
        ),
        _diff(
            (
                "(of_draft ? w.draft_side : w.target_side) = side;",
                "side.factor *= of_draft ? (float)p.lenience : 1.0f;\n"
                "        (of_draft ? w.draft_side : w.target_side) = side;",
            )
        ),
    ),
    Fault(
        "sigmoid rule: no clamp above beta",
        "sigmoid rule",
        _diff(("np.where(z > rule.beta, 1.0, inside)", "inside")),
        _diff(
            (
                "if (logit < p.alpha || logit > p.beta) {\n        return logit < p.alpha ? 0.0 : 1.0;",
                "if (logit < p.alpha) {\n        return 0.0;",
            )
        ),
    ),
    Fault(
        "segments race without their mass",
        "several segments",
        _diff(("unit_exponential(exponential) / masses", "unit_exponential(exponential)")),
        _diff(
            (
                "const float key = unit_exponential(segment_words(draw, segment).w0) / weight;",
                "const float key = unit_exponential(segment_words(draw, segment).w0);",
            )
        ),
    ),
    Fault(
        "word that won the race also picks",
        "several segments",
        _diff(("coin(pick[rows, winner])", "coin(exponential[rows, winner])")),
        _diff(("coin(segment_words(draw, segment).w1)", "coin(segment_words(draw, segment).w0)")),
    ),
    Fault(
        "race not cleared: the last call's winner takes part",
        "pairs: calls",
        _diff(
            ("def race(\n", "_LEFT = {}\n\n\ndef race(\n"),
            (
                "    winner = keys.argmin(axis=1)",
                "    keys = _LEFT[keys.shape] = np.minimum(keys, _LEFT.get(keys.shape, np.inf))\n"
                "    winner = keys.argmin(axis=1)",
            ),
        ),
        _diff(
            (
                "    const unsigned long long mine = block_min_all(best.key, shared.scratch);",
                "    static unsigned long long all[1 << 20];  // by row and block; 0: nothing\n"
                "    unsigned long long& left = all[8 * row.b + rank];\n"
                "    best.key = left && left < best.key ? left : best.key;\n"
                "    best.sums = sum_lane(shared.params, w, (unsigned int)best.key, seen);\n"
                "    left = best.key;\n"
                "    const unsigned long long mine = block_min_all(best.key, shared.scratch);",
            )
        ),
    ),
    Fault(
        "padding of the last segment takes part",
        "several segments",
        _diff(("inside[ids >= w.shape[1]] = 0", "pass")),
        _diff(("set_stored(granules[g], j, fill);", "set_stored(granules[g], j, 0 * fill);")),
    ),
    Fault(
        "vocab_size ignored",
        "padded columns",
        _diff(("columns = slice(self._vocab_size)", "columns = slice(None)")),
        _diff(
            (
                "if (first + g * GRANULE * LANES + j >= vocab) {",
                "if (first + g * GRANULE * LANES >= vocab) {",
            )
        ),
    ),
    Fault(
        "highest id of a tie",
        "ties",
        _diff(
            (
                "            tokens, status = rows.scores.argmax(axis=1), rows.status",
                "            width = rows.scores.shape[1] - 1\n"
                "            tokens, status = width - rows.scores[:, ::-1].argmax(axis=1), rows.status",
            )
        ),
        _diff(("if (key > best_key) {", "if (key >= best_key) {")),
    ),
    Fault(
        "a draft of -1 taken for the last id",
        "placeholder",
        _diff(
            (
                "ids, starts = host(call.draft_tokens), None",
                "ids, starts = host(call.draft_tokens) % call.vocab_size, None",
            )
        ),
        _diff(
            (
                "return ((const Token*)p.draft_tokens)[at];",
                "const Token id = ((const Token*)p.draft_tokens)[at];\n    return id == -1 ? p.vocab_size - 1 : id;",
            )
        ),
    ),
    Fault(
        "flattened target rows begin at cu[b], not cu[b] + b",
        "flattened rows",
        _diff(("target_starts = None if starts is None else starts + np.arange(batch)", "target_starts = starts")),
        _diff(("(row.start + row.b + i) * s.row_stride", "(row.start + i) * s.row_stride")),
    ),
    Fault(
        "seed of row 0 for all rows",
        "pairs: neighbouring rows",
        _diff((_CPU_SEEDS, f"({_CPU_SEEDS})[:1].repeat(batch)")),
        _diff((_ROW_OF_FACT, f"fact == FACT_SEED ? 0 : {_ROW_OF_FACT}")),
    ),
    Fault(
        "one seed given to all rows as it is",
        "pairs: rows of one seed",
        _diff(("split_seed(call.seed, batch) if", "np.full(batch, call.seed, np.uint64) if")),
        _diff(("seed = split_seed(seed, (unsigned int)b);", "(void)b;")),
    ),
    Fault(
        "low 32 bits of the seed only",
        "pairs: seeds that differ above bit 32",
        _diff((_CPU_SEEDS, f"({_CPU_SEEDS}) & np.uint64(2**32 - 1)")),
        _diff(
            (
                "unsigned long long seed = facts[FACT_SEED];",
                "unsigned long long seed = facts[FACT_SEED] & 0xFFFFFFFFull;",
            )
        ),
    ),
    Fault(
        "step ignored",
        "pairs: steps",
        _diff(("per_row(call.step, batch, np.uint64)", "per_row(0, batch, np.uint64)")),
        _diff(("facts[FACT_STEP] & 0xFFFFFFFFFFFFFFull", "facts[FACT_STEP] & 0")),
    ),
    Fault(
        "position ignored by sample()",
        "pairs: positions",
        _diff(("position=self.position[b] if sampling else i,", "position=0 if sampling else i,")),
        _diff(("((unsigned int)facts[FACT_POSITION] & 0xFFFFu)", "((unsigned int)facts[FACT_POSITION] & 0u)")),
    ),
)


def table() -> str:
    """The table of docs/faults.md, at seed 0."""
    lines = ["| planted fault | noticed by | CPU path | kernels |", "|---|---|---|---|"]
    for fault in FAULTS:
        found = " | ".join(statistic(fault.check(back_end)) for back_end in ("numpy", "host_cuda"))
        lines.append(f"| {fault.name} | {fault.experiment} | {found} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
