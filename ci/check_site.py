"""Fail if a page of the built site would load anything from another host, or something that is not there.

python ci/check_site.py SITE
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "srcset",
    "link": "href",
    "video": "src",
    "use": "href",
}


class Loads(HTMLParser):
    """What a browser fetches to show a page, unasked."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if "mermaid" in (given.get("class") or ""):
            self.found.append("https://unpkg.com: the theme fetches mermaid for this page")
        value = given.get(LOADED.get(tag, ""))
        if value and not (tag == "link" and given.get("rel") in ("prev", "next", "canonical")):
            self.found.append(value)


def problems_of(page: Path) -> list[str]:
    text = page.read_text()
    loads = Loads()
    loads.feed(text)
    found = [f"{page}: loads {url}" for url in loads.found if re.match(r"(https?:)?//", url)]
    found += [
        f"{page}: {url} is not there"
        for url in loads.found
        if not re.match(r"(https?:)?//|data:", url)
        and not (page.parent / url.partition("#")[0].partition("?")[0]).exists()
    ]
    shown = re.sub("<!--.*?-->|<[^>]*>", "", text, flags=re.DOTALL)  # without comments and mark-up
    if re.search(r"--\s*8\s*&lt;\s*--", shown):
        found.append(f"{page}: a snippet was not included")
    return found


def main(site: Path) -> int:
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]  # whose paths begin at the host
    problems = [problem for page in pages for problem in problems_of(page)]
    for style in site.rglob("*.css"):
        problems += [
            f"{style}: loads {url}" for url in re.findall(r"url\(['\"]?((?:https?:)?//[^)]+)\)", style.read_text())
        ]
    print("\n".join(problems) or f"{len(pages)} pages load nothing from elsewhere")
    return bool(problems) or not pages


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
