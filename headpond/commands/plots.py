"""Small SVG pictures of numbers, for `--plot`: they need no library and open in any browser."""

from collections.abc import Sequence
from html import escape

SIDE, MARGIN = 420, 48
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#33424a}.title{font-size:15px;font-weight:600}.soft{fill:#71828a}"
    ".axis{stroke:#d5dcdf}.bar{fill:#0f6e84}.miss{fill:#b3372b}.limit{stroke:#c2621b;stroke-width:2}"
    ".point{fill:#0f6e84;fill-opacity:.55}@media(prefers-color-scheme:dark){svg{background:#101416}"
    "text{fill:#e4eaec}.axis{stroke:#2a3338}.bar,.point{fill:#5cc3da}}"
)


def scatter(title: str, points: Sequence[tuple[float, float]], *, x: str, y: str) -> str:
    """Equal scales and the diagonal: what lies on it has not changed."""
    values = [value for point in points for value in point] or [0.0]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 1, high + 1
    inner = SIDE - 2 * MARGIN

    def place(value: float) -> float:
        return MARGIN + inner * (value - low) / (high - low)

    dots = [f'<circle class="point" cx="{place(a):.1f}" cy="{SIDE - place(b):.1f}" r="3.5"/>' for a, b in points]
    ends = [
        text(MARGIN, SIDE - 26, f"{low:.3g}", "soft"), text(SIDE - MARGIN, SIDE - 26, f"{high:.3g}", "soft", "end"),
        text(SIDE / 2, SIDE - 10, x, anchor="middle"), text(12, SIDE / 2, y),
    ]  # fmt: skip
    lines = [
        line(MARGIN, SIDE - MARGIN, SIDE - MARGIN, MARGIN),
        line(MARGIN, SIDE - MARGIN, SIDE - MARGIN, SIDE - MARGIN),
        line(MARGIN, SIDE - MARGIN, MARGIN, MARGIN),
    ]
    return picture(SIDE, SIDE, [text(MARGIN, 24, title, "title"), *lines, *dots, *ends])


def picture(width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return f"{head}<style>{STYLE}</style>{''.join(parts)}</svg>\n"


def text(x: float, y: float, text: str, cls: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{cls}" text-anchor="{anchor}">{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, cls: str = "axis") -> str:
    return f'<line class="{cls}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
