"""Read a page of penstock as a person and a browser do."""

import html
import re
from html.parser import HTMLParser

SVG = "http://www.w3.org/2000/svg"


class Reader(HTMLParser):
    """The text that a reader sees, the tags in their order, and the JSON."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.seen: list[str] = []
        self.data = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "wbr"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open and self.tags[-1][1].get("id") == "data":
            self.data += data
        elif not {"script", "style", "head"} & {*self.open}:
            self.seen.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.seen).split())


def assert_needs_no_network(page: str) -> None:
    assert {*re.findall(r"[a-z]+://[^\s\"'<]*", page)} == {SVG}
    assert "@import" not in page
    assert not {"src", "srcset", "action", "style", "onclick"} & {name for _, found in Reader(page).tags for name in found}
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert html.unescape(policy[1]).startswith("default-src 'none'; style-src 'sha256-")
