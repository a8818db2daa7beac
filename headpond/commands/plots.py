"""Small SVG pictures of numbers, for `--plot`: they need no library and open in any browser."""

from collections.abc import Sequence
from html import escape

WIDTH, SIDE, ROW = 720, 420, 34
LABEL, MARGIN = 260, 48
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
        _text(MARGIN, SIDE - 26, f"{low:.3g}", "soft"), _text(SIDE - MARGIN, SIDE - 26, f"{high:.3g}", "soft", "end"),
        _text(SIDE / 2, SIDE - 10, x, anchor="middle"), _text(12, SIDE / 2, y),
    ]  # fmt: skip
    lines = [
        _line(MARGIN, SIDE - MARGIN, SIDE - MARGIN, MARGIN),
        _line(MARGIN, SIDE - MARGIN, SIDE - MARGIN, SIDE - MARGIN),
        _line(MARGIN, SIDE - MARGIN, MARGIN, MARGIN),
    ]
    return _picture(SIDE, SIDE, [_text(MARGIN, 24, title, "title"), *lines, *dots, *ends])


def target_bars(title: str, targets: Sequence[tuple[str, float, float, bool]]) -> str:
    """(name, value, limit, met) of each target: its value as a share of twice the limit, or of itself."""
    parts = [_text(16, 26, title, "title")]
    for row, (name, value, limit, met) in enumerate(targets):
        top, space = 48 + ROW * row, WIDTH - LABEL - 110
        whole = max(abs(value), 2 * abs(limit)) or 1.0
        mark = LABEL + space * abs(limit) / whole
        parts += [
            _text(LABEL - 10, top + 14, name, anchor="end"),
            _bar(LABEL, top, space * abs(value) / whole, "bar" if met else "miss"),
            _line(mark, top - 4, mark, top + 22, "limit"),
            _text(WIDTH - 100, top + 14, f"{value:,.4g}  ({limit:,.4g})"),
        ]
    return _picture(WIDTH, 60 + ROW * len(targets), parts)


def _picture(width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return f"{head}<style>{STYLE}</style>{''.join(parts)}</svg>\n"


def _text(x: float, y: float, text: str, cls: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{cls}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, cls: str = "axis") -> str:
    return f'<line class="{cls}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _bar(x: float, y: float, width: float, cls: str) -> str:
    return f'<rect class="{cls}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="18" rx="2"/>'
