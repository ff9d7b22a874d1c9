"""The dashboard's door: who comes in, as reader or as writer, and who does not."""

from __future__ import annotations

import io
import sys
import time

import pytest
from dashboard_site import TOKEN, WRITER

from hpo.dashboard import Address
from hpo.door import TOKEN_VARIABLES, make_tokens
from hpo.errors import InputError


def test_without_the_token_nothing_is_shown_and_nothing_deleted(site_of):
    """C45.2."""
    site = site_of(writable=True)
    path = f"/api/studies/{site.study_id()}"
    for where, method in (("/api/studies", "GET"), (path, "DELETE"), ("/dashboard", "GET"),
                          ("/static/bundle.js", "GET"), (f"{path}?token=wrong", "DELETE")):
        assert site.ask(where, method, cookie=False)[0] == 401
    assert site.ask("/api/studies", cookie="wrong")[0] == 401
    assert len(site.json("/api/studies")["study_summaries"]) == 4


def test_a_change_from_another_page_or_under_another_name_is_refused(site_of):
    """C45.3."""
    site = site_of(writable=True)
    path = f"/api/studies/{site.study_id()}"
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"},
                    {"Host": "evil.example"}):
        assert site.ask(path, "DELETE", cookie=WRITER, **headers)[0] == 403
    assert site.ask("/api/studies", Host="evil.example:80")[0] == 403
    assert site.study_id()


def test_behind_a_proxy_the_public_name_may_be_the_host_or_the_page_that_asks(site_of):
    site = site_of(writable=True, address=Address(port=0, public_hosts=("hpo.example.org",)))
    assert site.ask("/api/studies", Host="hpo.example.org")[0] == 200
    assert site.ask("/api/studies", Host="hpo.example.com")[0] == 403
    # The proxy left the Host as it was, or set it to its own address of the server.
    body = {"study_name": "new", "directions": ["minimize"]}
    for i, host in enumerate(("hpo.example.org", f"127.0.0.1:{site.port}")):
        status, _, said = site.ask(
            "/api/studies", "POST", {**body, "study_name": f"new{i}"}, cookie=WRITER, Host=host,
            Origin="https://hpo.example.org")
        assert status == 201, said
    assert site.ask("/api/studies", "POST", body, cookie=WRITER, Host="hpo.example.org",
                    Origin="https://evil.example")[0] == 403


def test_a_trusted_proxy_says_who_asks_and_by_which_scheme(site_of):
    said = {"X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "https"}
    site = site_of(writable=True, address=Address(port=0, trusted_proxy="127.0.0.1"))
    site.ask("/api/studies", "POST", {"study_name": "new", "directions": ["minimize"]},
             cookie=WRITER, **said)
    assert "writer 203.0.113.7: create study: 'new'" in site.said[-1]
    assert "; Secure" in site.ask(f"/?token={TOKEN}", **said)[1]["Set-Cookie"]


def test_an_untrusted_client_cannot_say_that_it_is_another(site_of):
    site = site_of(writable=True)
    site.ask("/api/studies", "POST", {"study_name": "new", "directions": ["minimize"]},
             cookie=WRITER, X_Forwarded_For="203.0.113.7")
    assert "writer 127.0.0.1: create study" in site.said[-1]


@pytest.mark.parametrize("token", [TOKEN, WRITER])
def test_the_token_moves_from_the_address_into_a_cookie(site_of, token):
    site = site_of(writable=True)
    status, headers, _ = site.ask(f"/?token={token}&a=b", cookie=False)
    assert status == 303 and headers["Location"] == "/?a=b"
    assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Lax" in headers["Set-Cookie"]
    cookie = headers["Set-Cookie"].split(";")[0]
    assert site.ask("/api/studies", cookie=False, Cookie=cookie)[0] == 200


def test_the_log_in_page_lets_in_by_a_form_and_leads_on_to_what_was_asked_for(site_of):
    site = site_of(writable=True)
    status, headers, page = site.ask("/dashboard/studies/1?x=1", cookie=False, Accept="text/html")
    assert status == 401 and headers["Content-Type"].startswith("text/html")
    assert b'action="/login"' in page and b'name="next" value="/dashboard/studies/1?x=1"' in page
    form = f"token={WRITER}&next=%2Fdashboard%2Fstudies%2F1%3Fx%3D1"
    status, headers, _ = site.ask("/login", "POST", form, cookie=False)
    assert (status, headers["Location"]) == (303, "/dashboard/studies/1?x=1")
    assert f"hpo_token={WRITER}" in headers["Set-Cookie"]
    assert site.ask("/login", "POST", "token=wrong", cookie=False, Accept="text/html")[0] == 401


def test_logging_out_takes_the_cookie_away(site_of):
    status, headers, _ = site_of().ask("/logout", "POST")
    assert (status, headers["Location"]) == (303, "/login")
    assert "hpo_token=;" in headers["Set-Cookie"] and "Max-Age=0" in headers["Set-Cookie"]


@pytest.mark.parametrize("then", ["//evil.example/", "/\\evil.example/", "/%09/evil.example/"])
def test_logging_in_never_leads_to_another_host(site_of, then):
    site = site_of()
    status, headers, _ = site.ask("/login", "POST", f"token={TOKEN}&next={then}", cookie=False)
    assert status == 303 and headers["Location"] == "/evil.example/"
    status, headers, _ = site.ask(f"//evil.example/?token={TOKEN}", cookie=False)
    assert status == 303 and headers["Location"] == "/evil.example/"


def test_a_form_of_another_page_logs_nobody_in(site_of):
    site = site_of()
    assert site.ask("/login", "POST", f"token={TOKEN}", cookie=False,
                    Origin="http://evil.example")[0] == 403


def test_a_script_may_send_the_token_as_a_bearer(site_of):
    site = site_of()
    assert site.ask("/api/studies", cookie=False, Authorization=f"Bearer {TOKEN}")[0] == 200
    assert site.ask("/api/studies", cookie=False, Authorization="Bearer no")[0] == 401


def test_the_token_never_reaches_the_access_log(site_of, monkeypatch):
    """C45.5."""
    site = site_of()
    # Not capfd: what is written while it is read, it loses.
    log, out = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(sys, "stdout", out)
    site.ask(f"/?token={TOKEN}", cookie=False)
    site.ask(f"/dashboard?x=1&token={TOKEN}", cookie=False, Referer=f"http://h/?token={TOKEN}")
    site.ask("/api/studies%0AGET%20/forged")
    deadline = time.monotonic() + 10
    while log.getvalue().count("\n") < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    lines = log.getvalue().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "GET / 303", "GET /dashboard 303", "GET /api/studies%0AGET%20/forged 404"]
    assert TOKEN not in out.getvalue() + log.getvalue()


def test_without_a_token_everybody_of_this_machine_reads_and_foreign_names_are_refused(site_of):
    site = site_of(token=None)
    assert site.ask("/api/studies", cookie=False)[0] == 200
    assert site.ask("/api/studies", cookie=False, Host="evil.example")[0] == 403


def test_the_token_is_random_unless_one_is_given(monkeypatch):
    for variable in TOKEN_VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    drawn = [make_tokens(None, None, no_token=False, writable=True) for _ in range(5)]
    all_of_them = {token or "" for one in drawn for token in (one.reader, one.writer)}
    assert len(all_of_them) == 10 and min(map(len, all_of_them)) >= 32
    assert make_tokens(None, None, no_token=False, writable=False).writer is None
    assert make_tokens(None, None, no_token=True, writable=False).reader is None
    monkeypatch.setenv(TOKEN_VARIABLES["reader"], TOKEN)
    monkeypatch.setenv(TOKEN_VARIABLES["writer"], WRITER)
    both = make_tokens(None, None, no_token=False, writable=False)
    assert (both.reader, both.writer) == (TOKEN, WRITER)


def test_a_short_token_and_one_for_both_roles_are_refused(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLES["reader"], "short")
    with pytest.raises(InputError, match="at least 16 characters") as error:
        make_tokens(None, None, no_token=False, writable=False)
    assert "short" not in str(error.value)
    with pytest.raises(InputError, match="need different tokens"):
        make_tokens(TOKEN, TOKEN, no_token=False, writable=False)
