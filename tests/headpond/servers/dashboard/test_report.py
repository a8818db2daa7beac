import re
from collections import Counter
from pathlib import Path

from support.run_dirs import make_run

from headpond.servers.dashboard.dashboard import STATIC
from headpond.servers.dashboard.report import MODULES, bundle, page, write_report

DECLARED = re.compile(r"^(?:async )?(?:function|class|let|const) (\w+)(?:.*?, (\w+) = )?", re.MULTILINE)


def test_a_report_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", conversations=[[{"role": "user", "content": "</script><script>bad()</script>"}]])
    path = write_report([run.path])
    text = path.read_text()
    assert path == run.path.resolve() / "report.html"
    assert "default-src 'none'; script-src 'sha256-" in text
    assert not re.search(r"""(?:src|href)=["'](?!#)""", text.split("</style>")[1].split('<script type="module">')[0])
    assert text.count("</script>") == 2
    assert "bad()" in text


def test_the_report_of_a_run_whose_ledger_is_elsewhere_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for file in run.path.glob("ledger.sqlite*"):
        file.unlink()
    assert "there is no ledger at" in write_report([run.path], tmp_path / "out" / "report.html").read_text()


def test_every_module_is_in_the_bundle_and_their_names_differ() -> None:
    assert sorted(MODULES) == sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.js"))
    text = bundle()
    assert not re.search(r"^(import|export)\b", text, re.MULTILINE)
    names = Counter(name for found in DECLARED.findall(text) for name in found if name)
    assert [name for name, times in names.items() if times > 1] == []


def test_text_cannot_end_the_element_that_holds_it() -> None:
    assert "</script><b>" not in page({"runs": {"runs": ["</script><b>"]}})
