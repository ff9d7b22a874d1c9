"""The dashboard's pages under a path prefix, and the role that stands on them."""

from __future__ import annotations

import gzip
import json
import re

import pytest
from dashboard_site import TOKEN, WRITER

from hpo.dashboard import Address
from hpo.errors import InputError
from hpo.pages import check_prefix

UNDER = Address(port=0, path_prefix="/hpo")


def test_under_a_prefix_all_that_the_page_loads_and_asks_for_lies_under_it(site_of):
    site = site_of(address=UNDER)
    status, _, page = site.ask("/hpo/dashboard/studies/1")
    assert status == 200
    assert set(re.findall(rb'(?:src|href|action)="([^"]*)"', page)) == {
        b"/hpo/static/bundle.js", b"/hpo/favicon.ico", b"/hpo/logout"}
    script = site.ask("/hpo/static/bundle.js")[2].decode()
    assert 'url_prefix:"/hpo/dashboard"' in script
    asked = re.findall(r"[`}](/[a-z/]*(?:api|artifacts|csv)/[a-z$]+)", script)
    assert len(asked) > 25 and {path.split("/")[1] for path in asked} == {"hpo"}
    packed = site.ask("/hpo/static/bundle.js", Accept_Encoding="gzip, br")
    assert packed[1]["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed[2]).decode() == script


@pytest.mark.parametrize("at", ["/hpo", ""])
def test_a_proxy_may_take_the_prefix_off_or_leave_it(site_of, at):
    site = site_of(address=UNDER)
    status, headers, _ = site.ask(f"{at}/")
    assert (status, headers["Location"]) == (302, "/hpo/dashboard")
    status, headers, _ = site.ask(f"{at}/?token={TOKEN}", cookie=False)
    assert (status, headers["Location"]) == (303, "/hpo/")
    assert "Path=/hpo;" in headers["Set-Cookie"]
    assert len(json.loads(site.ask(f"{at}/api/studies")[2])["study_summaries"]) == 4
    assert b'action="/hpo/login"' in site.ask(f"{at}/", cookie=False, Accept="text/html")[2]


def test_pictures_of_a_note_lie_under_the_prefix_and_are_stored_without_it(site_of):
    site = site_of(address=UNDER, writable=True)
    path = f"/hpo/api/studies/{site.study_id()}"
    shown = "![curve](/hpo/artifacts/1/abc) and /artifacts/ in words"
    assert site.ask(f"{path}/note", "PUT", {"version": 1, "body": shown}, cookie=WRITER)[0] == 204
    assert json.loads(site.ask(path)[2])["note"]["body"] == shown
    stored = site.db.studies.get_study_system_attrs(site.study_id())
    assert stored["dashboard:note_str:0"] == shown.replace("/hpo", "")


def test_the_page_says_who_is_logged_in(site_of):
    site = site_of(writable=True)
    assert b">reader \xc2\xb7 " in site.ask("/dashboard")[2]
    assert b"log in to change" in site.ask("/dashboard")[2]
    status, headers, page = site.ask("/dashboard", cookie=WRITER)
    assert b">writer \xc2\xb7 " in page and b"log in to change" not in page
    assert headers["Cache-Control"] == "no-store" and headers["Last-Modified"] is None
    fresh = "Fri, 01 Jan 2100 00:00:00 GMT"
    assert site.ask("/dashboard", If_Modified_Since=fresh)[0] == 200


@pytest.mark.parametrize(("given", "taken"), [
    ("/hpo", "/hpo"), ("hpo/", "/hpo"), ("/a/b/", "/a/b"), ("", ""), ("/", "")])
def test_a_prefix_is_taken_with_and_without_its_slashes(given, taken):
    assert check_prefix(given) == taken


@pytest.mark.parametrize("prefix", ["/api/hpo", "dashboard", "/a//b", "/../x", "/a b", '/"x'])
def test_a_prefix_that_cannot_work_is_refused(prefix):
    with pytest.raises(InputError, match="--path-prefix"):
        check_prefix(prefix)
