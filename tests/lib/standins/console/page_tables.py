"""Tables of a page, as text."""

from __future__ import annotations

import html
import re


def rows_of(page: str, caption: str) -> list[list[str]]:
    """The cells of the table with this caption, row by row, as text."""
    [table] = [part for part in page.split("<table")[1:] if f'<caption class="hidden">{caption}<' in part]
    body = table.split("</thead>")[1].split("</table>")[0]
    return [
        [html.unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in re.findall(r"<tr\b[^>]*>(.*?)</tr>", body, re.DOTALL)
    ]
