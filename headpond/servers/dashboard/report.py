"""A report: the dashboard's pages of some runs in one HTML file, with the answers that they ask for inside.

The same scripts draw the same pictures, without a server. The file runs its own script only and loads nothing.
"""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson

from headpond.errors import HeadpondError
from headpond.ledger.pages import Filter
from headpond.ledger.states import RolloutState
from headpond.servers.dashboard.dashboard import STATIC
from headpond.servers.dashboard.run_view import RunView
from headpond.store import atomic

# Each module comes after those that it needs.
MODULES = ("dom.js", "data.js", "charts.js", "pages/conversation.js", "pages/tokens.js", "pages/overview.js",
           "pages/waterfall.js", "pages/rollouts.js", "pages/group.js", "pages/rollout.js", "pages/compare.js",
           "app.js")  # fmt: skip
IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
EXPORT = re.compile(r"^export ", re.MULTILINE)
# Groups of the last steps that the report has with their rollouts.
GROUPS = 4
# Rollouts with their conversations and first tokens: about 100 kB each.
ROLLOUTS_MOST = 16
PAGE = 50  # LIMIT of pages/rollouts.js
TOKENS = 1024  # COUNT of pages/tokens.js
READS_MOST = 10_000  # of a waterfall: each sums at least one block
FILE_NAME = "report.html"


def write_report(run_dirs: list[Path], path: Path | None = None, *, tokenizer: str | None = None) -> Path:
    """Write the report of these runs, by default to report.html in the directory of the first."""
    runs = [RunView(directory, tokenizer) for directory in run_dirs]
    target = path or runs[0].path / FILE_NAME
    answers: dict[str, Any] = {"runs": {"runs": [run.summary() for run in runs]}}
    for number, run in enumerate(runs):
        answers |= {f"runs/{number}/{name}": answer for name, answer in _answers(run).items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(target, page(answers).encode())
    return target


def page(answers: dict[str, Any]) -> str:
    style, script = (STATIC / "style.css").read_text(), bundle()
    allowed = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:"
    # "</script>" in a text would end the element.
    data = orjson.dumps(answers).decode().replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>Headpond</title><style>{style}</style></head>'
        '<body><header id="top"></header><div id="banner"></div><main id="main" tabindex="-1"></main>'
        f'<script type="application/json" id="report-data">{data}</script>'
        f'<script type="module">{script}</script></body></html>'
    )


def bundle() -> str:
    """All modules as one: their top-level names differ, which `test_report` checks."""
    texts = (EXPORT.sub("", IMPORT.sub("", (STATIC / name).read_text())) for name in MODULES)
    return "\n".join(texts)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _answers(run: RunView) -> dict[str, Any]:
    """Map addresses that the pages ask at -> answers. Files that cannot be read are left out."""
    while not run.curves([])["complete"]:
        pass
    answers: dict[str, Any] = {"overview": run.overview(), "curves": run.curves([]), "settings": run.settings()}
    answers["why"] = {"causes": answers["overview"]["waiting_for"]}
    try:
        for _ in range(READS_MOST):
            answers["waterfall"] = run.waterfall()
            if answers["waterfall"]["read_share"] >= 1:
                break
        answers |= _pages(run, answers["waterfall"])
        answers |= _groups(run)
    except HeadpondError as error:
        answers["overview"]["ledger_error"] = str(error)
    return answers


def _pages(run: RunView, fall: dict[str, Any]) -> dict[str, Any]:
    """The first page of all rollouts, of the rollouts of each of the last steps, and of every loss."""
    steps = [int(line["step"]) for line in run.overview()["last_steps"]]
    wanted = [({}, Filter()), *(({"step": str(step)}, Filter(step=step)) for step in steps)]
    for stage in fall["stages"]:
        for one in stage["lost"]:
            words = {"state": one["state"], "reason": one["reason"], "generated": None if one["generated"] else "false"}
            found = Filter(
                state=RolloutState(one["state"]), reason=one["reason"], lost_before_generation=not one["generated"]
            )
            wanted.append(({name: value for name, value in words.items() if value}, found))
    return {
        f"rollouts?{urlencode({**words, 'limit': PAGE})}": run.rollouts(found, None, PAGE) | {"next": None}
        for words, found in wanted
    }


def _groups(run: RunView) -> dict[str, Any]:
    """Return the newest delivered groups, their rollouts and conversations."""
    rows = [
        row
        for line in run.overview()["last_steps"][:2]
        for row in run.rollouts(Filter(step=int(line["step"])), None, PAGE)["rows"]
    ]
    groups = list(dict.fromkeys(row["group"] for row in rows))[:GROUPS]
    answers: dict[str, Any] = {f"groups/{group}": run.group(group) for group in groups}
    rollouts = [row["id"] for group in groups for row in answers[f"groups/{group}"]["rollouts"]]
    for id in rollouts[:ROLLOUTS_MOST]:
        answers[f"rollouts/{id}"] = run.rollout(id)
        answers[f"rollouts/{id}/conversation"] = run.conversation(id)
        answers[f"rollouts/{id}/tokens?start=0&count={TOKENS}"] = run.tokens(id, 0, TOKENS)
    return answers
