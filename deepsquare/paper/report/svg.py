"""Elements of an SVG without colours of its own: the style sheet gives them, for light and for dark."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup


def add(parent: Element, tag: str, **attributes: str | float) -> Element:
    """A child of ``parent``; ``class_`` is class and ``text_anchor`` text-anchor, numbers have two digits at most."""
    texts = {
        name.rstrip("_").replace("_", "-"): value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
        for name, value in attributes.items()
    }
    return SubElement(parent, tag, texts)


def text(parent: Element, words: str, **attributes: str | float) -> None:
    """A line of text."""
    add(parent, "text", **attributes).text = words


def markup(element: Element) -> Markup:
    """The image for a template."""
    return Markup(tostring(element, encoding="unicode"))
