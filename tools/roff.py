"""Markdown as roff for man pages.

An item that begins with code or emphasis and a colon is a term with its text. Code is bold, or
italic if it is a path. Emphasis is italic, for what the user replaces.
"""

import re
from collections.abc import Iterator, Sequence

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

_MARKDOWN = MarkdownIt("commonmark")
_TERM = re.compile(r"((?:(?:`[^`]+`|\*+[^*]+\*+)(?:[\s,.|\[\]]|and|or)*)+):\s+(.*)", re.DOTALL)
_MANUAL = re.compile(r"(?<!\w)([a-z][\w.\\-]*)(\([1-8]\))")
_ESCAPES = str.maketrans(
    {"\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "~": r"\(ti", "^": r"\(ha"}
)
_INLINE = {
    "softbreak": " ", "hardbreak": "\n.br\n", "em_open": r"\fI", "em_close": r"\fR",
    "strong_open": r"\fB", "strong_close": r"\fR",
}  # fmt: skip


def format_roff(markdown: str) -> str:
    """Format a page without its title line; raise for Markdown that no man page can have."""
    blocks = SyntaxTreeNode(_MARKDOWN.parse(markdown)).children
    return "".join(f"{line}\n" for line in _format_blocks(blocks))


def escape(text: str) -> str:
    """Return text that roff prints as it is, within a line."""
    return text.translate(_ESCAPES)


def _format_blocks(blocks: Sequence[SyntaxTreeNode], *, is_item: bool = False) -> Iterator[str]:
    """Yield the lines of blocks: of a page, or of an item after its first paragraph."""
    paragraph, is_first = (".IP" if is_item else ".PP"), not is_item
    for block in blocks:
        if block.type == "heading":
            macro = {"h1": ".SH NAME\n", "h2": ".SH ", "h3": ".SS "}[block.tag]
            yield macro + escape(block.children[0].content)
        elif block.type in {"bullet_list", "ordered_list"}:
            lines = (line for item in block.children for line in _format_item(item))
            yield from [".RS", *lines, ".RE"] if is_item else lines
        else:
            yield from [] if is_first else [paragraph]
            if block.type == "paragraph":
                yield _format_inline(block.children[0].content)
            elif block.type == "fence":
                code = [".EX", *map(_format_code_line, block.content.splitlines()), ".EE"]
                yield from code if is_item else [".in +4n", *code, ".in"]
            else:
                raise ValueError(f"a man page has no {block.type}: lines {block.map}")
        is_first = block.type == "heading"


def _format_item(item: SyntaxTreeNode) -> Iterator[str]:
    text = item.children[0].children[0].content
    if item.info:
        yield f".IP {item.info}. 4"
    elif term := _TERM.fullmatch(text):
        yield from (".TP", _format_inline(term[1]))
        text = term[2]
    else:
        yield r".IP \(bu 2"
    yield _format_inline(text)
    yield from _format_blocks(item.children[1:], is_item=True)


def _format_inline(text: str) -> str:
    formatted = ""
    (line,) = _MARKDOWN.parseInline(text)
    for part in line.children or []:
        if part.type == "code_inline":
            is_path = re.match(r"~?/|\.[a-z]", part.content)
            formatted += rf"\f{'I' if is_path else 'B'}{escape(part.content)}\fR"
        elif part.type == "text":
            formatted += _MANUAL.sub(r"\\fB\1\\fR\2", escape(part.content))
        else:
            formatted += _INLINE[part.type]
    return rf"\&{formatted}" if formatted.startswith(".") else formatted


def _format_code_line(line: str) -> str:
    return rf"\&{escape(line)}" if line.startswith(".") else escape(line)
