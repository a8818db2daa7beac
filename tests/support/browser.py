"""A page of a real browser that notes errors and requests, and a dashboard in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect

TIMEOUT_MS = 30_000  # of a wait: a hang
COMMAND = "import sys; from headpond.commands.main import main; sys.argv[0] = 'headpond'; main()"


class Watched:
    """A page, and what it did that it must not."""

    def __init__(self, page: Page, url: str, *, refusals: bool = False) -> None:
        """With `refusals`, responses with an error are expected, which the browser reports as errors of its own."""
        self.page, self.url, self._refusals = page, url, refusals
        self.errors: list[str] = []
        self.requested: set[str] = set()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: self.requested.add(request.url.split("/", 3)[2]))

    def open(self, place: str = "") -> Page:
        """Wait until the page is drawn. The pages' policy does not allow waits by a script."""
        self.page.goto(f"{self.url}{place}")
        return self._drawn(place)

    def go(self, place: str) -> Page:
        self.page.evaluate("place => { location.hash = place }", place)
        return self._drawn(place)

    def _drawn(self, place: str) -> Page:
        expect(self.page.locator("html")).to_have_attribute("data-drawn", place, timeout=TIMEOUT_MS)
        return self.page

    def check(self) -> None:
        unexpected = [error for error in self.errors if not (self._refusals and "status of 404" in error)]
        assert unexpected == []
        assert self.requested <= {self.url.split("/", 3)[2]}, "a request left the machine"


@contextmanager
def dashboard(*run_dirs: Path | str) -> Iterator[str]:
    """The URL of a server process for these run directories; options may follow."""
    arguments = ["dashboard", *map(str, run_dirs), "--port", "0"]
    process = subprocess.Popen([sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield found[0]
    finally:
        process.terminate()
        process.wait(10)
