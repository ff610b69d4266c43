"""Types a word into the search of the built site in Chromium, as a file and from a server: `make search`."""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
import chromium  # noqa: E402

SITE = ROOT / "site"
WORDS, PAGE = "rounding", "numerics.html"
SECONDS = 60


class Quiet(SimpleHTTPRequestHandler):
    """A server that says nothing of what it serves."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


def pages_found(window: chromium.Window, address: str) -> list[str]:
    """The pages that the search lists, once it has its index."""
    window.resize(1400, 900)
    window.driver.get(f"{address}/index.html")
    field = window.driver.find_element("css selector", ".md-search__input")
    field.click()
    field.send_keys(WORDS)
    end = time.monotonic() + SECONDS
    links: list[str] = []
    while not links and time.monotonic() < end:
        time.sleep(0.1)
        links = window.run(
            "return [...document.querySelectorAll('.md-search-result__link')].map((one) => one.pathname)"
        )
    return [link.rpartition("/")[2] for link in links]


def main() -> int:
    """1 where the page is not found, or the console has a complaint."""
    if lacking := chromium.missing():
        print(lacking, file=sys.stderr)
        return 2
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    failed = False
    with chromium.window() as window:
        for address in (SITE.as_uri(), f"http://127.0.0.1:{server.server_port}"):
            pages, complaints = pages_found(window, address), window.complaints()
            failed |= PAGE not in pages or bool(complaints)
            print(f"{address}: '{WORDS}' is in {len(set(pages))} pages; {'; '.join(complaints) or 'no complaints'}")
    server.shutdown()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
