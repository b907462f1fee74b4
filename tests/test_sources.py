"""The expansion of includes, and where the CUDA sources are looked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cupyspec import _sources


@pytest.mark.parametrize("file", ["chain_stats.cu", "chain_verify.cu"])
def test_every_include_is_expanded_once_and_lines_keep_their_numbers(file: str) -> None:
    text = _sources.source(file)
    assert '#include "' not in text and "#pragma once" not in text
    folder = _sources.kernel_folder()
    place: tuple[str, int] | None = None
    seen: set[tuple[str, int]] = set()
    for line in text.splitlines():
        if marker := re.match(r'#line (\d+) "(.+)"', line):
            place = marker[2], int(marker[1])
            continue
        assert place is not None
        name, number = place
        original = (folder / name).read_text().splitlines()[number - 1]
        assert line == original or (line == "" and re.match(r"#include|#pragma once", original)), place
        assert place not in seen, f"{place} twice"
        seen.add(place)
        place = name, number + 1
    assert file in {name for name, _ in seen} <= {path.name for path in folder.glob("*.cu*")}


def test_no_header_is_left_over() -> None:
    folder = _sources.kernel_folder()
    texts = [_sources.source(path.name) for path in folder.glob("*.cu")]
    for header in folder.glob("*.cuh"):
        assert any(f'"{header.name}"' in text for text in texts), header


def test_a_changed_header_changes_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n#include "b.cuh"\nint a;\n')
    (tmp_path / "b.cuh").write_text("#pragma once\nint b;\n")
    before = _sources.expand(tmp_path, "a.cu")
    assert before == '#line 1 "a.cu"\n#line 1 "b.cuh"\n\nint b;\n#line 2 "a.cu"\n\nint a;\n'
    (tmp_path / "b.cuh").write_text("#pragma once\nlong b;\n")
    assert _sources.expand(tmp_path, "a.cu") != before


def test_missing_sources_name_both_places(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=rf"neither in {tmp_path / 'a'} nor {tmp_path / 'b'}"):
        _sources._find((tmp_path / "a", tmp_path / "b"))


def test_an_empty_folder_does_not_hide_the_sources(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "chain_verify.cu").write_text("")
    assert _sources._find((tmp_path / "first", tmp_path / "second")) == tmp_path / "second"
