"""What a reader sees of a page, whose tags must match."""

import html.parser


class Balanced(html.parser.HTMLParser):
    """Every tag is closed where it has to be."""

    VOID = ("meta", "line", "polyline", "circle")

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def text_of(page: str) -> str:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert "<script" not in page and "http" not in page and "$" not in page
    return "".join(parser.text)
