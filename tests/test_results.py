"""The results page says what the committed results say."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def results_page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("results_page", "common"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import results_page

    return results_page


def test_the_page_is_current(results_page):
    assert results_page.page(results_page.RESULTS) == results_page.PAGE.read_text()


def test_every_plot_of_the_page_is_there(results_page):
    text = results_page.PAGE.read_text()
    shown = {part.partition(")")[0] for part in text.split("](results-plots/")[1:]}
    assert shown
    assert shown <= {plot.name for plot in (ROOT / "docs" / "results-plots").iterdir()}
