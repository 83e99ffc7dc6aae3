"""The report and the live page in a real browser: no complaint, every panel, updates, and no page without the token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from stormo.report import command, watch
from stormo.telemetry.folder import RunFolder
from tests.report.made_run import MadeRun, append, schedule_trace
from tests.report.test_command import PANELS
from tests.system.browser import Browser, Page
from tests.system.conftest import Need

HOSTILE = "<img src=x onerror=document.title='broken'>"
SHOWN = "[...document.querySelectorAll('.panel')].map((panel) => panel.id)"
# Every figure holds a drawn plot or the reason why there is none.
EMPTY = (
    "[...document.querySelectorAll('figure')].filter((figure) => !figure.querySelector('.why') && "
    "!figure.querySelector('.main-svg .trace')).map((figure) => figure.textContent)"
)
PICTURE = (
    "Plotly.toImage(document.querySelector('#{} .plot'), {{format: 'png', width: 800, height: 400}})"
    ".then((url) => url.startsWith('data:image/png'))"
)


@pytest.fixture(scope="module")
def browser(need: Need, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    need("chromium", "chromium")
    one = Browser(tmp_path_factory.mktemp("browser"))
    yield one
    one.close()


def test_the_report_shows_every_panel_without_a_complaint(browser: Browser, tmp_path: Path) -> None:
    MadeRun(
        name=HOSTILE,
        notice=HOSTILE,
        resumed_after_epoch=2,
        pipeline=schedule_trace("1f1b", num_workers=2, micro_batches=2),
    ).write(tmp_path)
    MadeRun(name="other", num_workers=16, base_lr=0.1).write(tmp_path)
    command.main([HOSTILE, "other", "--runs-folder", str(tmp_path)])
    page = Page(browser, width=400, dark=True)
    page.open(f"file://{quote(str(tmp_path / 'report.html'))}")
    assert page.evaluate(SHOWN) == PANELS
    assert page.evaluate(EMPTY) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling on a phone"
    # Another axis, the legend, a table, a CSV file and a picture.
    page.evaluate("document.querySelector('input[value=epoch]').click()")
    assert page.evaluate("document.querySelector('#loss .xtitle').textContent") == "epoch"
    page.wait("document.querySelectorAll('#loss .legendtoggle').length === 4")
    assert page.evaluate("document.querySelectorAll('#loss .modebar-btn').length") == 2, "a picture and a CSV file"
    page.evaluate("document.querySelector('#loss details').open = true")
    page.wait("document.querySelectorAll('#loss tbody tr').length > 50")
    page.evaluate("document.querySelector('#configuration .only input').click()")
    assert page.evaluate("document.querySelectorAll('#configuration tbody tr:not([hidden])').length > 0")
    bars = "[...document.querySelectorAll('#pipeline .bartext')].map((bar) => bar.textContent).sort().join()"
    assert page.evaluate(bars) == "0,0,0,0,1,1,1,1", "forward and backward of two micro-batches on two workers"
    assert page.evaluate(PICTURE.format("pipeline"))
    head = page.evaluate("stormoPage.csvOf('chart-loss').split('\\r\\n')[0]")
    assert head == "run,series,step,epoch,time_s,loss"
    assert page.evaluate(PICTURE.format("loss"))
    assert HOSTILE in page.evaluate("document.getElementById('timeline').textContent")
    assert page.evaluate("document.title").endswith("– stormo"), "the name of a run is text, not markup"
    assert page.complaints() == []
    page.close()


def test_the_live_page_follows_the_run_and_needs_its_token(browser: Browser, tmp_path: Path) -> None:
    made = MadeRun(epochs=2, has_ended=False)
    folder = tmp_path / made.name
    (folder / "nodes").mkdir(parents=True)
    server = watch.Server(RunFolder(folder), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    page = Page(browser)
    try:
        page.open(server.address)
        status = "document.getElementById('status').textContent"
        assert "waiting for the run to start" in page.evaluate(status)
        events = list(made.events())
        append(folder / "events.jsonl", events[:12])
        append(folder / "nodes" / "0.jsonl", list(made.node_lines(0))[:12])
        page.evaluate("window.isTheSamePage = true")
        page.wait("document.querySelector('#loss .trace') && document.querySelector('#power .trace')")
        append(folder / "events.jsonl", [{**event, "time_unix_s": 9e9} for event in events[12:]])
        page.wait("stormoPage.doc().panels[0].charts[0].series[0].y.length === 40")
        assert "running" in page.evaluate(status)
        (folder / "summary.json").write_text(json.dumps(made.summary()))
        page.wait(f"{status}.includes('the run has ended: done')")
        assert page.evaluate("isTheSamePage"), "it is brought up to date, not loaded again"
        assert page.evaluate(SHOWN) == PANELS
        assert page.complaints() == []
        page.open(server.address.partition("?")[0], ready="document.body.textContent.includes('lacks the token')")
        assert made.name not in page.evaluate("document.documentElement.textContent")
    finally:
        page.close()
        server.shutdown()
        server.server_close()
        thread.join()
