"""A real Chromium, headless. Run by `make test-browser`; it needs Chromium on PATH and the extra `browser`."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect, sync_playwright
from support.browser import TIMEOUT_MS, Watched

FLAGS = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-sandbox"]  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "install Chromium: apt-get install chromium"
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def watched(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Makes pages; afterwards none may have had an error or left the machine."""
    contexts: list[Any] = []
    made: list[Watched] = []

    def make(url: str, *, refusals: bool = False, **options: Any) -> Watched:
        context = browser.new_context(**options)
        contexts.append(context)
        made.append(Watched(context.new_page(), url, refusals=refusals))
        return made[-1]

    yield make
    for each in made:
        each.check()
    for context in contexts:
        context.close()
