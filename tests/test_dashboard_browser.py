"""The dashboard in a real browser: a person logs in, reads a study, compares phases, logs out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import study_samples as samples
from dashboard_site import TOKEN, WRITER

from hpo import report
from hpo.dashboard import Address
from hpo.read_results import collect
from hpo.results import Phase, Trial

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
PREFIXED = Address(port=0, path_prefix="/hpo")


class Visit:
    """A page of a browser, and all that it asked for and complained of."""

    def __init__(self, page: Any, base: str, pictures: Path) -> None:
        self.page, self.base, self.pictures = page, base, pictures
        self.asked: list[str] = []
        self.failed: list[str] = []
        self.errors: list[str] = []
        page.set_default_timeout(90_000)
        page.on("request", lambda r: self.asked.append(r.url))
        page.on("response", lambda r: r.status >= 400 and self.failed.append(
            f"{r.status} {r.url}"))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)

    def to(self, path: str) -> None:
        """Open a page of the dashboard."""
        self.page.goto(f"{self.base}/dashboard{path}")

    def see(self, text: str) -> None:
        """Wait for a text."""
        self.page.get_by_text(text).first.wait_for()

    def drawn(self, n: int) -> None:
        """Wait for so many diagrams."""
        self.page.wait_for_function(
            f"() => document.querySelectorAll('.js-plotly-plot .main-svg').length >= {n}")

    def foreign(self) -> list[str]:
        """Return what was asked for elsewhere than under the dashboard's own address."""
        return [url for url in self.asked if not url.startswith((self.base, "data:", "blob:"))]

    def picture(self, name: str) -> None:
        """Keep a screenshot, in the folder HPO_TEST_PICTURES where that is set."""
        self.page.screenshot(path=self.pictures / f"{name}.png")
        assert (self.pictures / f"{name}.png").stat().st_size > 15_000


@contextmanager
def visit(site: Any, prefix: str, folder: Path) -> Iterator[Visit]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=[
            "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        pictures = Path(os.environ.get("HPO_TEST_PICTURES", folder))
        yield Visit(page, site.url + prefix, pictures)
        browser.close()


def published(site: Any) -> int:
    results = collect(site.db, "toy")
    report.write(results, site.home / "reports" / "toy")
    report.note(site.db, results, site.home)
    return site.study_id()


def log_in(seen: Visit, token: str) -> None:
    seen.page.fill("input[name=token]", token)
    seen.page.click("button")
    seen.page.wait_for_url("**/dashboard**")


def test_under_a_prefix_a_person_logs_in_reads_the_study_and_compares_its_phases(
    site_of, tmp_path
):
    site = site_of(address=PREFIXED, writable=True)
    study_id = published(site)
    with visit(site, "/hpo", tmp_path) as seen:
        seen.page.goto(f"{seen.base}/")
        seen.picture("log-in")
        # The first answer is 401, as it must be; the browser says so in its console.
        assert seen.failed == [f"401 {seen.base}/"]
        seen.failed.clear()
        seen.errors.clear()
        log_in(seen, TOKEN)
        seen.see("toy/grid")
        seen.see("reader")
        seen.picture("studies")
        seen.to(f"/studies/{study_id}")
        seen.see("Best Trial")
        seen.drawn(4)
        seen.picture("study")
        seen.see(".png")
        seen.to(f"/studies/{study_id}/note")
        seen.page.wait_for_function("() => [...document.images].filter(i => i.src.includes("
                                    "'/artifacts/') && i.naturalWidth > 1000).length >= 3")
        seen.picture("note")
        link = seen.page.get_by_role("link", name="All of this as one page")
        seen.page.goto(f"{site.url}{link.get_attribute('href')}")
        assert seen.page.locator("svg").count() >= 4
        assert seen.page.evaluate(
            "getComputedStyle(document.querySelector('.verdict')).fontSize") == "17.6px"
        seen.picture("page")
        grid = site.study_id("toy/grid")
        seen.to(f"/compare-studies?ids={study_id},{grid}")
        seen.drawn(2)
        seen.picture("compare")
        assert (seen.foreign(), seen.failed, seen.errors) == ([], [], [])
        seen.page.click("#hpo-role >> text=log out")
        seen.page.wait_for_url("**/login")


def test_a_writer_cannot_delete_a_study_that_a_worker_is_at(site_of, tmp_path):
    from test_changes import running

    site = site_of(writable=True)
    running(site)
    with visit(site, "", tmp_path) as seen:
        seen.page.goto(f"{seen.base}/dashboard")
        log_in(seen, WRITER)
        seen.see("toy/grid")
        seen.errors.clear()
        grid = site.study_id("toy/grid")
        card = seen.page.locator(".MuiCard-root", has_text="toy/grid").last
        card.get_by_label("delete study").click()
        seen.page.get_by_role("button", name="Yes").click()
        # The page of optuna-dashboard 0.21 keeps the reason to itself; the line tells it.
        seen.see(f"Failed to delete study (id={grid})")
        assert seen.failed[-1] == f"409 {seen.base}/api/studies/{grid}"
        assert "1 worker is alive on study 'toy' (here pid 17)" in site.said[-1]
        seen.picture("refused")
    assert site.study_id("toy/grid")


def wild() -> Any:
    """Return a study with infinite values and a NaN epoch."""
    inf = float("inf")
    trials = [Trial(i, "COMPLETE", v, {"lr": 0.01 + i / 100}, curve=((0, v),),
                    distributions={"lr": samples.SPACE["lr"]})
              for i, v in enumerate((inf, 1.0, -inf))]
    trials.append(Trial(3, "PRUNED", 0.5, reason="diverged at epoch 0", curve=(
        (0, float("nan")),), attrs={"best": {"loss": float("nan")}}))
    return samples.results(candidates=[], phases={"search": Phase("search", "toy", tuple(trials))})


# Optuna warns of few trials; `serve` keeps that out of the log, as a test cannot.
@pytest.mark.filterwarnings("ignore:.*(quantiles select|number of trials):UserWarning")
def test_nan_and_infinity_break_no_page(site_of, tmp_path):
    site = site_of(wild(), token=None)
    with visit(site, "", tmp_path) as seen:
        for page, text in (("", "Best Trial"), ("/trials", "Trial 0"),
                           ("/analytics", "Contour")):
            seen.to(f"/studies/{site.study_id()}{page}")
            seen.see(text)
        seen.picture("wild")
        assert (seen.foreign(), seen.failed, seen.errors) == ([], [], [])
