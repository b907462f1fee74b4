"""All benchmarks, from a checkout: ``python bench/run.py --quick``. See README.md beside this file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # an uninstalled checkout works

from bench import bench_host, bench_memory, bench_sample, bench_scale, bench_verify, session

OPS = (bench_verify, bench_sample, bench_host, bench_memory, bench_scale)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 if a provider was wrong or something failed."""
    p = session.parser("run.py", "Time cupyspec beside its peers, here and now.")
    p.add_argument(
        "--ops", nargs="+", choices=[op.OP for op in OPS], metavar="OP", help=f"of {', '.join(op.OP for op in OPS)}"
    )
    bench_verify.add_options(p)
    return session.main(p, OPS, arguments)


if __name__ == "__main__":
    sys.exit(main())
