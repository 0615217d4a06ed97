"""For mkdocs: examples in docstrings (`>>> ...`) are code, not quotations."""

import re

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor


class _Examples(Preprocessor):
    def run(self, lines):
        found, inside = [], False
        for line in lines:
            starts = bool(re.match(r"\s*>>> ", line))
            if starts and not inside:
                found.append("")
            inside = starts or (inside and bool(line.strip()))
            found.append("    " + line if inside else line)
        return found


class Examples(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # after fenced blocks (25) and html (20) have been taken out of the way
        md.preprocessors.register(_Examples(md), "examples", 15)


def on_config(config):
    config.markdown_extensions.append(Examples())
    return config
