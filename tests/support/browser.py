"""Opening a page from disk in a browser, and the contrast of its text. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Open = Callable[..., Any]

# Every element with text of its own, its colour, and the first opaque background under it; as WCAG computes contrast.
LOWEST_CONTRAST = """() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b]
    .map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
  };
  let lowest = [Infinity, ""];
  for (const e of document.body.querySelectorAll("*")) {
    if (!e.checkVisibility() || ![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const pair = [light(parse(getComputedStyle(e).color)), light(ground(e))].sort((a, b) => b - a);
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (contrast < lowest[0]) lowest = [contrast, e.outerHTML.slice(0, 200)];
  }
  return lowest;
}"""


@contextmanager
def opening(browser: Any, file: Path, to_text: Callable[[Any], str]) -> Iterator[Open]:
    """Opens pages from disk; at the end, fails for anything said on the console or fetched."""
    said: list[str] = []
    fetched: list[str] = []
    contexts = []

    def open_page(shown: Any, *, width: int = 1280, **options: Any) -> Any:
        file.write_text(to_text(shown), encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not said, said
    assert all(url.startswith(("file:", "data:")) for url in fetched), fetched
    assert len([url for url in fetched if url.startswith("file:")]) == len(contexts), fetched
