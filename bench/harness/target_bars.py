"""A picture of a benchmark's targets, for `--plot`."""

from bench.harness.report import Report
from headpond.commands.plots import line, picture, text

WIDTH, ROW, LABEL = 720, 34, 260


def target_bars(report: Report) -> str:
    """Each target's value as a share of twice its limit, or of itself."""
    parts = [text(16, 26, f"python -m bench {report.bench}", "title")]
    for row, target in enumerate(report.targets):
        top, space = 48 + ROW * row, WIDTH - LABEL - 110
        whole = max(abs(target.value), 2 * abs(target.limit)) or 1.0
        mark, width = LABEL + space * abs(target.limit) / whole, space * abs(target.value) / whole
        css = "bar" if target.met else "miss"
        parts += [
            text(LABEL - 10, top + 14, f"{target.name} ({target.sense})", anchor="end"),
            f'<rect class="{css}" x="{LABEL}" y="{top}" width="{width:.1f}" height="18" rx="2"/>',
            line(mark, top - 4, mark, top + 22, "limit"),
            text(WIDTH - 100, top + 14, f"{target.value:,.4g}  ({target.limit:,.4g})"),
        ]
    return picture(WIDTH, 60 + ROW * len(report.targets), parts)
