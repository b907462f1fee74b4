"""Tables of a results file, as Markdown: ``python bench/report.py results/nvidia-h200.csv``.

Without options the README's table; `--all` prints every table, `--readme` writes the README's one into it, `--plots DIR`
draws (see `plots.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # an uninstalled checkout works

from bench import records
from bench.tables import TABLES, Results, Row, main_table

BEGIN, END = "<!-- {} -->", "<!-- end of the table -->"  # around a table in the README; the first names its command


def revisions(rows: Sequence[Row]) -> str:
    """What was measured, and whether it was one thing."""
    found = sorted({(row["op"].split()[0], row["revision"]) for row in rows})
    by_op: dict[str, list[str]] = {}
    for op, revision in found:
        by_op.setdefault(op, []).append(revision)
    mixed = [f"{op}: {', '.join(names)}" for op, names in by_op.items() if len(names) > 1]
    head = rows[0]
    said = f"{head['device']}, driver {head['driver'] or '-'}, PyTorch {head['torch']}, revision {found[0][1]}"
    return said + (f"; MIXED REVISIONS: {'; '.join(mixed)}" if mixed else "")


def readme_block(path: Path, table: str) -> str:
    """The table as the README holds it."""
    return f"{BEGIN.format(f'python bench/report.py {path.parent.name}/{path.name}')}\n\n{table}\n\n{END}"


def into_readme(text: str, path: Path, table: str) -> str:
    """The README's text with the table of this results file in its place."""
    begin = BEGIN.format(f"python bench/report.py {path.parent.name}/{path.name}")
    before, found, rest = text.partition(begin)
    if not found or END not in rest:
        raise ValueError(f"README.md has no place for the table: {begin} ... {END}")
    return before + readme_block(path, table) + rest.partition(END)[2]


def find(path: Path) -> Path:
    """A results file, also by its path in bench/."""
    beside = records.ROOT / "bench" / path
    if path.exists() or not beside.exists():
        return path
    return beside


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    p = argparse.ArgumentParser(prog="bench/report.py", description="Tables and plots of a results file.")
    p.add_argument("file", type=Path, help="such as results/nvidia-h200.csv")
    p.add_argument("--all", action="store_true", help="every table")
    p.add_argument("--readme", action="store_true", help="write the README's table into README.md")
    p.add_argument("--plots", type=Path, metavar="DIR", help="draw into DIR; needs matplotlib: pip install '.[bench]'")
    options = p.parse_args(arguments)
    path = find(options.file)
    try:
        rows = records.read_csv(path)
    except OSError as error:
        p.error(f"{options.file}: {error}")
    if not rows:
        p.error(f"{path} has no rows")
    results = Results(rows)
    if options.plots is not None:
        from bench import plots

        for written in plots.draw(results, options.plots):
            print(written)
        return 0
    if options.readme:
        readme = records.ROOT / "README.md"
        readme.write_text(into_readme(readme.read_text(encoding="utf-8"), path, main_table(results)), encoding="utf-8")
        return 0
    if not options.all:
        print(main_table(results))
        return 0
    print(revisions(rows))
    for title, table in TABLES.items():
        text = table(results)
        if text.count("\n") > 1:
            print(f"\n## {title}\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
