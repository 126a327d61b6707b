"""The page in a real browser: nothing is fetched, nothing runs, nothing sticks out, light, dark and on paper."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from flashmoe_science.proof.judge.judge import judge
from flashmoe_science.proof.report.html import render_html
from flashmoe_science.proof.report.page import Judged, build_page

from ..required import import_needed, missing
from .builders import build_record
from .claim_builders import build_claim
from .page_checks import hostile_record

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
OVERFLOW = """
return [...document.querySelectorAll('body *')].filter(e => {
  if (e.parentElement.closest('.scroll, svg')) return false;  // both clip what is in them
  const box = e.getBoundingClientRect();
  return box.width > 0 && (box.right > window.innerWidth + 1 || box.left < -1);
}).map(e => e.outerHTML.slice(0, 120))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    chromedriver = shutil.which("chromedriver")
    if browser is None or chromedriver is None:
        missing("browser", f"needs {' or '.join(BROWSERS)} and chromedriver (Debian: chromium and chromium-driver)")
    webdriver = import_needed("selenium.webdriver", "browser", "needs selenium, which drives the browser")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(chromedriver, log_output=os.devnull))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write the pages of an ordinary run, of several, and of one whose every text is an attack."""
    folder = tmp_path_factory.mktemp("pages")
    record = build_record(speedups=[2.3, 3.0, 0.5], baselines={"sdpa": 1.0, "sdpa-cudnn": 1.2})
    verdicts = [judge(build_claim(), record)]
    hostile = Judged(hostile_record(), [judge(build_claim(), hostile_record())])
    written = {
        "one": [Judged(record, verdicts)],
        "several": [Judged(record, verdicts), Judged(build_record(day=1), [])],
    }
    for name, judged in {**written, "hostile": [hostile, Judged(hostile_record(day=1), [])]}.items():
        (folder / f"{name}.html").write_text(render_html(build_page(judged)), encoding="utf-8")
    return folder


def show(driver, page, *, width=1280, scheme="light"):
    """Open a page as a screen of this width sees it; return what the browser asked the network for."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    driver.get_log("performance")
    driver.get(page.as_uri())
    driver.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return [url for url in asked if not url.startswith("data:")]


@pytest.mark.parametrize("name", ["one", "several", "hostile"])
def test_the_page_fetches_nothing_runs_nothing_and_complains_of_nothing(driver, pages, name):
    page = pages / f"{name}.html"
    assert show(driver, page) == [page.as_uri()]
    assert driver.get_log("browser") == []
    assert driver.title != "owned"
    assert driver.execute_script("return document.scripts.length + document.images.length") == 0
    assert driver.execute_script("return getComputedStyle(document.querySelector('main')).maxWidth") == "1120px"


@pytest.mark.parametrize("width", [320, 390, 800, 1280])
@pytest.mark.parametrize("name", ["one", "several", "hostile"])
def test_nothing_sticks_out_of_the_page(driver, pages, name, width):
    show(driver, pages / f"{name}.html", width=width)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.execute_script(OVERFLOW) == []
