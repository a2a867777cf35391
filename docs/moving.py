"""Films the replica in a browser: `python -m docs.moving` writes docs/watch.webp, which opens the README.

With `--card`, it also writes the picture that sites show for a link to the page (web/card.png).

The policy plays one word with the weights of several versions of the recorded run. Only the last solves it.
"""

from __future__ import annotations

import argparse
import functools
import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect

from tests.support.browser import chromium

ROOT = Path(__file__).parents[1]
VERSIONS = (0, 6, 12, 18)
DRAWN = 38  # the number that the page draws in place of a random one: it chooses the word
# pixels of the page, and of the picture
SIZE = {"width": 900, "height": 850}
WIDTH = 720
LIMIT = 200_000  # bytes
CARD = {"width": 1200, "height": 630}  # what sites that show links ask for
CARD_STYLE = """
  body { max-width: none; padding: 48px 52px; height: 630px; overflow: hidden; display: grid;
    column-gap: 44px; grid-template-columns: 1fr 430px; grid-template-rows: auto 1fr }
  main { display: contents } header { grid-column: 1 } #version { grid-column: 1; align-self: start }
  main > .card:nth-of-type(2) { grid-column: 2; grid-row: 1 / span 2; margin: 0 }
  main > .card:nth-of-type(n + 3), footer, details, .keys, .buttons, .scrub { display: none }
  .boards figure:first-child { display: none }
  h1 { font-size: 54px } .lead { font-size: 22px } .boards { grid-template-columns: 1fr; max-width: 300px }
"""
# of a frame in which nothing moves, and of the last one
LONGEST_MS = 700
LAST_MS = 3000
# The page's content security policy allows no inline style, but this.
_RESTYLE = "css => { const s = new CSSStyleSheet(); s.replaceSync(css); document.adoptedStyleSheets = [s] }"


class _Film:
    """Frames of a page, and for how many milliseconds each is shown."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.frames: list[Image.Image] = []
        self.shown_ms: list[int] = []

    def until(self, place: str, words: str) -> None:
        """Film until the text of `place` begins with `words`."""
        over = False
        while not over:
            started = time.monotonic()
            over = self.page.locator(place).inner_text().startswith(words)
            picture = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
            height = picture.height * WIDTH // picture.width
            picture = picture.resize((WIDTH, height), Image.Resampling.LANCZOS)
            self.page.wait_for_timeout(80)
            lasted_ms = int(1000 * (time.monotonic() - started))
            if self.frames and picture == self.frames[-1]:
                self.shown_ms[-1] = min(LONGEST_MS, self.shown_ms[-1] + lasted_ms)
            else:
                self.frames.append(picture)
                self.shown_ms.append(min(LONGEST_MS, lasted_ms))

    def save(self, path: Path) -> None:
        """Write the film with the best quality that fits in `LIMIT`."""
        self.shown_ms[-1] = LAST_MS
        first, *others = self.frames
        options = {"save_all": True, "append_images": others, "duration": self.shown_ms, "loop": 0}
        for quality in range(80, 0, -10):
            first.save(path, quality=quality, method=6, minimize_size=True, allow_mixed=True, **options)
            if path.stat().st_size < LIMIT:
                return
        raise SystemExit(f"{path} has {path.stat().st_size} bytes: film fewer versions")


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    """Serve web/, film it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "watch.webp")
    parser.add_argument("--card", type=Path, metavar="PNG")
    arguments = parser.parse_args()
    out = arguments.out
    with chromium() as browser, _served(ROOT / "web") as url:
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.add_init_script(f"crypto.getRandomValues = (numbers) => numbers.fill({DRAWN})")
        page.goto(url)
        for control in ("#watch", "#slider"):
            expect(page.locator(control)).to_be_enabled()
        film = _Film(page)
        for version in VERSIONS:
            page.locator("#slider").fill(str(version))
            expect(page.locator("body")).to_have_attribute("data-version", str(version))
            if version == VERSIONS[0]:
                page.click("#watch")
            film.until("#says", f"Version {version} ")
        film.save(out)
        if arguments.card:
            page.set_viewport_size(CARD)
            page.evaluate(_RESTYLE, CARD_STYLE)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            picture.quantize(128).save(arguments.card, optimize=True)
    print(f"{out}: {len(film.frames)} frames, {sum(film.shown_ms) / 1000:.0f} s, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
