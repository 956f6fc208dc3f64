# SPDX-License-Identifier: Apache-2.0
"""The page and the command that writes it."""

from __future__ import annotations

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from lightning_replay import recipes
from lightning_replay.events import EventTable, reward_at_least
from lightning_replay.inspection import page as pages
from lightning_replay.inspection.contents import look_at
from lightning_replay.inspection.rows import as_rgb, png_of
from lightning_replay.lit.cli import main
from tests.saves import flip_a_byte, stored


def numbers(text: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf' {name}="([0-9.]+)"', text)]


def test_the_heights_of_bars_are_in_proportion_and_short_numbers_keep_their_sign() -> None:
    picture = pages.histogram(np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 0.0, 0.5]), "x", "y", "title")
    ElementTree.fromstring(picture)
    first, second = numbers(picture, "height")  # nothing of 0
    assert (first, second) == pytest.approx((158.0, 79.0), abs=0.1)  # of the height between the axes
    assert "<title>2 to 3: 0.5</title>" in picture
    assert (pages.short(-20_000), pages.short(0), pages.short(999.6), pages.short(9_999)) == (
        "-20k",
        "0",
        "1,000",
        "9,999",
    )


def test_lanes_have_the_width_of_the_chart_and_their_names_above() -> None:
    picture = pages.lanes(np.array([0, 1, 2]), {"an event with a long name": np.array([1.0, 1.0])}, "x", "title")
    names = re.findall(r'<text x="20.0" y="([0-9.]+)" >an event with a long name</text>', picture)
    first, second = re.findall(r'<rect class="fill0" x="([0-9.]+)" y="([0-9.]+)" width="([0-9.]+)"', picture)
    assert float(names[0]) < float(first[1]) == float(second[1])
    assert float(first[0]) == 20.0 and float(second[0]) + float(second[2]) == pytest.approx(pages.WIDE - 20)


def test_images_of_all_layouts() -> None:
    gray = np.arange(36, dtype=np.uint8).reshape(6, 6)
    assert np.array_equal(as_rgb(gray)[..., 1], gray)
    assert np.array_equal(as_rgb(gray[None])[..., 1], gray)  # [1, H, W]
    assert np.array_equal(as_rgb(np.stack((gray * 0, gray * 0, gray * 0, gray)))[..., 2], gray)  # the last of a stack
    color = np.stack((gray, gray + 1, gray + 2), -1)
    assert np.array_equal(as_rgb(color), color) and np.array_equal(as_rgb(np.moveaxis(color, -1, 0)), color)
    planes = np.zeros((6, 6, 4), dtype=np.float32)
    planes[0, 0, 1] = 1.0
    shown = as_rgb(planes)
    assert shown[0, 0].tolist() == [213, 94, 0] and not shown[1:].any()


def test_png_files_hold_the_image() -> None:
    image_of = pytest.importorskip("PIL.Image")
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(image_of.open(io.BytesIO(png_of(image)))), image)


def test_heat_maps_are_darker_for_higher_values() -> None:
    picture = pages.heat_map(np.array([0.0, 1.0, 2.0])).astype(int)
    first, second, third = (picture[0, place].sum() for place in (0, 12, 24))
    assert first > second > third


def test_the_page_is_self_contained_and_escapes_names() -> None:
    contents = look_at(stored(recipes.prioritized))
    history = {"fill": ([10.0, 20.0], [0.5, 1.0]), "tables/a/share_drawn": ([10.0], [0.3])}
    page = pages.page_of("<b>title</b>", "x & y", [pages.Subject("", contents, 10)], history)
    assert "<script" not in page and "http" not in page and "<b>title" not in page and "x &amp; y" in page
    assert "prefers-color-scheme: dark" in page and "Over the run" in page and "tables: share drawn" in page
    one = np.array([1.0])
    pictures = re.findall(r"<svg.*?</svg>", page)
    # of single and equal values
    pictures += [
        pages.histogram(np.array([0.0, 1.0]), np.array([0.0]), "x", "y", "title"),
        pages.cells(one, ["level 1"], "title"),
    ]
    pictures += [
        pages.lines({"a & b": ([3.0], [0.0])}, "x", "y", "title"),
        pages.lanes(np.array([0, 1]), {"<a>": one}, "x", "title"),
    ]
    for picture in pictures:
        ElementTree.fromstring(picture)
        assert "nan" not in picture and "inf" not in picture


def test_the_command_prints_a_summary_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(recipes.prioritized).save(tmp_path / "save")
    main(["inspect", str(tmp_path / "save")])
    printed = capsys.readouterr().out
    assert "200 transitions" in printed and "rows given: 210" in printed and "observation float32 [3]" in printed
    main(["inspect", str(tmp_path / "save"), "--output", str(tmp_path / "new" / "page.html")])
    assert (tmp_path / "new" / "page.html").exists()


def test_event_tables_count_slots_and_others_rows() -> None:
    """The slots of event tables are more than the capacity that was asked for."""
    tables = [EventTable("goal", reward_at_least(1.0), history_length=2, capacity=5)]
    named = [
        dict(pages.tiles_of(pages.Subject("", look_at(stored(recipe, **options)))))
        for recipe, options in ((recipes.event_tables, {"tables": tables}), (recipes.uniform, {}))
    ]
    assert any(name.startswith("slots in use, of") for name in named[0])
    assert "full, of 200" in named[1]


@pytest.mark.parametrize("wrong", ["missing", "damaged", "folder"])
def test_the_command_refuses_in_one_line(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(recipes.prioritized).save(tmp_path / "save")
    arguments = [str(tmp_path / "save")]
    if wrong == "missing":
        arguments = [str(tmp_path / "other")]
    elif wrong == "damaged":
        flip_a_byte(next((tmp_path / "save").rglob("*.safetensors")))
    else:
        arguments += ["--output", str(tmp_path)]
    with pytest.raises(SystemExit) as refused:
        main(["inspect", *arguments])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    expected = {"missing": "does not exist", "damaged": "is truncated or changed", "folder": "give a file"}[wrong]
    assert refused.value.code == 2 and last.startswith("lightning-replay inspect: error:") and expected in last
