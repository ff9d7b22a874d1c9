"""The HTML report is whole, harmless and self-contained, whatever a study holds."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import replace
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import study_samples as samples
from optuna.distributions import CategoricalDistribution, FloatDistribution
from study_samples import START

from hpo import report
from hpo.read_results import collect
from hpo.report.cost import costs, device_seconds, duration, endings, most_at_once
from hpo.report.origin import made_with, repeat
from hpo.results import Phase, Results, Trial

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = "</code><script>alert(1)</script><img src=x onerror='alert(2)'>\"&`"
VOID = ("meta", "link")


class Page(HTMLParser):
    """What a browser would find in a page: elements, ids, links, texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.refs: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self._element(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self._element(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "title"):
            self.texts.append(data)

    def _element(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        named = dict(attrs)
        self.ids += [named["id"]] if "id" in named else []
        self.refs += [named[name][1:] for name in ("href",) if named.get(name, "").startswith("#")]
        self.refs += re.findall(r"url\(#([^)]+)\)", named.get("clip-path") or "")
        self.refs += [named["aria-labelledby"]] if "aria-labelledby" in named else []

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page_of(results: Results, folder: Path) -> Page:
    """Return the page of a study's report, once all that holds of every page is checked."""
    report.write(results, folder)
    text = (folder / "report.html").read_text()
    assert len(text.encode()) < 2_000_000
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert set(page.refs) <= set(page.ids)
    assert "script" not in page.tags and "img" not in page.tags
    for name, value in page.attributes:
        assert not name.startswith("on") and name != "src"
        assert name not in ("href", "xlink:href") or value == "data:," or str(value)[0] == "#"
    assert not re.search(r"url\((?!#)|@import|https?://", text)
    return page


def nothing(**phases: Phase) -> Results:
    """Return a study with these phases and no result."""
    return samples.results(phases=phases, candidates=[], sweep=None)


def test_a_page_holds_the_verdict_every_section_and_every_picture(tmp_path):
    results = samples.results()
    page = page_of(results, tmp_path)
    said = report.verdict(results)
    first, _, rest = said.partition(": ")
    assert first == "Worth it. The search won"
    assert f"{first} {rest[0].upper()}{rest[1:]}" in page.text
    for title in ("Result", "Params", "Best so far", "Learning curves", "LR range test",
                  "Importance of the params", "Params and scores", "What the search liked best",
                  "Was pruning right?", "How trials ended", "What it cost", "How to repeat it"):
        # In the list of sections, above its own, and some in a picture too.
        assert page.texts.count(title) >= 2
    assert page.tags.count("svg") == 5
    assert "0.9790 ± 0.0010" in page.text and "+0.0150 ± 0.0032" in page.text
    assert "hpo run --study toy --n-trials 20 --seed 0 --sampler tpe" in page.text


def test_what_users_wrote_does_nothing_in_a_page(tmp_path):
    space = {EVIL: FloatDistribution(0, 1), "k": CategoricalDistribution([EVIL, "\x1b[31m\x00"])}
    trials = [Trial(i, "COMPLETE", i / 10, {EVIL: i / 10, "k": (EVIL, "\x1b[31m\x00")[i % 2]},
                    curve=((0, i / 10),), distributions=space, attrs={"worker": EVIL})
              for i in range(8)]
    trials.append(Trial(9, "FAIL", None, {}, f"error: {EVIL}\udc80", attrs={"log": EVIL}))
    evil = samples.results(
        search=trials, name=EVIL, metric=EVIL, module="x", settings={"sampler": EVIL},
        candidates=[replace(samples.candidate("search#1", 0.9, 0.8), params={EVIL: EVIL})],
        phases={"search": Phase("search", EVIL, tuple(trials))},
        workers={EVIL: {"host": EVIL, "device": EVIL, "data": {"processor": EVIL, "versions": {
            EVIL: EVIL}, "module_sha256": EVIL}}})
    page = page_of(evil, tmp_path)
    assert EVIL in page.texts and page.text.count("<script>alert(1)</script>") > 10
    markdown = (tmp_path / "report.md").read_text()
    # In Markdown, code alone holds a tag as it is.
    fenced = re.sub(r"(?s)\n```\n.*?\n```\n", "", markdown)
    assert "<script>" not in re.sub(r"`[^`]*`", "", fenced.replace("\\`", ""))


@pytest.mark.parametrize(("phases", "said"), [
    ({}, "No search trial has run yet"),
    ({"search": Phase("search", "toy", samples.failed(3))}, "FAIL: 3"),
    ({"search": Phase("search", "toy", tuple(
        Trial(i, "PRUNED", 0.5, {"lr": i / 10}, "median at epoch 1", ((0, 0.4), (1, 0.5)))
        for i in range(4)))}, "PRUNED: 4"),
    ({"search": Phase("search", "toy", (Trial(0, "RUNNING", curve=((0, 0.5),)),))},
     "RUNNING: 1"),
])
def test_a_study_without_a_result_has_a_page_that_says_so(tmp_path, phases, said):
    page = page_of(nothing(**phases), tmp_path)
    assert said in page.text and "not confirmed no score on fresh seeds yet" in page.text
    assert page.tags.count("svg") == ("curves.png" in {p.name for p in tmp_path.iterdir()})
    assert page.text.count("No picture:") == 5 - page.tags.count("svg")


def test_nan_and_infinity_are_shown_as_what_they_are(tmp_path):
    space = {"x": FloatDistribution(0, 1)}
    wild = [Trial(i, "COMPLETE", v, {"x": x}, curve=((0, v), (1, float("nan"))),
                  distributions=space)
            for i, (v, x) in enumerate([(0.5, 0.1), (float("inf"), 0.2), (float("-inf"), 0.3),
                                        (0.7, 0.4), (0.6, 0.5)])]
    # Optuna's own params are finite; a study that was read from elsewhere may have others.
    wild += [Trial(5, "COMPLETE", 0.9, {"x": float("nan")}, distributions=space),
             Trial(6, "COMPLETE", 0.8, {"x": float("inf")}, distributions=space)]
    page = page_of(nothing(search=Phase("search", "toy", tuple(wild))), tmp_path)
    rows = page.text.split("What the search liked best")[2]
    assert "5 0.9000 nan 6 0.8000 inf 3 0.7000 0.4 4 0.6000 0.5 0 0.5000 0.1" in rows


def test_a_study_of_an_objective_minimized_has_a_page(tmp_path):
    trials = [Trial(i, "COMPLETE", 1 / (i + 1), {"x": i / 10}, curve=((0, 1 / (i + 1)),))
              for i in range(6)]
    found = [samples.candidate("search#1", 0.10, 0.11), samples.candidate("default", 0.5, 0.52)]
    page = page_of(samples.results(
        search=trials, metric="loss", maximize=False, sweep=None, data={}, candidates=found,
        phases={"search": Phase("search", "toy", tuple(trials))}), tmp_path)
    assert "loss, less is better" in page.text and "+0.4050 ± " in page.text
    assert "No picture: there was no LR range test." in page.text
    assert "hpo replay 5 --study toy" in page.text and "hpo export" not in page.text


def test_ten_thousand_trials_are_a_page_of_ten_seconds_that_says_what_it_left_out(tmp_path):
    many = samples.trials(10_000, 0.985, n_epochs=6)
    audits = Phase("audit", "toy/audit", tuple(
        replace(t, number=i, state="COMPLETE", attrs={"audit_of": t.number})
        for i, t in enumerate([t for t in many if t.state == "PRUNED"][:200])))
    big = samples.results(
        settings={"pruner": "median", "prune_startup": 5, "prune_warmup": 1},
        phases={**samples.results().phases, "search": Phase("search", "toy", many, 10_000),
                "audit": audits})
    start = time.process_time()
    page = page_of(big, tmp_path)
    assert time.process_time() - start < 10
    assert page.text.count("every 34th drawn") == 2
    assert "10,000" in page.text and "24th" not in page.text


# What it cost


def at(number, start, end, worker="w1", state="COMPLETE", **attrs):
    """Return a trial that ran from one second to another."""
    return Trial(number, state, 0.5, curve=((0, 0.5),), attrs={"worker": worker, **attrs},
                 started_at=START + timedelta(seconds=start),
                 ended_at=START + timedelta(seconds=end))


def test_device_time_counts_each_device_and_no_worker_twice():
    """By hand: w1 from 0 to 12 and from 20 to 21, w2 from 2 to 10 on two devices: 13 + 16."""
    trials = [at(0, 0, 10), at(1, 9, 12), at(2, 2, 10, "w2", n_devices=2), at(3, 20, 21)]
    assert device_seconds(trials) == 29 and most_at_once(trials) == 3


def test_the_ledger_counts_each_phase_by_hand():
    search = Phase("search", "toy", (at(0, 0, 10), at(1, 0, 8, "w2", "PRUNED"),
                                     at(2, 8, 10, "w2", "FAIL", retry_of=None)), 3)
    sweep = Phase("lr-range", "toy/lr-range", (at(0, -5, 0),), 1, 1.0)
    section: Any = costs(nothing(**{"search": search, "lr-range": sweep}))[0]
    assert [" | ".join(row) for row in section.blocks[0].rows] == [
        "lr-range | 1 | 1 | 1 | 0 | 0 | 0 | 2 | 5.0 s | 5.0 s | 100% of 1",
        "search | 3 | 3 | 1 | 1 | 1 | 0 | 3 | 10.0 s | 20.0 s | 100% of 2",
        "all | 4 |  | 2 | 1 | 1 | 0 | 5 | 15.0 s | 25.0 s | 83% of 2"]


def test_failures_are_counted_by_reason_with_the_last_one_s_log():
    failed = [Trial(i, "FAIL", None, {}, why, attrs={"log": f"logs/{i}.log"}) for i, why in
              enumerate(["oom: 2 GB", "error: ValueError: a", "error: ValueError: b"])]
    section: Any = endings(nothing(search=Phase("search", "toy", tuple(failed))))[0]
    assert [tuple(row) for row in section.blocks[0].rows] == [
        ("search", "2", "FAIL", "`error`", "`trial 2: error: ValueError: b`", "`logs/2.log`"),
        ("search", "1", "FAIL", "`oom`", "`trial 0: oom: 2 GB`", "`logs/0.log`")]


@pytest.mark.parametrize(("seconds", "said"), [
    (None, ""), (0.0449, "45 ms"), (0.96, "1.0 s"), (59.4, "59.4 s"), (59.7, "1 min 0 s"),
    (3599.6, "1 h 0 min"), (7800, "2 h 10 min")])
def test_a_time_reads_in_the_unit_that_suits_it(seconds, said):
    assert duration(seconds) == said


# Where it comes from


def told(results: Results, source) -> str:
    """Return what a report says of the module's file."""
    block: Any = repeat(results, source)[0].blocks[3]
    return block.text


def worker(host, sha="a" * 64, torch="2.1", device="gpu 0"):
    return {"host": host, "device": device, "data": {
        "processor": "H200", "n_threads": 4, "versions": {"torch": torch}, "module_sha256": sha}}


def test_machines_are_listed_with_their_trials_and_two_versions_are_both_named():
    trials = (at(0, 0, 1), at(1, 1, 2), at(2, 0, 2, "w2"), at(3, 0, 1, "w3"))
    study = replace(nothing(search=Phase("search", "toy", trials)), data={"n_train": 1150},
                    workers={"w1": worker("a"), "w2": worker("a"), "w3": worker("b", torch="2.2")})
    section: Any = made_with(study)[0]
    machines, facts = section.blocks
    assert [tuple(row) for row in machines.rows] == [
        ("`a`", "`gpu 0`", "`H200`", "4", "2", "3"), ("`b`", "`gpu 0`", "`H200`", "4", "1", "1")]
    assert ["torch", "`2.1 and 2.2`"] in facts.rows and ["data", "`1,150 train`"] in facts.rows


def test_the_module_s_source_is_in_the_page_with_whether_the_trials_ran_it(tmp_path):
    study = replace(samples.results(), module="digits")
    source = report.read_source(study)
    assert source is not None and "STUDY = StudySpec(" in source.text
    ours = replace(study, workers={"w": worker("a", source.sha256)})
    assert "the very file that all trials ran with" in told(ours, source)
    other = replace(study, workers={"w": worker("a", "f" * 64)})
    assert "NOT what all trials ran with: they had `ffffffffffffffff…`" in told(
        other, source)
    report.write(ours, tmp_path, source)
    page = Page((tmp_path / "report.html").read_text())
    assert source.text.rstrip() in page.texts
    assert source.text not in (tmp_path / "report.md").read_text()


def test_a_module_that_is_not_here_is_said_so():
    gone = replace(samples.results(), module="../../etc/passwd", workers={"w": worker("a")})
    assert report.read_source(gone) is None
    assert "which is not at hand here" in told(gone, None)


def test_workers_are_read_from_the_database(tmp_path):
    db = samples.stored(tmp_path, sample=nothing(search=Phase("search", "toy", (at(0, 0, 1),))))
    db.runs.beat("w1", "toy", "host-1", 7, "cpu", {"versions": {"torch": "2"}})
    db.runs.beat("w9", "toy", "host-9", 7, "cpu", {})
    found = collect(db, "toy").workers
    db.close()
    assert list(found) == ["w1"] and found["w1"]["host"] == "host-1"


# In a browser


def noted(page) -> list[str]:
    """Return a list that fills with a page's requests, console lines and dialogs."""
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.on("console", lambda message: seen.append(message.text))
    page.on("dialog", lambda dialog: (seen.append("dialog"), dialog.dismiss()))
    return seen


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_a_page_opens_from_disk_without_a_request_an_error_or_a_script(tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright")
    evil = samples.results(name=EVIL, search=[*samples.trials(20, 0.98), *(
        Trial(20 + i, "FAIL", None, {}, f"error: {EVIL}") for i in range(2))])
    report.write(evil, tmp_path)
    address = (tmp_path / "report.html").as_uri()
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=[
            "--no-sandbox", "--disable-dev-shm-usage"])
        for scheme, paper in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 27)")):
            page = browser.new_context(color_scheme=scheme,
                                       viewport={"width": 390, "height": 800}).new_page()
            seen = noted(page)
            page.goto(address)
            assert seen == [address]
            # The page itself is no wider than a telephone; wide things scroll in their frames.
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
            assert page.inner_text("h1") == EVIL and page.locator("svg").count() == 5
        browser.close()
