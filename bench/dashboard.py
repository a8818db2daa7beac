"""`python -m bench dashboard`: server time of every page, memory and first paint, of a run of 1,000,000 rollouts.

Server time is what the server says in `Server-Timing`; its CPU time does not depend on what else the machine does.
First paint needs Chromium on PATH and is left out without it.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from bench.harness.ledger_maker import make_ledger
from bench.harness.procfs import cpu_s, resident_bytes
from bench.harness.report import Report, Target, median

ROLLOUTS, QUICK_ROLLOUTS = 1_000_000, 20_000
ROUNDS = 5
MEGABYTE = 1e6
START = "import sys; from headpond.commands.main import main; sys.argv[0] = 'headpond'; main()"
PAGES = {
    "overview": ["overview"],
    "curves": ["curves"],
    "waterfall": ["waterfall"],
    "rollouts": ["rollouts", "rollouts?before=g0001200-0"],
    "filtered": ["rollouts?state=filtered&reason=zero_variance", "rollouts?state=dead", "rollouts?reason=none"],
    "step": ["rollouts?step=3"],
    "group": ["groups/g0001201"],
    "rollout": ["rollouts/g0001201-3", "rollouts/g0001201-3/conversation", "rollouts/g0001201-3/tokens"],
}
CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=5000",
            "--dump-dom"]  # fmt: skip
SUMMED_MOST = 2000  # requests until the waterfall is summed


def run(*, quick: bool) -> Report:
    with tempfile.TemporaryDirectory(prefix="headpond-bench-") as directory:
        run_dir = _make_run(Path(directory) / "run", QUICK_ROLLOUTS if quick else ROLLOUTS)
        with _serving(run_dir) as (url, pid):
            times, calls = _times(url)
            cpu = {name: _cpu_s(url, pid, paths) for name, paths in PAGES.items()}
            paints = [paint for _ in range(ROUNDS) if (paint := _first_paint_s(url, directory)) is not None]
            memory = resident_bytes(pid) / MEGABYTE
    figures = {f"{name}, s": max(values) for name, values in times.items()}
    figures |= {f"{name}, s of CPU": seconds for name, seconds in cpu.items()}
    targets = [
        Target(name="server time of a page, s", value=max(median(values) for values in times.values()), limit=0.1),
        Target(name="CPU time of a page, s", value=max(cpu.values()), limit=0.1),
        Target(name="memory, MB", value=memory, limit=200),
    ]
    if paints:
        targets.append(Target(name="first paint, s", value=median(paints), limit=0.3))
    figures |= {"rollouts": QUICK_ROLLOUTS if quick else ROLLOUTS, "calls until the waterfall is summed": calls}
    return Report(bench="dashboard", figures=figures, targets=targets, rounds=ROUNDS, quick=quick)


def _make_run(path: Path, rollouts: int) -> Path:
    path.mkdir()
    make_ledger(path / "ledger.sqlite", rollouts)
    identity = {"run": "0123456789ab", "ledger": "ledger.sqlite", "store": "store", "redis": "redis://127.0.0.1:6379/0"}
    (path / "run.json").write_text(json.dumps({**identity, "settings": {"seed": 0}}))
    keys = ("reward_mean", "tokens_per_s", "staleness_mean", "staleness_max", "completion_tokens/mean", "time/step_s")
    lines = ({"step": step, **dict.fromkeys(keys, step * 7919 % 1000 / 1000)} for step in range(rollouts // 2048))
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@contextmanager
def _serving(run_dir: Path) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-c", START, "dashboard", str(run_dir), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "the dashboard did not start"
        yield found[0], process.pid
    finally:
        process.terminate()
        process.wait(10)


def _times(url: str) -> tuple[dict[str, list[float]], int]:
    """Server time of each kind of page, and the calls that summed the waterfall."""
    times: dict[str, list[float]] = defaultdict(list)
    calls = 0
    for _ in range(SUMMED_MOST):
        seconds, content = _get(f"{url}api/runs/0/waterfall")
        times["waterfall"].append(seconds)
        calls += 1
        if json.loads(content)["read_share"] >= 1:
            break
    for _ in range(ROUNDS):
        for name, paths in PAGES.items():
            times[name] += [_get(f"{url}api/runs/0/{path}")[0] for path in paths]
        times["files"].append(sum(_get(f"{url}{path}")[0] for path in ("", "static/app.js", "static/style.css")))
    return dict(times), calls


def _cpu_s(url: str, pid: int, paths: list[str]) -> float:
    """Of the server, for the costliest of the paths, the mean of ROUNDS requests."""
    costs: list[float] = []
    for path in paths:
        before = cpu_s(pid)
        for _ in range(ROUNDS):
            _get(f"{url}api/runs/0/{path}")
        costs.append((cpu_s(pid) - before) / ROUNDS)
    return max(costs)


def _get(url: str) -> tuple[float, bytes]:
    with urlopen(url, timeout=60) as response:  # noqa: S310 - of the server above
        found = re.search(r"dur=([\d.]+)", response.headers["Server-Timing"])
        assert found
        return float(found[1]) / 1000, response.read()


def _first_paint_s(url: str, directory: str) -> float | None:
    chromium = shutil.which("chromium")
    if chromium is None:
        return None
    with tempfile.TemporaryDirectory(dir=directory) as profile:
        command = [chromium, *CHROMIUM, f"--user-data-dir={profile}", url]
        text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'data-first-paint-ms="(\d+)"', text)
    return int(found[1]) / 1000 if found else None
