"""A hook of mkdocs: the site has docs/ alone, so links to other files of the repository become text."""

import re


def on_page_markdown(markdown: str, **_event: object) -> str:
    """The page with `[name](../file)` as `name`."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
