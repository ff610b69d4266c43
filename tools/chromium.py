"""Opens pages in Debian's Chromium, without a window and without a network: for tests, benchmarks and screenshots."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER, DRIVER = "chromium", "chromedriver"  # which `make browser` installs, and looks for
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)  # fmt: skip
LIGHT, DARK = "light", "dark"


def missing() -> str:
    """What is not installed, in words; empty where all is there."""
    if shutil.which(BROWSER) is None:
        return "there is no Chromium; `make browser` installs it on Debian"
    if shutil.which(DRIVER) is None:
        return "there is no chromedriver; `make browser` installs it on Debian"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    return ""


class Window:
    """A window of the browser.

    Args:
        driver: Selenium's.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(
        self, page: Path, fragment: str = "", *, width: int = 1400, height: int = 900, scheme: str = LIGHT
    ) -> None:
        """Load a page anew, and wait until its script has run.

        Args:
            page: the file.
            fragment: of its address, with the `#`.
            width: of the window, in CSS pixels.
            height: of the window.
            scheme: `light` or `dark`.
        """
        self.resize(width, height)
        self.media("", scheme)
        self.driver.get("about:blank")
        self.driver.get(page.resolve().as_uri() + fragment)
        self.driver.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0]))")  # drawn, and at rest

    def resize(self, width: int, height: int) -> None:
        """Make the window so large; a narrow one is that of a phone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def media(self, kind: str, scheme: str = LIGHT) -> None:
        """Show the page as on another medium: `print`, or empty for the screen."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind, "features": features})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """What has come to the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


def picture(window: Window) -> bytes:
    """What is to be seen, as a PNG of 256 colours, the same bytes for the same pixels."""
    from PIL import Image

    shown = Image.open(io.BytesIO(window.driver.get_screenshot_as_png())).convert("RGB")
    png = io.BytesIO()
    shown.quantize(256, dither=Image.Dither.NONE).save(png, "PNG", optimize=True)
    return png.getvalue()


@contextmanager
def window() -> Iterator[Window]:
    """A browser with an empty profile, which ends with the block."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = Options()
        options.binary_location = shutil.which(BROWSER) or ""
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = Service(shutil.which(DRIVER), env={**os.environ, "HOME": profile})
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield Window(driver)
        finally:
            driver.quit()
