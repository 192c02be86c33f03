"""The structure of a PDF: what is a heading, a paragraph, a table's cell, in the order of reading (ISO 32000, 14.8).

    tags = Tags()
    table = tags.root.add("Table")
    flowable.tag = table.add("TR").add("TH", scope="Column")   # `tagged(Paragraph)` marks what it draws
    tags.write(canvas)                                          # before the canvas is saved

1. All that is drawn is either marked as a part of one element, or as an artifact: lines, tints, page numbers.
2. A flowable that is divided between sheets marks both parts as the same element's.
"""

from __future__ import annotations

from typing import Any, Self


class Element:
    """One element: its parts are elements below it, and marked content by (sheet, number)."""

    __slots__ = ("alternative", "parts", "role", "scope", "tags")

    def __init__(self, tags: Tags, role: str, *, alternative: str = "", scope: str = "") -> None:
        self.tags, self.role, self.alternative, self.scope = tags, role, alternative, scope
        self.parts: list[Element | tuple[int, int]] = []

    def add(self, role: str, *, alternative: str = "", scope: str = "") -> Element:
        """A new element below."""
        made = Element(self.tags, role, alternative=alternative, scope=scope)
        self.parts.append(made)
        return made


class Tags:
    """The elements of one document, and which marked content is whose, by sheet."""

    def __init__(self) -> None:
        self.root = Element(self, "Document")
        self._marked: dict[int, list[Element]] = {}

    def begin(self, canvas: Any, element: Element) -> None:
        """What is drawn from now on is of this element, until `end`."""
        sheet = canvas.getPageNumber() - 1
        marked = self._marked.setdefault(sheet, [])
        element.parts.append((sheet, len(marked)))
        canvas._code.append(f"/{element.role} <</MCID {len(marked)}>> BDC")
        marked.append(element)

    def write(self, canvas: Any) -> None:
        """Put the structure into the document; its sheets are all there."""
        from reportlab.pdfbase.pdfdoc import PDFArray, PDFDictionary, PDFName, PDFString

        document, sheets = canvas._doc, canvas._doc.Pages.pages
        references: dict[int, Any] = {}
        root = PDFDictionary({"Type": PDFName("StructTreeRoot")})
        top = document.Reference(root)

        def written(element: Element, parent: Any) -> Any:
            made = PDFDictionary({"Type": PDFName("StructElem"), "S": PDFName(element.role), "P": parent})
            reference = references[id(element)] = document.Reference(made)
            if element.alternative:
                made["Alt"] = PDFString(element.alternative)
            if element.scope:
                made["A"] = PDFDictionary({"O": PDFName("Table"), "Scope": PDFName(element.scope)})
            made["K"] = PDFArray(
                [
                    written(part, reference)
                    if isinstance(part, Element)
                    else PDFDictionary(
                        {
                            "Type": PDFName("MCR"),
                            "Pg": document.Reference(sheets[part[0]]),
                            "MCID": part[1],
                        }
                    )
                    for part in element.parts
                ]
            )
            return reference

        root["K"] = written(self.root, top)
        numbers: list[Any] = []
        for number, sheet in enumerate(sheets):
            sheet.__NoDefault__ = [*sheet.__NoDefault__, "StructParents", "Tabs"]
            sheet.StructParents, sheet.Tabs = number, PDFName("S")
            owners = [references[id(element)] for element in self._marked.get(number, ())]
            numbers += [number, PDFArray(owners)]
        root["ParentTree"] = document.Reference(PDFDictionary({"Nums": PDFArray(numbers)}))
        root["ParentTreeNextKey"] = len(sheets)
        document.Catalog.StructTreeRoot = top
        document.Catalog.MarkInfo = PDFDictionary({"Marked": "true"})
        document.Catalog.ViewerPreferences = PDFDictionary({"DisplayDocTitle": "true"})


class _Artifact:
    """Drawn, and nothing that is read."""

    def __init__(self, canvas: Any) -> None:
        self._code = canvas._code

    def __enter__(self) -> Self:
        self._code.append("/Artifact BMC")
        return self

    def __exit__(self, *_: object) -> None:
        self._code.append("EMC")


artifact = _Artifact


def tagged(base: Any) -> Any:
    """This class of flowables, whose objects mark what they draw where they have a `tag`."""

    class Tagged(base):  # type: ignore[misc]
        tag: Element | None = None

        def draw(self) -> None:
            """As it was, between marks."""
            if self.tag is None:
                super().draw()
                return
            self.tag.tags.begin(self.canv, self.tag)
            super().draw()
            self.canv._code.append("EMC")

        def split(self, *room: Any) -> list[Any]:
            """Rule 2."""
            parts: list[Any] = super().split(*room)
            for part in parts:
                part.tag = self.tag
            return parts

    return Tagged


def ruled(base: Any) -> Any:
    """This class of tables, whose lines and tints are artifacts."""

    class Ruled(base):  # type: ignore[misc]
        def _drawBkgrnd(self) -> None:  # noqa: N802 - reportlab names it
            with artifact(self.canv):
                super()._drawBkgrnd()

        def _drawLines(self) -> None:  # noqa: N802 - reportlab names it
            with artifact(self.canv):
                super()._drawLines()

    return Ruled
