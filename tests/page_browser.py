"""Drives the web page in a real Chromium, as a person would."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from tests import tools

DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 360, "height": 740}
PATIENCE = 60_000  # milliseconds that a step may take on a busy machine


@dataclass
class Seen:
    """What went on behind a page."""

    requests: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of the console and of scripts


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=tools.browser(), args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, **options) -> Iterator[tuple[Page, Seen]]:
    """A page at `url`, ready to be used, in a profile of its own."""
    context = browser.new_context(**{"viewport": DESKTOP, **options})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    try:
        seen = watch(page)
        page.goto(url)
        yield page, seen
    finally:
        # A route that is still being answered would fail in the middle of the next test.
        page.unroute_all(behavior="ignoreErrors")
        context.close()


def watch(page: Page) -> Seen:
    seen = Seen()
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("requestfailed", lambda request: seen.failed.append(request.url))
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on(
        "console",
        lambda message: seen.errors.append(message.text) if message.type == "error" else None,
    )
    return seen


def artifacts(otherwise: Path) -> Path:
    """Where screenshots go."""
    folder = Path(os.environ.get("SD_TF_ARTIFACTS") or otherwise)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
