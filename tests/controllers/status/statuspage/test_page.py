"""The page in a real browser: themes, keyboard, screen readers, hostile texts, 2,000 nodes."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controllers.status.statuspage.browser import BROWSER, Browser
from tests.controllers.status.statuspage.samples import encode, make_document
from tests.waiting import wait_until
from treenail.controllers.status.leader_status import LeaderReport, LeaderState
from treenail.controllers.status.statuspage.server import EncodedDocument, StatusPageServer

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not os.environ.get(BROWSER), reason=f"{BROWSER} does not name a Chromium to test with"
    ),
]


CONTRASTS = """(() => {
    const linear = each => each / 255 <= .03928 ? each / 255 / 12.92
        : ((each / 255 + .055) / 1.055) ** 2.4;
    const light = text => {
        const [r, g, b] = text.match(/[0-9]+/g).map(linear);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const head = document.querySelector('.head');
    const page = light(getComputedStyle(head).backgroundColor);
    return ['.faint', '.good', '.busy', '.bad'].map(name => {
        const shown = document.querySelector('#pools ' + name);
        const text = light(getComputedStyle(shown).color);
        return (Math.max(page, text) + .05) / (Math.min(page, text) + .05);
    });
})()"""
"""Contrast of each colour of texts with the background, from 1 to 21."""


class Site:
    """The served page and a browser."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.document = encode(make_document())
        self.address = ""

    def read_document(self) -> EncodedDocument:
        return self.document


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Browser(os.environ[BROWSER], tmp_path_factory.mktemp("profile")) as browser:
        site = Site(browser)
        with StatusPageServer("127.0.0.1", 0, site.read_document) as server:
            site.address = f"http://127.0.0.1:{server.port}/"
            yield site


@pytest.fixture
def site(shared_site: Site) -> Site:
    shared_site.document = encode(make_document())
    shared_site.browser.problems.clear()
    shared_site.browser.open(shared_site.address, width=1200, height=900)
    return shared_site


def read_text(site: Site, selector: str) -> str:
    return str(site.browser.evaluate(f"document.querySelector({selector!r}).textContent"))


def test_pool_shows_progress_blockers_and_history(site: Site) -> None:
    text = read_text(site, "[aria-label='pool worker']")
    for part in (
        *("Updating", "1 of 8 nodes updated", "wave 2 of 3"),
        "waiting: wave 2 of 3 is in progress",
        "blocked (drain): worker-0002: PodDisruptionBudget shop/web of pod shop/web-1",
        *("24 % staging 40 %", "42.20260601.3.0", "3 min 20 s", "Last rollouts (2)"),
    ):
        assert part in text
    # Nothing says when a user ends what blocks the drain.
    assert "left, until" not in text
    assert "next window" in read_text(site, "[aria-label='pool infra']")
    assert site.browser.problems == []


def test_pool_shows_its_image_build(site: Site) -> None:
    running, failed = (
        read_text(site, f"[aria-label='pool {name}'] .build") for name in ("worker", "gpu")
    )
    assert running == "image build: Building, 3 min 20 s: Job build-worker-1 runs build"
    assert failed.startswith("image build: Failed, 4 s: line 2: <script>")
    classes = "[...document.querySelectorAll('#pools .build')].map(each => each.className).join()"
    assert site.browser.evaluate(classes) == "build bad,build busy"
    assert (
        site.browser.evaluate("document.querySelector('[aria-label=\"pool infra\"] .build')")
        is None
    )
    assert site.browser.problems == []


def test_hostile_text_stays_text(site: Site) -> None:
    assert "<script>document.title='owned'</script><img" in read_text(
        site, "[aria-label='pool gpu']"
    )
    assert r"\u202egnp.\u001b" in read_text(site, "[aria-label='pool gpu']")
    assert site.browser.evaluate("document.title") == "treenail: rollouts"
    assert site.browser.evaluate("document.querySelectorAll('img').length") == 0
    assert site.browser.problems == []


def test_themes_follow_the_browser_with_readable_contrast(site: Site, tmp_path: Path) -> None:
    backgrounds = set()
    for scheme in ("light", "dark"):
        site.browser.open(site.address, width=1200, height=900, scheme=scheme)
        backgrounds.add(site.browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        contrasts = site.browser.evaluate(CONTRASTS)
        # The minimum of the Web Content Accessibility Guidelines, level AA.
        assert min(contrasts) >= 4.5, scheme
        site.browser.take_picture(tmp_path / f"{scheme}.png")
    assert len(backgrounds) == 2


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        ("", "The cluster has no MachineConfigPools."),
        ("pools are not listed yet", "No MachineConfigPool is read yet."),
    ],
)
def test_page_without_pools_says_whether_they_were_read(
    problem: str, text: str, site: Site
) -> None:
    document: dict[str, Any] = make_document()
    site.document = encode({**document, "pools": [], "problem": problem})
    site.browser.open(site.address, width=1200, height=900)
    assert read_text(site, "#pools") == text


def test_page_says_what_is_unknown_and_that_no_controller_leads(site: Site) -> None:
    document: dict[str, Any] = make_document()
    report = LeaderReport(LeaderState.NONE, renewed_at=0.0).to_json()
    worker = document["pools"][-1]
    worker.update(state="Unknown", reportedState="Updating", counts=dict.fromkeys(worker["counts"]))
    worker["nodes"][0].update(phase="conflict", reason="node worker-0000 is selected by 2 pools")
    site.document = encode({**document, "controller": report})
    site.browser.open(site.address, width=1200, height=900)
    assert read_text(site, "#problem").startswith(
        "no controller leads since 1970-01-01 00:00:00 UTC: pools show old reports; run: "
    )
    text = read_text(site, "[aria-label='pool worker']")
    for part in (
        "Unknown, last reported Updating",
        "number of updated nodes unknown",
        "node worker-0000 is selected by 2 pools",
    ):
        assert part in text
    assert "null" not in text
    assert site.browser.evaluate("document.querySelectorAll('.reason.bad').length") >= 2


@pytest.mark.parametrize(
    ("remaining_s", "text"),
    [(20, "less than a minute left"), (150, "about 3 min left, until ")],
)
def test_estimate_of_the_page_is_no_time_that_is_over(
    site: Site, remaining_s: int, text: str
) -> None:
    document: dict[str, Any] = make_document()
    worker = document["pools"][-1]
    worker.update(remainingSeconds=remaining_s, estimatedEnd="2026-01-01T00:00:00Z")
    site.document = encode(document)
    site.browser.open(site.address, width=1200, height=900)
    found = read_text(site, "[aria-label='pool worker']")
    assert text in found
    assert ("until" in found) is ("until" in text)


def test_narrow_window_needs_no_sideways_scrolling(site: Site) -> None:
    site.browser.open(site.address, width=360, height=800)
    assert site.browser.evaluate("document.documentElement.scrollWidth") <= 360


def test_keyboard_alone_reaches_filter_and_history(site: Site) -> None:
    site.browser.press("/")
    assert site.browser.evaluate("document.activeElement.id") == "filter"
    site.browser.send("Input.insertText", text="worker-0003")
    assert "7 more nodes do not match" in read_text(site, "[aria-label='pool worker']")
    focused = []
    for _ in range(4):
        site.browser.press("Tab")
        focused.append(site.browser.evaluate("document.activeElement.tagName"))
    assert "SUMMARY" in focused


def test_screen_reader_gets_tables_bars_and_names(site: Site) -> None:
    site.browser.open(site.address, width=1200, height=1600)
    # Chromium adds rows with content-visibility to the tree after it has laid them out.
    bar = ("progressbar", "worker-0001")
    wait_until(lambda: bar in site.browser.list_accessible())
    found = site.browser.list_accessible()
    assert ("table", "nodes of pool worker") in found
    assert ("columnheader", "Out of service") in found
    assert ("list", "what blocks pool worker") in found
    assert ("heading", "Rollouts") in found
    assert ("searchbox", "Nodes") in found


def test_outdated_document_raises_an_alert(site: Site) -> None:
    site.document = encode({**make_document(), "problem": "nodes watch disconnected"})
    site.browser.evaluate("refresh()")
    assert read_text(site, "#problem") == "May be outdated: nodes watch disconnected"
    site.document = EncodedDocument(b"no json", b"no gzip")
    site.browser.evaluate("refresh()")
    assert read_text(site, "#problem").startswith("Outdated: cannot read status.json: ")
    assert "worker-0000" in read_text(site, "[aria-label='pool worker']")


def test_of_2000_nodes_only_the_visible_ones_are_laid_out(site: Site) -> None:
    site.document = encode(make_document(2000))
    site.browser.evaluate("refresh()")
    assert site.browser.evaluate("document.querySelectorAll('.chunk .row').length") == 2002
    skipped = """[...document.querySelectorAll('.chunk .row')].filter(
        row => !row.checkVisibility({contentVisibilityAuto: true})).length"""
    assert site.browser.evaluate(skipped) > 1800
    kept = site.browser.evaluate("""(async () => {
        const before = [...document.querySelectorAll('.chunk .row')];
        await refresh();
        const after = document.querySelectorAll('.chunk .row');
        return before.filter((row, at) => row === after[at]).length;
    })()""")
    assert kept == 2002, "unchanged rows are not built again"
