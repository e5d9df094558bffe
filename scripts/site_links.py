"""A hook of mkdocs: links to files beside docs/, which the site does not have, become text."""

import re


def on_page_markdown(markdown: str, **_event: object) -> str:
    """The page with `[name](../file)` as `name`."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
