import re
import subprocess
import sys

from bench import ROOT
from bench.__main__ import Bench


def test_the_help_describes_every_benchmark() -> None:
    command = [sys.executable, "-m", "bench", "--help"]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    described = [line.split()[0] for line in text.splitlines() if re.match(r"  [a-z-]+ {2,}\w", line)]
    assert [name for name in described if name in list(Bench)] == list(Bench)
